//! Waking a worker from another thread.

use kickless_sync::Latch;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, read, write};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// An eventfd that any thread may signal. Clones signal the same one.
#[derive(Clone, Debug)]
pub struct Waker(Arc<Event>);

#[derive(Debug)]
struct Event {
    fd: OwnedFd,
    latch: Latch,
}

impl Waker {
    /// Makes a new one, not signalled.
    ///
    /// # Errors
    /// The process or the host is out of descriptors or memory.
    pub fn new() -> io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self(Arc::new(Event { fd, latch: Latch::default() })))
    }

    /// Makes the descriptor readable. Several calls before [`Waker::clear`] count as one.
    pub fn wake(&self) {
        // A full counter is readable as well. Nothing else can fail.
        while write(&self.0.fd, &1u64.to_ne_bytes()) == Err(Errno::INTR) {}
        self.0.latch.set();
    }

    /// Makes the descriptor unreadable. Returns whether it was readable. Callers must look for work *after*
    /// this, never before.
    pub fn clear(&self) -> bool {
        let mut count = [0; 8];
        let result = loop {
            match read(&self.0.fd, &mut count) {
                Err(Errno::INTR) => {}
                result => break result,
            }
        };
        self.0.latch.clear();
        result.is_ok()
    }

    /// Returns the latch that a model waits for instead of the descriptor.
    #[cfg(loom)]
    pub fn latch(&self) -> &Latch {
        &self.0.latch
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_share_one_signal() {
        let waker = Waker::new().unwrap();
        assert!(!waker.clear());
        waker.clone().wake();
        waker.wake();
        assert!(waker.clear());
        assert!(!waker.clear());
    }
}
