//! Wraps the eventfds for kicks, calls and errors.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use anyhow::Result;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

/// An eventfd. Clones share the counter.
#[derive(Debug)]
pub struct Eventfd(OwnedFd);

impl Eventfd {
    /// Creates an eventfd with the count 0.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn new() -> Result<Eventfd> {
        Ok(Eventfd(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Returns another descriptor of the same counter.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn try_clone(&self) -> Result<Eventfd> {
        Ok(Eventfd(self.0.try_clone()?))
    }

    /// Adds one to the counter.
    pub fn signal(&self) {
        // Only a full counter refuses, and a full counter is signalled already.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Resets the counter and returns its value.
    pub fn take(&self) -> u64 {
        let mut count = [0; 8];
        match rustix::io::read(&self.0, &mut count) {
            Ok(8) => u64::from_ne_bytes(count),
            _ => 0,
        }
    }

    /// Waits until the counter is above 0. Returns `false` if the deadline passes first.
    ///
    /// # Errors
    /// The descriptor cannot be polled.
    pub fn wait(&self, deadline: Instant) -> Result<bool> {
        loop {
            let left = Timespec::try_from(deadline.saturating_duration_since(Instant::now()))?;
            match poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&left)) {
                Ok(ready) => return Ok(ready > 0),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl From<OwnedFd> for Eventfd {
    fn from(fd: OwnedFd) -> Eventfd {
        Eventfd(fd)
    }
}

impl AsFd for Eventfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
