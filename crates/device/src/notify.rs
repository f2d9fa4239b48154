//! Eventfds for notifications in both directions.
//!
//! The front-end shares each of these descriptors. It can fill or empty the counter, or make it blocking, at
//! any time. So this module only uses reads and writes that never wait. Such reads and writes exist for
//! eventfds, but not for every kind of file. Other files are refused, as the kernel's own vhost does.

use rustix::fs::{FileType, OFlags, fcntl_getfl, fcntl_setfl, fstat};
use rustix::io::{ReadWriteFlags, preadv2};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Accepts an eventfd that the front-end sent. Makes it non-blocking, for hosts that have no better
/// protection.
fn eventfd(fd: OwnedFd) -> io::Result<OwnedFd> {
    let is_eventfd = match kickless_io::is_eventfd(&fd) {
        Some(is_eventfd) => is_eventfd,
        // Without AIO, other anonymous inodes pass too, but no file, pipe, socket or device.
        None => FileType::from_raw_mode(fstat(&fd)?.st_mode) == FileType::Unknown,
    };
    if !is_eventfd {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no eventfd"));
    }
    fcntl_setfl(&fd, fcntl_getfl(&fd)? | OFlags::NONBLOCK)?;
    Ok(fd)
}

/// The eventfd through which the driver notifies the device. It becomes readable with each kick.
#[derive(Debug)]
pub struct Kick(OwnedFd);

impl Kick {
    /// Makes a `Kick` of the descriptor that came with SET_VRING_KICK.
    ///
    /// # Errors
    /// It is no eventfd.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        Ok(Self(eventfd(fd)?))
    }

    /// Duplicates the descriptor, for the same kicks.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// Resets the counter. Returns the number of kicks that it held.
    ///
    /// A worker that waits for kicks never reads the descriptor, because an edge-triggered wait reports each
    /// kick. When the queue stops, the front-end takes the descriptor back. A counter that is not zero would
    /// look to it like a kick that is not served yet.
    pub fn take(&self) -> u64 {
        let mut count = [0; 8];
        // `u64::MAX`: no offset. NOWAIT: never wait, even if the front-end has made the descriptor blocking.
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

/// The eventfd through which the device notifies the driver or, as an error descriptor, the front-end.
#[derive(Debug)]
pub struct Call(OwnedFd);

impl Call {
    /// Makes a `Call` of the descriptor that came with SET_VRING_CALL or SET_VRING_ERR.
    ///
    /// # Errors
    /// It is no eventfd.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        Ok(Self(eventfd(fd)?))
    }

    /// Duplicates the descriptor, for the same calls.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// Signals the eventfd without waiting. A full counter counts as success, because it is signalled
    /// already. Returns `false` if the kernel refuses; a later attempt may succeed.
    pub fn signal(&self) -> bool {
        kickless_io::signal(&self.0)
    }
}

impl AsFd for Call {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::pipe::pipe;

    #[test]
    fn other_files_than_eventfds_are_refused() {
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
        // The front-end makes the descriptor blocking.
        fcntl_setfl(&kick.0, OFlags::empty()).unwrap();
        assert_eq!(kick.take(), 2);
        assert_eq!(kick.take(), 0);
    }
}
