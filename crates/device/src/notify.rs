//! Eventfds in both directions.
//!
//! The front-end has each of these descriptors too, and may do to it what it likes: fill its counter, empty it, let its
//! reads and writes wait. So nothing here reads or writes one in a way that could wait. That takes eventfds; of
//! other files nobody could promise it, and they are refused, as the kernel's own vhost refuses them.

use rustix::fs::{FileType, OFlags, fcntl_getfl, fcntl_setfl, fstat, readlinkat};
use rustix::io::{ReadWriteFlags, preadv2};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// Takes an eventfd that the front-end sent. It is made non-blocking, for where the host has no better means.
fn eventfd(fd: OwnedFd) -> io::Result<OwnedFd> {
    if !is_eventfd(&fd)? {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no eventfd"));
    }
    fcntl_setfl(&fd, fcntl_getfl(&fd)? | OFlags::NONBLOCK)?;
    Ok(fd)
}

fn is_eventfd(fd: &OwnedFd) -> io::Result<bool> {
    match readlinkat(rustix::fs::CWD, format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new()) {
        Ok(name) => Ok(name.as_bytes() == b"anon_inode:[eventfd]"),
        // No /proc. What such an inode is for cannot be told then, but it is no file, pipe, socket or device.
        Err(_) => Ok(FileType::from_raw_mode(fstat(fd)?.st_mode) == FileType::Unknown),
    }
}

/// The driver tells the device: an eventfd that becomes readable with each kick.
#[derive(Debug)]
pub struct Kick(OwnedFd);

impl Kick {
    /// Takes the descriptor that came with SET_VRING_KICK.
    ///
    /// # Errors
    /// It is no eventfd.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        Ok(Self(eventfd(fd)?))
    }

    /// Another descriptor for the same kicks.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// Takes what has been kicked so far; the number of kicks.
    ///
    /// While a worker waits for the descriptor it never reads it: an edge-triggered wait tells of each kick by itself. But what
    /// is left in it when the queue stops would make the front-end, which takes the descriptor back, see a kick that
    /// was already served.
    pub fn take(&self) -> u64 {
        let mut count = [0; 8];
        // No offset; and no waiting, whatever the front-end did to the descriptor.
        match preadv2(&self.0, &mut [io::IoSliceMut::new(&mut count)], u64::MAX, ReadWriteFlags::NOWAIT) {
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

/// The device tells the driver (or, for the error descriptor, the front-end): an eventfd that is signalled.
#[derive(Debug)]
pub struct Call(OwnedFd);

impl Call {
    /// Takes the descriptor that came with SET_VRING_CALL or SET_VRING_ERR.
    ///
    /// # Errors
    /// It is no eventfd.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        Ok(Self(eventfd(fd)?))
    }

    /// Another descriptor for the same calls.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// Signals it, without waiting. A counter that is full has been signalled already. Returns `false` where the kernel refuses: it may take the signal
    /// later.
    pub fn signal(&self) -> bool {
        kickless_io::signal(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::pipe::pipe;

    #[test]
    fn only_eventfds() {
        let (end, _) = pipe().unwrap();
        assert_eq!(Kick::new(end).unwrap_err().to_string(), "it is no eventfd");
        let file = std::fs::File::open("/dev/zero").unwrap();
        assert!(Call::new(file.into()).is_err());
        assert!(
            Call::new(rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).unwrap())
                .is_err()
        );
    }

    #[test]
    fn kicks_are_taken_without_waiting() {
        let fd = eventfd(2, EventfdFlags::CLOEXEC).unwrap();
        let kick = Kick::new(fd).unwrap();
        // The other side's doing.
        fcntl_setfl(&kick.0, OFlags::empty()).unwrap();
        assert_eq!(kick.take(), 2);
        assert_eq!(kick.take(), 0);
    }
}
