//! Eventfds: kicks, calls, and what wakes a sleeper of our own.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{read, write};

use crate::error::Error;

/// An eventfd that never blocks.
#[derive(Debug)]
pub(crate) struct Event(OwnedFd);

impl Event {
    pub(crate) fn new() -> Result<Self, Error> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        eventfd(0, flags).map(Self).map_err(Error::os("eventfd"))
    }

    /// Signals it. A counter that is full is signalled already, so no error is one.
    #[inline]
    pub(crate) fn signal(&self) {
        let _ = write(&self.0, &1u64.to_ne_bytes());
    }

    /// Takes what was signalled; whether anything was.
    pub(crate) fn take(&self) -> bool {
        read(&self.0, &mut [0u8; 8]).is_ok()
    }

    /// Another descriptor of the same, to hand out.
    pub(crate) fn duplicate(&self) -> Result<OwnedFd, Error> {
        self.0.try_clone().map_err(|source| Error::Os { what: "eventfd", source })
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
