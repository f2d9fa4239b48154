//! Installs the filters of each profile, and makes each call.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::collections::BTreeSet;
use std::os::unix::process::ExitStatusExt;
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

use common::{block_signals, call, child, fork_fails_with, in_child};
use kickless_sandbox::{
    Call, DATA, DATA_WITH_RBD, EXPORTER, Error, OPENER, Profile, Row, Stray, Test, UNKNOWN_FROM, lock,
};
use libc::c_long;
use rustix::thread::{gettid, set_no_new_privs};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, apply_filter};

/// A descriptor and an address that are wrong.
const WRONG: usize = usize::MAX;
/// Calls that have an effect with any arguments.
const WITH_EFFECT: [c_long; 4] =
    [libc::SYS_clone, libc::SYS_rt_sigreturn, libc::SYS_exit, libc::SYS_exit_group];
/// `uretprobe` and `uprobe` of x86, which newer kernels hide from filters. They raise SIGILL, except in code
/// that the kernel puts into a process.
const UNSEEN: [usize; 2] = [335, 336];

fn locked(profile: &Profile) -> Option<&'static kickless_sandbox::Refusals> {
    set_no_new_privs(true).unwrap();
    lock(profile).unwrap()
}

/// Returns values that hold, and some that do not.
fn values(test: Test) -> (Vec<usize>, Vec<usize>) {
    let own = std::process::id() as usize;
    match test {
        // The kernel does not look at the upper half of these arguments.
        Test::OneOf(values) => {
            let values: Vec<_> = values.iter().map(|value| *value as usize).collect();
            (values.iter().copied().chain([values[0] | 1 << 32]).collect(), vec![0x5a5a_5a5a, WRONG])
        }
        Test::Bits { mask, value } => {
            let wrong = value ^ (mask & mask.wrapping_neg());
            (vec![value as usize], vec![wrong as usize, wrong as usize | 1 << 32])
        }
        Test::OwnProcess => (vec![own], vec![1, 0, WRONG]),
        Test::Null => (vec![0], vec![8, 1 << 32]),
    }
}

/// Returns arguments that a row allows, with which a call does nothing.
fn harmless(row: &Row, call: &Call) -> [usize; 6] {
    let mut args = [WRONG, 0, 0, 0, 0, 0];
    if call.number == libc::SYS_ppoll {
        // Otherwise it waits without end.
        args[2] = WRONG;
    }
    for condition in row.when {
        args[usize::from(condition.argument)] = values(condition.test).0[0];
    }
    args
}

/// Returns the calls with arguments that the rows allow.
fn allowed(profile: &Profile) -> Vec<(c_long, [usize; 6])> {
    let mut allowed = Vec::new();
    for row in profile.rows() {
        for call in row.calls.iter().filter(|call| !WITH_EFFECT.contains(&call.number)) {
            let args = harmless(row, call);
            allowed.push((call.number, args));
            for condition in row.when {
                for value in values(condition.test).0 {
                    let mut args = args;
                    args[usize::from(condition.argument)] = value;
                    allowed.push((call.number, args));
                }
            }
        }
    }
    allowed
}

/// Returns the calls with one argument each that no row allows.
fn refused(profile: &Profile) -> Vec<(c_long, [usize; 6])> {
    let mut refused = Vec::new();
    for row in profile.rows() {
        for call in row.calls {
            for condition in row.when {
                for value in values(condition.test).1 {
                    let mut args = harmless(row, call);
                    args[usize::from(condition.argument)] = value;
                    refused.push((call.number, args));
                }
            }
        }
    }
    refused
}

fn has(rows: impl Iterator<Item = &'static Row>, number: usize) -> bool {
    rows.flat_map(|row| row.calls).any(|call| call.number as usize == number)
}

#[test]
fn each_row_allows_its_calls() {
    for profile in [&DATA, &DATA_WITH_RBD, &OPENER, &EXPORTER] {
        in_child(|| {
            let calls = allowed(profile);
            assert!(calls.len() > 50);
            let refusals = locked(profile);
            for (number, args) in calls {
                let _ = call(number, args);
                if let Some(refusals) = refusals {
                    assert_eq!(refusals.all(), [], "{args:x?}");
                }
            }
        });
    }
}

#[test]
fn each_condition_refuses_other_arguments() {
    for profile in [&DATA, &EXPORTER] {
        in_child(|| {
            let calls = refused(profile);
            assert!(calls.len() > 20);
            let refusals = locked(profile).unwrap();
            for (nth, (number, args)) in (1..).zip(calls) {
                assert_eq!(call(number, args), Err(libc::EPERM), "call {number} {args:x?}");
                assert_eq!(refusals.all().iter().map(|refusal| refusal.count).sum::<u32>(), nth, "{args:x?}");
            }
        });
    }
    for nth in 0..refused(&OPENER).len() {
        let status = child(|| {
            // Here, because this process has another id.
            let (number, args) = refused(&OPENER)[nth];
            locked(&OPENER);
            let _ = call(number, args);
        });
        assert_eq!(status.signal(), Some(libc::SIGSYS), "{nth}");
    }
}

#[test]
fn all_other_calls_are_refused_and_have_names() {
    for profile in [&DATA, &EXPORTER] {
        in_child(|| {
            let refusals = locked(profile).unwrap();
            let mut strays = 0;
            for number in (0..UNKNOWN_FROM).filter(|number| !UNSEEN.contains(number)) {
                if !has(profile.rows(), number) && !has(profile.kill.iter(), number) {
                    assert_eq!(call(number as c_long, [WRONG; 6]), Err(libc::EPERM), "{number}");
                    strays += 1;
                }
            }
            let all = refusals.all();
            assert_eq!(all.len(), strays);
            assert!(all.iter().all(|refusal| refusal.count == 1));
            for name in
                ["open", "openat", "io_uring_setup", "kill", "pidfd_open", "seccomp", "connect", "vfork"]
            {
                // The exporter connects.
                let is_allowed = profile.rows().any(|row| row.calls.iter().any(|call| call.name == name));
                let is_here = cfg!(target_arch = "x86_64") || !["open", "vfork"].contains(&name);
                assert_eq!(all.iter().any(|refusal| refusal.call == name), !is_allowed && is_here, "{name}");
            }
        });
    }
}

#[test]
fn calls_of_later_kernels_do_not_exist() {
    // clone3, close_range, openat2, pidfd_getfd, faccessat2, landlock_*, memfd_secret, fchmodat2, none, x32's
    // write.
    for profile in [&DATA, &DATA_WITH_RBD, &OPENER, &EXPORTER] {
        in_child(|| {
            locked(profile);
            for number in [435, 436, 437, 438, 439, 444, 445, 446, 447, 452, 599, 0x4000_0001, -1] {
                assert_eq!(call(number, [WRONG; 6]), Err(libc::ENOSYS), "{number}");
            }
        });
    }
}

#[test]
fn calls_of_an_attacker_end_the_process() {
    let calls: BTreeSet<_> = DATA.kill.iter().flat_map(|row| row.calls).map(|call| call.number).collect();
    for number in &calls {
        let status = child(|| {
            locked(&DATA);
            let _ = call(*number, [WRONG; 6]);
        });
        assert_eq!(status.signal(), Some(libc::SIGSYS), "{number}");
    }
    // The opener has no list of its own: all that it does not need ends it.
    for number in [libc::SYS_execve, libc::SYS_getdents64, libc::SYS_renameat2, libc::SYS_kill] {
        let status = child(|| {
            locked(&OPENER);
            let _ = call(number, [WRONG; 6]);
        });
        assert_eq!(status.signal(), Some(libc::SIGSYS), "{number}");
    }
}

#[test]
#[cfg(target_arch = "x86_64")]
fn calls_of_32_bit_programs_end_the_process() {
    for profile in [&DATA, &OPENER] {
        let status = child(|| {
            locked(profile);
            common::call_of_32_bits();
        });
        // A kernel without them sends SIGSEGV.
        assert!([Some(libc::SIGSYS), Some(libc::SIGSEGV)].contains(&status.signal()), "{status}");
    }
}

#[test]
fn threads_can_be_made_and_processes_cannot() {
    for profile in [&DATA, &EXPORTER] {
        in_child(|| {
            let refusals = locked(profile).unwrap();
            let sum = thread::Builder::new().name("late".into()).spawn(|| 1 + 1).unwrap().join().unwrap();
            assert_eq!((sum, refusals.all().len()), (2, 0));
            assert_eq!(fork_fails_with(), libc::EPERM);
        });
    }
    in_child(|| {
        locked(&OPENER);
        assert_eq!(thread::spawn(|| 1 + 1).join().unwrap(), 2);
    });
}

#[test]
fn threads_that_exist_are_locked_too() {
    in_child(|| {
        let (go, going) = mpsc::channel();
        let (said, saying) = mpsc::channel();
        let early = thread::spawn(move || {
            // It waits in a system call while the filter is installed.
            let () = going.recv().unwrap();
            said.send(call(libc::SYS_getppid, [0; 6])).unwrap();
        });
        locked(&DATA);
        go.send(()).unwrap();
        assert_eq!(saying.recv().unwrap(), Err(libc::EPERM));
        early.join().unwrap();
        assert_eq!(thread::spawn(|| call(libc::SYS_getppid, [0; 6])).join().unwrap(), Err(libc::EPERM));
    });
}

#[test]
fn a_thread_with_another_filter_cannot_be_locked() {
    in_child(|| {
        let (tell, told) = mpsc::channel();
        let (go, going) = mpsc::channel::<()>();
        let other = thread::spawn(move || {
            let rules = [(libc::SYS_getppid, Vec::new())].into_iter().collect();
            let (allow, errno) = (SeccompAction::Allow, SeccompAction::Errno(libc::EPERM as u32));
            let architecture = std::env::consts::ARCH.try_into().unwrap();
            let filter = SeccompFilter::new(rules, allow, errno, architecture).unwrap();
            apply_filter(&BpfProgram::try_from(filter).unwrap()).unwrap();
            tell.send(gettid().as_raw_nonzero().get()).unwrap();
            let _ = going.recv();
        });
        let thread = told.recv().unwrap();
        set_no_new_privs(true).unwrap();
        assert!(matches!(lock(&DATA), Err(Error::Thread(id)) if id == c_long::from(thread)));
        drop(go);
        other.join().unwrap();
    });
}

#[test]
fn a_locked_process_installs_no_other_filter() {
    in_child(|| {
        let first = locked(&EXPORTER).unwrap();
        let refused = lock(&DATA);
        assert!(matches!(refused, Err(Error::Filter(_))));
        assert_eq!(first.all().iter().map(|refusal| refusal.call.as_str()).collect::<Vec<_>>(), ["seccomp"]);
    });
}

#[test]
fn only_the_opener_ends_with_each_stray() {
    assert_eq!(
        [&DATA, &DATA_WITH_RBD, &OPENER, &EXPORTER].map(|profile| profile.stray),
        [Stray::Trap, Stray::Refuse, Stray::Kill, Stray::Trap]
    );
}

/// The kernel answers a call without conditions from a bitmap. However long the list is, such a call takes as
/// long as with a filter of one instruction.
#[test]
#[ignore = "wants an idle machine"]
fn the_list_costs_calls_without_conditions_nothing() {
    in_child(|| {
        let nanoseconds = || {
            let of_a_round = || {
                let begin = Instant::now();
                for _ in 0..200 {
                    let _ = call(libc::SYS_gettid, [0; 6]);
                }
                begin.elapsed().as_nanos() / 200
            };
            (0..20_000).map(|_| of_a_round()).min().unwrap()
        };
        let without = nanoseconds();
        let architecture = std::env::consts::ARCH.try_into().unwrap();
        let (allow, errno) = (SeccompAction::Allow, SeccompAction::Errno(0));
        let filter = SeccompFilter::new([].into_iter().collect(), allow, errno, architecture).unwrap();
        apply_filter(&BpfProgram::try_from(filter).unwrap()).unwrap();
        let short = nanoseconds();
        locked(&DATA);
        let long = nanoseconds();
        assert!(long * 10 <= short * 11, "{without} ns without, {short} ns with a short filter, {long} ns");
    });
}

#[test]
fn a_library_that_blocks_signals_gets_errors() {
    in_child(|| {
        assert!(locked(&DATA_WITH_RBD).is_none());
        // A trap would end the process.
        block_signals();
        let unix_stream = [libc::AF_UNIX as usize, libc::SOCK_STREAM as usize, 0, 0, 0, 0];
        assert_eq!(call(libc::SYS_socket, unix_stream), Err(libc::EPERM));
        assert_eq!(call(libc::SYS_renameat2, [WRONG; 6]), Err(libc::EPERM));
        let inet_stream = [libc::AF_INET as usize, libc::SOCK_STREAM as usize, 0, 0, 0, 0];
        assert!(call(libc::SYS_socket, inet_stream).is_ok());
    });
}
