//! Failures of taking rights away.

use std::io;

/// A right that could not be taken from this process, or a process that could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The threads of this process cannot be counted.
    #[error("/proc/self/task cannot be read, so the sandbox cannot count the threads of this process")]
    NoProc(#[source] io::Error),
    /// This process has threads, which would keep their rights, or their locks in a copy of this process.
    #[error("the sandbox has to be set up by the only thread of this process, and there are {0}")]
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
}
