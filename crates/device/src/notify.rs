//! Eventfds in both directions.

use rustix::event::epoll;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Takes a descriptor that the front-end sent; from then on no read or write of ours waits on it.
fn without_waiting(fd: OwnedFd) -> io::Result<OwnedFd> {
    fcntl_setfl(&fd, fcntl_getfl(&fd)? | OFlags::NONBLOCK)?;
    Ok(fd)
}

/// The driver tells the device: a descriptor that becomes readable with each kick.
#[derive(Debug)]
pub struct Kick(OwnedFd);

impl Kick {
    /// Takes the descriptor that came with SET_VRING_KICK.
    ///
    /// # Errors
    /// It cannot be waited for (a regular file, say).
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        let probe = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&probe, &fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        Ok(Self(without_waiting(fd)?))
    }

    /// Another descriptor for the same kicks.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// Takes what has been kicked so far; the number of kicks, if it is an eventfd.
    ///
    /// While a worker waits for the descriptor it never reads it: an edge-triggered wait tells of each kick by itself. But what
    /// is left in it when the queue stops would make the front-end, which takes the descriptor back, see a kick that
    /// was already served.
    pub fn take(&self) -> u64 {
        let mut count = [0; 8];
        match rustix::io::read(&self.0, &mut count) {
            Ok(8) => u64::from_ne_bytes(count),
            _ => 0,
        }
    }
}

impl AsFd for Kick {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The device tells the driver (or, for the error descriptor, the front-end): a descriptor that is written to.
#[derive(Debug)]
pub struct Call(OwnedFd);

impl Call {
    /// Takes the descriptor that came with SET_VRING_CALL or SET_VRING_ERR.
    ///
    /// # Errors
    /// Its flags cannot be changed.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        Ok(Self(without_waiting(fd)?))
    }

    /// Another descriptor for the same calls.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// Signals it. A counter that is full has been signalled already; a descriptor that cannot be written to is the
    /// front-end's own loss.
    pub fn signal(&self) {
        while rustix::io::write(&self.0, &1u64.to_ne_bytes()) == Err(Errno::INTR) {}
    }
}
