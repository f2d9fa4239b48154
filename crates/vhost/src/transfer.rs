//! The device's state, on its way between the front-end and us (SET_DEVICE_STATE_FD).
//!
//! The front-end chooses the descriptor and has it too, so nothing may wait on it for longer than we want: not for data that somebody
//! else reads first, nor because it is made blocking under our hands. A pipe can promise that when it is spliced with one that
//! nobody else has, a socket when it is told so with each call; nothing else is taken.

use crate::error::Refusal;
use crate::rings::Rings;
use crate::state::{Bounds, State};
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

/// For so long may a transfer hold up its session.
const PATIENCE: Duration = Duration::from_secs(5);
/// What a pipe takes without waiting, and less than what any takes.
const PIECE: usize = 4096;

/// Why a state did not get through.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Interruption {
    #[error("there is no end of it: {0} bytes are the most")]
    Endless(usize),
    #[error("it is not through after {} s", PATIENCE.as_secs())]
    Late,
    #[error("its descriptor fails: {0}")]
    Io(#[from] io::Error),
}

impl From<Errno> for Interruption {
    fn from(errno: Errno) -> Self {
        Self::Io(errno.into())
    }
}

/// A transfer that begins once its message has been answered, and what came of the last one.
#[derive(Debug, Default)]
pub(crate) struct Transfers {
    next: Option<(Conduit, Option<Vec<u8>>)>,
    last: Option<bool>,
}

impl Transfers {
    /// SET_DEVICE_STATE_FD.
    pub(crate) fn prepare(
        &mut self,
        state: DeviceState,
        fd: OwnedFd,
        rings: &Rings,
        packed: bool,
    ) -> Result<(), Refusal> {
        self.last = None;
        rings.all_stopped()?;
        let conduit = Conduit::new(fd).map_err(Refusal::Descriptor)?;
        let bytes = match state.direction {
            TransferDirection::Save => Some(rings.save(packed)?.to_bytes()),
            TransferDirection::Load => None,
        };
        self.next = Some((conduit, bytes));
        Ok(())
    }

    /// Makes the transfer that has been prepared, if one has.
    pub(crate) fn run(&mut self, rings: &mut Rings, bounds: &Bounds, wait: &Wait<'_>) {
        let Some((conduit, bytes)) = self.next.take() else { return };
        let len = bytes.as_ref().map(Vec::len);
        let done: Result<(), Box<dyn std::error::Error>> = match bytes {
            Some(bytes) => conduit.send(&bytes, wait).map_err(Into::into),
            None => conduit
                .receive(bounds.bytes_max(), wait)
                .map_err(Into::into)
                .and_then(|bytes| Ok(rings.load(State::from_bytes(&bytes, bounds)?)?)),
        };
        match (&done, len) {
            (Ok(()), Some(bytes)) => info!(bytes, "state of the device saved"),
            (Ok(()), None) => info!("state of the device loaded"),
            (Err(error), Some(_)) => warn!(%error, "the device's state cannot be saved"),
            (Err(error), None) => warn!(%error, "the device's state cannot be loaded"),
        }
        self.last = Some(done.is_ok());
    }

    /// CHECK_DEVICE_STATE: whether the last transfer succeeded.
    pub(crate) fn check(&mut self) -> Result<bool, Refusal> {
        self.last.take().ok_or(Refusal::NoTransfer)
    }
}

/// When a transfer has to be through. A wait alone does not see to it: it ends at once while its descriptor is ready, or in error.
struct Limit<'a> {
    wait: Wait<'a>,
    deadline: Instant,
}

impl<'a> Limit<'a> {
    fn new(patience: Duration, wait: &Wait<'a>) -> Self {
        Self { wait: wait.at_most(patience), deadline: Instant::now() + patience }
    }

    fn check(&self) -> Result<(), Interruption> {
        if Instant::now() < self.deadline { Ok(()) } else { Err(Interruption::Late) }
    }
}

/// What a state goes through.
#[derive(Debug)]
pub(crate) enum Conduit {
    Pipe {
        theirs: OwnedFd,
        /// Reading end and writing end of the one that is ours alone.
        ours: (OwnedFd, OwnedFd),
    },
    Socket(OwnedFd),
}

impl Conduit {
    /// Takes the descriptor that the front-end sent.
    pub(crate) fn new(fd: OwnedFd) -> io::Result<Self> {
        match FileType::from_raw_mode(fstat(&fd)?.st_mode) {
            FileType::Fifo => Ok(Self::Pipe { theirs: fd, ours: pipe_with(PipeFlags::CLOEXEC)? }),
            FileType::Socket => Ok(Self::Socket(fd)),
            _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is neither a pipe nor a socket")),
        }
    }

    /// Writes all `bytes`. What reads them sees their end when this is dropped.
    pub(crate) fn send(&self, bytes: &[u8], wait: &Wait<'_>) -> Result<(), Interruption> {
        self.send_within(PATIENCE, bytes, wait)
    }

    fn send_within(&self, patience: Duration, bytes: &[u8], wait: &Wait<'_>) -> Result<(), Interruption> {
        let limit = Limit::new(patience, wait);
        for mut piece in bytes.chunks(PIECE) {
            if let Self::Pipe { ours, .. } = self {
                write(&ours.1, piece)?;
            }
            while !piece.is_empty() {
                limit.check()?;
                limit.wait.writable(self).map_err(|_| Interruption::Late)?;
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

    /// Reads to the end, which comes after `bytes_max` bytes at most.
    pub(crate) fn receive(&self, bytes_max: usize, wait: &Wait<'_>) -> Result<Vec<u8>, Interruption> {
        self.receive_within(PATIENCE, bytes_max, wait)
    }

    fn receive_within(
        &self,
        patience: Duration,
        bytes_max: usize,
        wait: &Wait<'_>,
    ) -> Result<Vec<u8>, Interruption> {
        let limit = Limit::new(patience, wait);
        let mut bytes = Vec::new();
        loop {
            limit.check()?;
            limit.wait.readable(self).map_err(|_| Interruption::Late)?;
            match self.receive_some(&mut bytes) {
                Ok(0) => return Ok(bytes),
                Ok(_) if bytes.len() > bytes_max => return Err(Interruption::Endless(bytes_max)),
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
                // As much as was just put there, and nobody else takes it.
                if len == 0 { 0 } else { read(&ours.0, &mut piece)? }
            }
            Self::Socket(socket) => recv(socket, &mut piece[..], RecvFlags::DONTWAIT)?.0,
        };
        into.extend_from_slice(piece.get(..len).unwrap_or_default());
        Ok(len)
    }
}

impl std::os::fd::AsFd for Conduit {
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
        let (reader, writer) = (Conduit::new(reader).unwrap(), Conduit::new(writer).unwrap());
        let (received, sent) = (
            reader.receive_within(Duration::ZERO, 64, &Wait::FOREVER),
            writer.send_within(Duration::ZERO, b"state", &Wait::FOREVER),
        );
        assert!(matches!(received, Err(Interruption::Late)), "{received:?}");
        assert!(matches!(sent, Err(Interruption::Late)), "{sent:?}");
        drop(writer);
        assert_eq!(reader.receive(64, &Wait::FOREVER).unwrap(), b"state");
    }
}
