//! Makes helper processes: copies of this process that run a function instead of a program.
#![expect(unsafe_code, reason = "island: fork, and the descriptors and signals of the new process")]

use std::ffi::CStr;
use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::panic::{self, PanicHookInfo};

use libc::c_int;
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, getpid, getppid, set_parent_process_death_signal, setsid, waitid,
};
use rustix::thread::set_name;

use crate::error::Error;

/// Signals that a terminal or an operator sends to all processes of a service. A helper ends with the process
/// that made it, and not earlier.
const IGNORED: [c_int; 6] =
    [libc::SIGTERM, libc::SIGINT, libc::SIGQUIT, libc::SIGHUP, libc::SIGUSR1, libc::SIGUSR2];

/// A helper process. Dropping this does not end it.
#[derive(Debug)]
pub struct Child {
    pid: Pid,
}

/// The way in which a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It exited with this status.
    Exited(i32),
    /// This signal ended it.
    Killed(i32),
}

/// Makes a process that runs `run` and exits with the status that `run` returns. A panic is one sentence on
/// standard error, and the status 1.
///
/// The new process is killed when this one ends. It has this name, and closes `close`: descriptors that are
/// this process's alone. It ignores the signals of a terminal, but programs that it starts do not. It has all
/// other descriptors and all memory of this process. Nothing of this process is dropped in it.
///
/// # Errors
/// This process has another thread, whose locks would stay locked in the new process, or the kernel makes
/// none.
pub fn fork(
    name: &'static CStr,
    close: &[BorrowedFd<'_>],
    run: impl FnOnce() -> i32 + 'static,
) -> Result<Child, Error> {
    check_only_thread()?;
    let parent = getpid();
    // SAFETY: this process has no other thread, so no lock of the C library or of ours is held in the copy.
    match unsafe { libc::fork() } {
        -1 => Err(Error::Fork(io::Error::last_os_error())),
        0 => {
            // A process that was taken over could keep the helper's sockets open by passing them on.
            let follows = set_parent_process_death_signal(Some(Signal::KILL));
            if follows.is_err() || getppid() != Some(parent) {
                exit(1);
            }
            begin(name, close);
            exit(run())
        }
        pid => Ok(Child { pid: Pid::from_raw(pid).ok_or(Error::Fork(io::ErrorKind::Other.into()))? }),
    }
}

/// The process that [`detach`] has returned in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The one that called.
    Caller,
    /// A copy of it that is no child of the caller, and has no terminal.
    Copy,
}

/// Makes a copy of this process that outlives it. Both go on from here, with the same descriptors.
///
/// The parent of the copy is the first process, or the nearest reaper of orphans. A service manager
/// supervises it like a child of its own.
///
/// # Errors
/// This process has another thread, whose locks would stay locked in the new process, or the kernel makes
/// none.
pub fn detach() -> Result<Side, Error> {
    check_only_thread()?;
    // SAFETY: this process has no other thread, so no lock of the C library or of ours is held in the copy.
    match unsafe { libc::fork() } {
        -1 => Err(Error::Fork(io::Error::last_os_error())),
        0 => {
            // It leads no session, so this cannot fail. Otherwise the copy keeps the terminal.
            let _ = setsid();
            // SAFETY: as above. The copy has the thread that called only.
            match unsafe { libc::fork() } {
                -1 => exit(1),
                0 => Ok(Side::Copy),
                _ => exit(0),
            }
        }
        pid => {
            let between = Child { pid: Pid::from_raw(pid).ok_or(Error::Fork(io::ErrorKind::Other.into()))? };
            match between.wait() {
                Ok(Ended::Exited(0)) => Ok(Side::Caller),
                _ => Err(Error::Fork(io::ErrorKind::OutOfMemory.into())),
            }
        }
    }
}

/// Checks that the calling thread is the only one.
#[allow(clippy::disallowed_methods, reason = "a file of this process, before it loses its paths")]
pub(crate) fn check_only_thread() -> Result<(), Error> {
    match fs::read_dir("/proc/self/task").map_err(Error::NoProc)?.count() {
        1 => Ok(()),
        threads => Err(Error::Threads(threads)),
    }
}

/// Makes a new process a helper.
fn begin(name: &'static CStr, close: &[BorrowedFd<'_>]) {
    let text = name.to_string_lossy();
    panic::set_hook(Box::new(move |panic| {
        say(&text, panic);
        exit(1)
    }));
    // Only `ps` shows it.
    let _ = set_name(name);
    for signal in IGNORED {
        // A handler, because an ignored signal is ignored by programs too that a helper starts.
        // SAFETY: the handler does nothing, so it can interrupt anything.
        unsafe { libc::signal(signal, ignore as extern "C" fn(c_int) as libc::sighandler_t) };
    }
    for fd in close {
        // SAFETY: the descriptor is open, as it is borrowed.
        // SAFETY: its owner is in the memory of the other process. The copy of the owner here is never
        // dropped: `run` borrows nothing (`'static`), and this process ends without unwinding.
        unsafe { libc::close(fd.as_raw_fd()) };
    }
}

extern "C" fn ignore(_signal: c_int) {}

/// Writes a panic as one line. Takes no lock, because this thread may hold that of standard error.
fn say(name: &str, panic: &PanicHookInfo<'_>) {
    let place = panic.location().map(|place| format!(" at {place}")).unwrap_or_default();
    let message = panic.payload_as_str().unwrap_or("no message");
    let _ = rustix::io::write(io::stderr(), format!("{name} panicked{place}: {message}\n").as_bytes());
}

/// Ends this process, with all its threads, and drops nothing.
fn exit(status: i32) -> ! {
    // SAFETY: it takes any number, and does not return.
    unsafe { libc::_exit(status) }
}

impl Child {
    /// Returns the process id.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Returns how the process ended, or `None` if it has not.
    ///
    /// # Errors
    /// The end of the process was asked for before.
    pub fn try_wait(&self) -> io::Result<Option<Ended>> {
        self.ended(WaitIdOptions::EXITED | WaitIdOptions::NOHANG)
    }

    /// Waits until the process has ended.
    ///
    /// # Errors
    /// The end of the process was asked for before.
    pub fn wait(self) -> io::Result<Ended> {
        loop {
            if let Some(ended) = self.ended(WaitIdOptions::EXITED)? {
                return Ok(ended);
            }
        }
    }

    fn ended(&self, options: WaitIdOptions) -> io::Result<Option<Ended>> {
        let status = rustix::io::retry_on_intr(|| waitid(WaitId::Pid(self.pid), options))?;
        Ok(status.map(|status| match status.exit_status() {
            Some(status) => Ended::Exited(status),
            None => Ended::Killed(status.terminating_signal().unwrap_or(0)),
        }))
    }
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(status) => write!(f, "exited with status {status}"),
            Self::Killed(signal) => write!(f, "killed by signal {signal}"),
        }
    }
}
