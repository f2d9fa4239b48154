//! Children in which rights are taken, and system calls with arguments that nobody should pass.
#![expect(unsafe_code, reason = "island: fork, plain system calls, blocked signals")]
#![allow(dead_code, reason = "each test uses a part")]

use std::io::{PipeWriter, Read};
use std::os::fd::AsRawFd;
use std::os::unix::process::ExitStatusExt;
use std::panic;
use std::process::ExitStatus;
use std::sync::{Once, OnceLock};

use libc::{c_int, c_long};
use rustix::process::{Resource, Rlimit, setrlimit};

/// Time after which a child is killed.
const SECONDS_MAX: u32 = 60;

/// The pipe for the panic of a child. The parent has none.
static SENTENCE: OnceLock<PipeWriter> = OnceLock::new();

/// Runs `run` in a child with one thread, and returns how it ended. A panic is printed, and is the status
/// 101.
///
/// The process of the tests has other threads. A lock that one of them holds stays locked in the child, so
/// `run` does not print. glibc's `malloc` can be used.
pub(crate) fn child(run: impl FnOnce()) -> ExitStatus {
    // Here, because another thread can hold the lock of the hook when the child is made.
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |panic| match SENTENCE.get() {
            Some(sentence) => {
                let _ = rustix::io::write(sentence, panic.to_string().as_bytes());
                exit(101);
            }
            None => before(panic),
        }));
    });
    let (mut said, sentence) = std::io::pipe().unwrap();
    // SAFETY: the child uses no lock that another thread can hold: see above.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        SENTENCE.set(sentence).unwrap();
        let no = Rlimit { current: Some(0), maximum: Some(0) };
        setrlimit(Resource::Core, no).unwrap();
        // SAFETY: it takes any number.
        unsafe { libc::alarm(SECONDS_MAX) };
        run();
        exit(0);
    }
    assert!(pid > 0);
    drop(sentence);
    let mut text = String::new();
    said.read_to_string(&mut text).unwrap();
    print!("{text}");
    let mut status: c_int = 0;
    // SAFETY: `status` is there during the call.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    ExitStatus::from_raw(status)
}

/// Runs `run` in a child, which is to end well.
pub(crate) fn in_child(run: impl FnOnce()) {
    let status = child(run);
    assert!(status.success(), "{status}");
}

fn exit(status: i32) -> ! {
    // SAFETY: it takes any number, and does not return.
    unsafe { libc::_exit(status) }
}

/// Makes a system call. The tests pass no address of memory that the kernel could write to.
pub(crate) fn call(number: c_long, args: [usize; 6]) -> Result<c_long, c_int> {
    // SAFETY: the kernel checks all arguments, and finds no memory to write to: see above.
    let result = unsafe { libc::syscall(number, args[0], args[1], args[2], args[3], args[4], args[5]) };
    match result {
        -1 => Err(std::io::Error::last_os_error().raw_os_error().unwrap()),
        result => Ok(result),
    }
}

/// Forks by the C library. Returns the error number.
pub(crate) fn fork_fails_with() -> c_int {
    // SAFETY: the child uses nothing, and ends.
    match unsafe { libc::fork() } {
        -1 => std::io::Error::last_os_error().raw_os_error().unwrap(),
        0 => exit(0),
        _ => 0,
    }
}

/// Blocks all signals of this thread.
pub(crate) fn block_signals() {
    // SAFETY: a set of signals is plain data, which `sigfillset` writes.
    let result = unsafe {
        let mut all = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut())
    };
    assert_eq!(result, 0);
}

/// Puts a descriptor in the place of standard error.
pub(crate) fn replace_stderr(by: &impl AsRawFd) {
    // SAFETY: both descriptors are open, and standard error stays a descriptor for writing.
    assert_eq!(unsafe { libc::dup2(by.as_raw_fd(), libc::STDERR_FILENO) }, libc::STDERR_FILENO);
}

/// Sends a signal to this thread.
pub(crate) fn raise(signal: c_int) {
    // SAFETY: it takes any number.
    assert_eq!(unsafe { libc::raise(signal) }, 0);
}

/// Makes `getpid` of 32-bit programs.
#[cfg(target_arch = "x86_64")]
pub(crate) fn call_of_32_bits() {
    // SAFETY: `getpid` has no arguments, and changes only the register of its result.
    unsafe { std::arch::asm!("int 0x80", inout("eax") 20 => _, options(nostack)) };
}

/// Makes a refused `openat` with a wrong address, without the C library. Returns whether errno is as before.
#[cfg(target_arch = "x86_64")]
pub(crate) fn refusal_keeps_errno() -> bool {
    // SAFETY: errno belongs to this thread.
    unsafe { *libc::__errno_location() = libc::EXDEV };
    let result: i64;
    // SAFETY: the kernel checks the address, which is wrong. The call changes three registers.
    unsafe {
        std::arch::asm!("syscall", inout("rax") libc::SYS_openat => result, in("rdi") -1_i64, in("rsi") -1_i64,
            in("rdx") 0, out("rcx") _, out("r11") _);
    }
    // SAFETY: as above.
    let errno = unsafe { *libc::__errno_location() };
    result == -i64::from(libc::EPERM) && errno == libc::EXDEV
}
