//! Transfers of frames through one queue of a TAP.

use super::sys::{CREDIT_PIECES_MAX, Frame, Pieces};
use kickless_memory::Iov;
use kickless_spec::net::Header;
use rustix::io::{Errno, read, write};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use zerocopy::IntoBytes;

/// One queue of a TAP, for one task. No call waits or allocates.
#[derive(Debug)]
pub struct TapQueue {
    fd: OwnedFd,
    pieces: Pieces,
}

/// The reason for which a TAP has not taken a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// Its send buffer is full. The descriptor becomes writable.
    #[error("the send buffer of the TAP is full")]
    Full,
    /// The kernel does not accept the frame.
    #[error("the kernel refuses the frame: {0}")]
    Refused(Errno),
    /// The interface is down.
    #[error("the TAP is down")]
    Down,
    /// The interface was deleted.
    #[error("the TAP was deleted")]
    Gone,
}

/// The reason for which a TAP has not delivered a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReceiveError {
    /// There is none. The descriptor becomes readable.
    #[error("the TAP has no frame")]
    Empty,
    /// The read failed, and a frame may be lost.
    #[error("the TAP cannot be read: {0}")]
    Failed(Errno),
    /// The interface was deleted.
    #[error("the TAP was deleted")]
    Gone,
}

impl TapQueue {
    /// The most segments of credit that [`TapQueue::receive`] takes.
    pub const CREDIT_SEGMENTS_MAX: usize = CREDIT_PIECES_MAX;
    /// The longest frame for which a copy that is one piece with the header is cheaper than pieces. The
    /// kernel takes about 0.1 us longer for a list of pieces than for one, which is the time of a copy of
    /// some KiB.
    pub const COPIED_MAX: usize = 2048;

    pub(super) fn new(fd: OwnedFd) -> Self {
        Self { fd, pieces: Pieces::new() }
    }

    /// Returns whether a frame has too many segments for [`TapQueue::send`].
    pub fn is_too_scattered(frame: &Iov) -> bool {
        Pieces::is_too_long(frame)
    }

    /// Sends a frame. Its header is not in `frame`.
    ///
    /// # Errors
    /// The TAP does not take the frame.
    pub fn send(&mut self, header: &Header, frame: &Iov) -> Result<(), SendError> {
        self.write(header, Frame::Guest(frame))
    }

    /// Sends a frame behind its header, both in memory of this process.
    ///
    /// # Errors
    /// The TAP does not take the frame.
    #[inline]
    pub fn send_whole(&mut self, header_and_frame: &[u8]) -> Result<(), SendError> {
        write(&self.fd, header_and_frame).map(|_| ()).map_err(send_error)
    }

    /// Sends a frame that is in memory of this process.
    ///
    /// # Errors
    /// The TAP does not take the frame.
    pub fn send_copy(&mut self, header: &Header, frame: &[u8]) -> Result<(), SendError> {
        self.write(header, Frame::Copy(frame))
    }

    fn write(&mut self, header: &Header, frame: Frame<'_>) -> Result<(), SendError> {
        let Self { fd, pieces } = self;
        // A write is whole or fails, because it is one packet.
        let written = pieces.write(fd.as_fd(), header.as_bytes(), frame);
        written.map(|_| ()).map_err(|error| send_error(errno(&error)))
    }

    /// Receives a frame: its header, then as much as fits into `credit`, then the rest. Returns the number of
    /// bytes without the header. The kernel cuts a frame for which `credit` and `rest` are too short.
    ///
    /// The kernel reports success even if it could not write to the credit, because the memory was taken
    /// away. So this touches the credit that holds the frame, and the caller finds new damage
    /// ([`kickless_memory::fault`]) before it shows the frame to its driver.
    ///
    /// The caller takes the bytes that were written off the credit ([`Iov::advance`]) and then seals it
    /// ([`Iov::seal`]). If no frame came, it is sealed already.
    ///
    /// # Errors
    /// No frame was received.
    #[inline]
    pub fn receive(
        &mut self,
        header: &mut Header,
        credit: &mut Iov,
        rest: &mut [u8],
    ) -> Result<usize, ReceiveError> {
        let Self { fd, pieces } = self;
        let read = pieces.read(fd.as_fd(), header.as_mut_bytes(), credit, rest);
        let error = match read {
            Ok(len) => {
                let len = len.saturating_sub(size_of::<Header>());
                credit.touch_pages(credit.len().min(len as u64));
                return Ok(len);
            }
            Err(error) => receive_error(errno(&error)),
        };
        if error == ReceiveError::Empty {
            credit.seal();
        }
        Err(error)
    }

    /// Receives a frame behind its header, both into `space`. Returns the number of bytes without the header.
    /// The kernel cuts a frame for which `space` is too short.
    ///
    /// # Errors
    /// No frame was received.
    #[inline]
    pub fn receive_copy(&mut self, space: &mut [u8]) -> Result<usize, ReceiveError> {
        let read = read(&self.fd, space).map_err(receive_error)?;
        Ok(read.saturating_sub(size_of::<Header>()))
    }
}

#[cold]
#[inline(never)]
fn send_error(error: Errno) -> SendError {
    match error {
        Errno::AGAIN | Errno::INTR => SendError::Full,
        Errno::IO => SendError::Down,
        Errno::BADFD => SendError::Gone,
        error => SendError::Refused(error),
    }
}

fn receive_error(error: Errno) -> ReceiveError {
    match error {
        Errno::AGAIN | Errno::INTR => ReceiveError::Empty,
        Errno::BADFD => ReceiveError::Gone,
        error => ReceiveError::Failed(error),
    }
}

fn errno(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::INVAL)
}

impl AsFd for TapQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
