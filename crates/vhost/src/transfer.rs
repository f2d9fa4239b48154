//! The transfer of the device's state between the front-end and this process (SET_DEVICE_STATE_FD).
//!
//! The front-end shares the descriptor. So no operation on it may wait longer than intended, even if another
//! process reads the data first or makes the descriptor blocking. For a pipe, splicing with a private pipe
//! ensures this. For a socket, a flag of each call does. Other descriptors are refused.

use crate::error::RequestError;
use crate::rings::Rings;
use crate::state::{Bounds, SavedState};
use kickless_spec::vhost_user::TransferDirection;
use kickless_vhost_user::{DeviceState, Wait};
use rustix::fs::{FileType, fstat};
use rustix::io::{Errno, read, write};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use rustix::pipe::{PipeFlags, SpliceFlags, pipe_with, splice};
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// The longest time of a transfer, during which its session does nothing else.
const TRANSFER_MAX: Duration = Duration::from_secs(5);
/// The size of a piece. Every pipe accepts it without waiting.
const PIECE: usize = 4096;

/// The reason for which a transfer failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TransferError {
    #[error("it is longer than {0} bytes")]
    TooLong(usize),
    #[error("it is not complete after {} s", TRANSFER_MAX.as_secs())]
    TimedOut,
    #[error("its descriptor fails: {0}")]
    Io(#[from] Errno),
}

/// The transfer that starts after its message was answered, and the result of the last one.
#[derive(Debug, Default)]
pub(crate) struct Transfers {
    next: Option<(TransferFd, Option<Vec<u8>>)>,
    last: Option<bool>,
}

impl Transfers {
    /// Prepares the transfer of SET_DEVICE_STATE_FD.
    pub(crate) fn prepare(
        &mut self,
        state: DeviceState,
        fd: OwnedFd,
        rings: &Rings,
        packed: bool,
    ) -> Result<(), RequestError> {
        self.last = None;
        rings.all_stopped()?;
        let transfer_fd = TransferFd::new(fd).map_err(RequestError::Descriptor)?;
        let bytes = match state.direction {
            TransferDirection::Save => Some(rings.save(packed)?.to_bytes()),
            TransferDirection::Load => None,
        };
        self.next = Some((transfer_fd, bytes));
        Ok(())
    }

    /// Runs the prepared transfer, if there is one. Returns whether a state was loaded.
    pub(crate) fn run(&mut self, rings: &mut Rings, bounds: &Bounds, wait: &Wait<'_>) -> bool {
        let Some((transfer_fd, bytes)) = self.next.take() else { return false };
        let len = bytes.as_ref().map(Vec::len);
        let done: Result<(), Box<dyn std::error::Error>> = match bytes {
            Some(bytes) => transfer_fd.send(&bytes, wait).map_err(Into::into),
            None => transfer_fd
                .receive(bounds.bytes_max(), wait)
                .map_err(Into::into)
                .and_then(|bytes| Ok(rings.load(SavedState::from_bytes(&bytes, bounds)?)?)),
        };
        match (&done, len) {
            (Ok(()), Some(bytes)) => info!(bytes, "state of the device saved"),
            (Ok(()), None) => info!("state of the device loaded"),
            (Err(error), Some(_)) => warn!(%error, "the device's state cannot be saved"),
            (Err(error), None) => warn!(%error, "the device's state cannot be loaded"),
        }
        self.last = Some(done.is_ok());
        done.is_ok() && len.is_none()
    }

    /// Returns the result of the last transfer, until the front-end asks for it.
    pub(crate) fn last(&self) -> Option<bool> {
        self.last
    }

    /// Sets what [`Transfers::last`] has returned in another process.
    pub(crate) fn set_last(&mut self, last: Option<bool>) {
        self.last = last;
    }

    /// Carries out CHECK_DEVICE_STATE. Returns whether the last transfer succeeded.
    pub(crate) fn check(&mut self) -> Result<bool, RequestError> {
        self.last.take().ok_or(RequestError::NoTransfer)
    }
}

/// The deadline of a transfer. A [`Wait`] alone does not enforce it: while the descriptor is ready or has an
/// error, the wait returns at once and does not look at the clock.
struct Deadline<'a> {
    wait: Wait<'a>,
    deadline: Instant,
}

impl<'a> Deadline<'a> {
    fn new(patience: Duration, wait: &Wait<'a>) -> Self {
        Self { wait: wait.at_most(patience), deadline: Instant::now() + patience }
    }

    fn check(&self) -> Result<(), TransferError> {
        if Instant::now() < self.deadline { Ok(()) } else { Err(TransferError::TimedOut) }
    }
}

/// The descriptor for a transfer.
#[derive(Debug)]
pub(crate) enum TransferFd {
    Pipe {
        theirs: OwnedFd,
        /// The reading end and the writing end of our private pipe.
        ours: (OwnedFd, OwnedFd),
    },
    Socket(OwnedFd),
}

impl TransferFd {
    /// Accepts the descriptor that the front-end sent.
    pub(crate) fn new(fd: OwnedFd) -> io::Result<Self> {
        match FileType::from_raw_mode(fstat(&fd)?.st_mode) {
            FileType::Fifo => Ok(Self::Pipe { theirs: fd, ours: pipe_with(PipeFlags::CLOEXEC)? }),
            FileType::Socket => Ok(Self::Socket(fd)),
            _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is neither a pipe nor a socket")),
        }
    }

    /// Writes all `bytes`. The reader sees their end when this is dropped.
    pub(crate) fn send(&self, bytes: &[u8], wait: &Wait<'_>) -> Result<(), TransferError> {
        self.send_within(TRANSFER_MAX, bytes, wait)
    }

    fn send_within(&self, patience: Duration, bytes: &[u8], wait: &Wait<'_>) -> Result<(), TransferError> {
        let limit = Deadline::new(patience, wait);
        for mut piece in bytes.chunks(PIECE) {
            if let Self::Pipe { ours, .. } = self {
                write(&ours.1, piece)?;
            }
            while !piece.is_empty() {
                limit.check()?;
                limit.wait.writable(self).map_err(|_| TransferError::TimedOut)?;
                match self.send_some(piece) {
                    Ok(sent) => piece = piece.get(sent..).unwrap_or_default(),
                    Err(Errno::AGAIN | Errno::INTR) => {}
                    Err(errno) => return Err(errno.into()),
                }
            }
        }
        Ok(())
    }

    fn send_some(&self, piece: &[u8]) -> rustix::io::Result<usize> {
        match self {
            Self::Pipe { theirs, ours } => {
                splice(&ours.0, None, theirs, None, piece.len(), SpliceFlags::NONBLOCK)
            }
            Self::Socket(socket) => send(socket, piece, SendFlags::DONTWAIT | SendFlags::NOSIGNAL),
        }
    }

    /// Reads to the end, which must come after at most `bytes_max` bytes.
    pub(crate) fn receive(&self, bytes_max: usize, wait: &Wait<'_>) -> Result<Vec<u8>, TransferError> {
        self.receive_within(TRANSFER_MAX, bytes_max, wait)
    }

    fn receive_within(
        &self,
        patience: Duration,
        bytes_max: usize,
        wait: &Wait<'_>,
    ) -> Result<Vec<u8>, TransferError> {
        let limit = Deadline::new(patience, wait);
        let mut bytes = Vec::new();
        loop {
            limit.check()?;
            limit.wait.readable(self).map_err(|_| TransferError::TimedOut)?;
            match self.receive_some(&mut bytes) {
                Ok(0) => return Ok(bytes),
                Ok(_) if bytes.len() > bytes_max => return Err(TransferError::TooLong(bytes_max)),
                Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    fn receive_some(&self, into: &mut Vec<u8>) -> rustix::io::Result<usize> {
        let mut piece = [0; PIECE];
        let len = match self {
            Self::Pipe { theirs, ours } => {
                let len = splice(theirs, None, &ours.1, None, PIECE, SpliceFlags::NONBLOCK)?;
                // Reads all that was just put there. No other process has this pipe.
                if len == 0 { 0 } else { read(&ours.0, &mut piece)? }
            }
            Self::Socket(socket) => recv(socket, &mut piece[..], RecvFlags::DONTWAIT)?.0,
        };
        into.extend_from_slice(piece.get(..len).unwrap_or_default());
        Ok(len)
    }
}

impl std::os::fd::AsFd for TransferFd {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        match self {
            Self::Pipe { theirs, .. } => theirs.as_fd(),
            Self::Socket(socket) => socket.as_fd(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_holds_while_the_descriptor_is_ready() {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        write(&writer, b"state").unwrap();
        let (reader, writer) = (TransferFd::new(reader).unwrap(), TransferFd::new(writer).unwrap());
        let (received, sent) = (
            reader.receive_within(Duration::ZERO, 64, &Wait::FOREVER),
            writer.send_within(Duration::ZERO, b"state", &Wait::FOREVER),
        );
        assert!(matches!(received, Err(TransferError::TimedOut)), "{received:?}");
        assert!(matches!(sent, Err(TransferError::TimedOut)), "{sent:?}");
        drop(writer);
        assert_eq!(reader.receive(64, &Wait::FOREVER).unwrap(), b"state");
    }
}
