//! Failures of taking rights away, and kernels that cannot take them.

use std::{fmt, io};

use libc::c_long;

/// A right that could not be taken from this process, or a process that could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The threads of this process cannot be counted.
    #[error("/proc/self/task cannot be read, so the sandbox cannot count the threads of this process")]
    NoProc(#[source] io::Error),
    /// This process has threads, which would keep their rights, or their locks in a copy of this process.
    #[error(
        "the sandbox has to be set up by the only thread of this process, and there are {0}: leave out libraries that start threads (LD_PRELOAD), or give --sandbox=off"
    )]
    Threads(usize),
    /// The kernel makes no process.
    #[error("no process can be made")]
    Fork(#[source] io::Error),
    /// A change of capabilities, limits or no_new_privs.
    #[error("{step} failed")]
    Process {
        /// The change.
        step: &'static str,
        /// The reason.
        source: io::Error,
    },
    /// A call of landlock.
    #[error("landlock: {step} failed")]
    Landlock {
        /// The call.
        step: &'static str,
        /// The reason.
        source: io::Error,
    },
    /// A profile has conditions that no filter can have.
    #[error("the list of system calls cannot be made into a filter")]
    Profile(#[from] seccompiler::BackendError),
    /// The kernel refuses the handler of refused calls.
    #[error("refused system calls cannot be counted")]
    Trap(#[source] io::Error),
    /// The kernel refuses a filter.
    #[error("the kernel refuses the filter of system calls")]
    Filter(#[source] io::Error),
    /// A thread has a filter of its own.
    #[error("the filter of system calls does not reach the thread {0}, which has another one")]
    Thread(c_long),
    /// `strict`, and the kernel lacks something.
    #[error("--sandbox=strict: {0}")]
    Strict(Lack),
}

/// A part of the sandbox that is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lack {
    /// The kernel has no landlock.
    Landlock,
    /// The kernel has no filters of system calls that hold for all threads.
    Filters,
}

impl fmt::Display for Lack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Landlock => {
                "this kernel has no landlock (Linux 5.13, landlock in lsm= of its command line), or a filter refuses it"
            }
            Self::Filters => {
                "this kernel has no filters of system calls for all threads (seccomp, Linux 4.17), or a filter refuses them"
            }
        })
    }
}
