//! The socket of a hostile session.

use std::io::{ErrorKind, IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;

use anyhow::{Result, anyhow};
use kickless_vhost_user::{Error, FrontendMessage as Message, Reply, Wait};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::frontend::LIMIT;
use crate::walk::totals::Totals;

/// The back-end's answer to a message.
pub enum Answer {
    /// It is accepted.
    Done,
    /// It is refused.
    Refused,
    /// It has a number as its reply, or is refused.
    Number(u64),
}

/// The socket, and the state that decides about acknowledgements.
pub struct Wire {
    /// Sends whole messages.
    pub requester: kickless_vhost_user::Frontend,
    /// The same socket.
    pub socket: UnixStream,
    /// Acknowledgements are negotiated.
    pub acks: bool,
}

impl Wire {
    /// Sends a message and takes its answer. Returns `None` if the back-end has closed the connection.
    ///
    /// # Errors
    /// No answer comes, or one that the protocol does not have.
    pub fn say(&mut self, message: &Message, totals: &mut Totals) -> Result<Option<Answer>> {
        totals.messages += 1;
        match self.requester.call(message, self.acks, &Wait::FOREVER.at_most(LIMIT)) {
            Ok(Some(Reply::U64(0)) | None) => Ok(Some(Answer::Done)),
            Ok(Some(Reply::U64(number))) => Ok(Some(Answer::Number(number))),
            Ok(Some(Reply::Config(None) | Reply::Inflight(_, None))) => Ok(Some(Answer::Refused)),
            Ok(Some(_)) => Ok(Some(Answer::Done)),
            Err(Error::Closed | Error::ClosedMidMessage { .. }) => Ok(None),
            Err(Error::Io { source, .. }) if is_closed(source.kind()) => Ok(None),
            Err(error) => Err(anyhow!(error).context(format!("{message:?} with acks {}", self.acks))),
        }
    }
}

/// Returns whether the peer has closed the connection.
pub fn is_closed(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::BrokenPipe | ErrorKind::ConnectionReset)
}

/// Sends any bytes with any descriptors.
///
/// # Errors
/// The connection is closed.
pub fn send_raw(socket: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> std::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    let sent = sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
    let mut socket = socket;
    socket.write_all(&bytes[sent..])
}
