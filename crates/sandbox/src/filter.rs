//! Makes filters of system calls from profiles, and installs them.
//!
//! A profile gives up to two filters. The kernel runs both, and takes the strictest answer. The first one
//! ends the process for the calls of `kill`. The second one is the list. It begins with three instructions
//! that answer calls from [`UNKNOWN_FROM`] on with ENOSYS, so that libraries do without them, as on an older
//! kernel. This has to be an error number: the C library calls `clone3` with all signals blocked, and a
//! blocked SIGSYS ends the process. seccompiler makes the rest, and checks the architecture first, so 32-bit
//! calls end the process.
#![expect(unsafe_code, reason = "island: installs filters with flags that seccompiler does not have")]

use std::collections::BTreeMap;
use std::{io, iter, process, ptr};

use libc::{c_long, c_uint, c_ulong};
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, sock_filter,
};

use crate::calls::UNKNOWN_FROM;
use crate::error::Error;
use crate::profile::{Condition, Profile, Row, Stray, Test};

/// The filter holds for all threads, and threads that are made later. Without SPEC_ALLOW (Linux 4.17),
/// kernels before 5.16 turn on mitigations for processes with a filter, which cost the data path.
const FLAGS: c_ulong = libc::SECCOMP_FILTER_FLAG_TSYNC | libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW;

/// Returns whether the kernel has filters that hold for all threads.
pub(crate) fn is_available() -> bool {
    // SAFETY: the kernel checks the flags before it reads the program, and refuses a null pointer.
    let result = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            FLAGS,
            ptr::null::<libc::sock_fprog>(),
        )
    };
    result == -1 && io::Error::last_os_error().raw_os_error() == Some(libc::EFAULT)
}

/// Makes the filters of a profile, in the order in which they are installed.
pub(crate) fn compile(profile: &Profile) -> Result<Vec<BpfProgram>, BackendError> {
    let architecture = std::env::consts::ARCH.try_into()?;
    let mut programs = Vec::new();
    if !profile.kill.is_empty() {
        let (allow, kill) = (SeccompAction::Allow, SeccompAction::KillProcess);
        programs
            .push(SeccompFilter::new(rules(profile.kill.iter())?, allow, kill, architecture)?.try_into()?);
    }
    let stray = match profile.stray {
        Stray::Trap => SeccompAction::Trap,
        Stray::Refuse => SeccompAction::Errno(libc::EPERM as u32),
        Stray::Kill => SeccompAction::KillProcess,
    };
    let list: BpfProgram =
        SeccompFilter::new(rules(profile.rows())?, stray, SeccompAction::Allow, architecture)?.try_into()?;
    programs.push(unknown_calls().into_iter().chain(list).collect());
    Ok(programs)
}

/// Installs a filter for all threads of this process. It holds for as long as the process lives.
///
/// # Errors
/// A thread has a filter that this one does not have, or the kernel refuses the filter.
pub(crate) fn install(program: &BpfProgram) -> Result<(), Error> {
    // The kernel and seccompiler have a limit of 4096 instructions.
    let len = u16::try_from(program.len()).map_err(|_| Error::Filter(io::ErrorKind::FileTooLarge.into()))?;
    let program = libc::sock_fprog { len, filter: program.as_ptr().cast_mut().cast() };
    // SAFETY: `program` has `len` instructions, which are there during the call.
    // SAFETY: `sock_filter` of seccompiler and of libc are both the kernel's.
    // SAFETY: the kernel copies the instructions and writes nothing.
    let result =
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, FLAGS, &raw const program) };
    match result {
        0 => Ok(()),
        -1 => Err(Error::Filter(io::Error::last_os_error())),
        thread => Err(Error::Thread(thread)),
    }
}

/// Returns the instructions that answer calls from [`UNKNOWN_FROM`] on, and pass all others on.
fn unknown_calls() -> [sock_filter; 3] {
    let instruction = |code: c_uint, jf, k| sock_filter { code: code as u16, jt: 0, jf, k };
    // The number is the first field of `seccomp_data`. It is unsigned here, so x32's numbers are unknown too.
    [
        instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        instruction(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, 1, UNKNOWN_FROM as u32),
        instruction(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32),
    ]
}

fn rules<'a>(
    rows: impl Iterator<Item = &'a Row>,
) -> Result<BTreeMap<c_long, Vec<SeccompRule>>, BackendError> {
    let mut rules = BTreeMap::<_, Vec<SeccompRule>>::new();
    for row in rows {
        for call in row.calls {
            rules.entry(call.number).or_default().extend(alternatives(row.when)?);
        }
    }
    Ok(rules)
}

/// Returns the rules of which one has to hold, so that all conditions do. A call without conditions has none.
fn alternatives(conditions: &[Condition]) -> Result<Vec<SeccompRule>, BackendError> {
    if conditions.is_empty() {
        return Ok(Vec::new());
    }
    let mut alternatives = vec![Vec::new()];
    for condition in conditions {
        let tests = tests(condition)?;
        alternatives = (alternatives.iter())
            .flat_map(|before| {
                tests.iter().map(move |test| before.iter().chain(iter::once(test)).cloned().collect())
            })
            .collect();
    }
    alternatives.into_iter().map(SeccompRule::new).collect()
}

/// Returns the tests of which one has to hold.
fn tests(condition: &Condition) -> Result<Vec<SeccompCondition>, BackendError> {
    use SeccompCmpArgLen::{Dword, Qword};
    use SeccompCmpOp::{Eq, MaskedEq};

    let test = |len, op, value| SeccompCondition::new(condition.argument, len, op, value);
    match condition.test {
        Test::OneOf(values) => values.iter().map(|&value| test(Dword, Eq, value.into())).collect(),
        Test::Bits { mask, value } => Ok(vec![test(Dword, MaskedEq(mask.into()), value.into())?]),
        Test::OwnProcess => Ok(vec![test(Dword, Eq, process::id().into())?]),
        Test::Null => Ok(vec![test(Qword, Eq, 0)?]),
    }
}
