//! Events of the far side of a task: a descriptor that the task serves beside its ring.

use std::os::fd::BorrowedFd;

/// The descriptor of a task's far side (a TAP, a socket, an inbox), and what the task waits for there.
#[derive(Clone, Copy, Debug)]
pub struct Event<'a> {
    /// The descriptor.
    pub fd: BorrowedFd<'a>,
    /// The readiness that ends the task's sleep.
    pub interest: Interest,
}

/// The readiness of a descriptor that a task waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Interest {
    /// None. The task does not wait for its far side.
    #[default]
    None,
    /// The far side has something to read.
    Readable,
    /// The far side accepts writes.
    Writable,
}
