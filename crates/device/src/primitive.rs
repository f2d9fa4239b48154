//! What queues and their transport wait with. A model puts what loom watches in its place.

pub(crate) use std::sync::Mutex;

use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// An eventfd of our own: readable from a wake until it is cleared.
#[derive(Debug)]
pub struct Signal(OwnedFd);

impl Signal {
    /// One that has not been given.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Gives it.
    pub fn wake(&self) {
        kickless_io::signal(&self.0);
    }

    /// Takes it back.
    pub fn clear(&self) {
        // Empty is what it is to be.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Signal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
