//! The socket of a hostile session.

use std::io::{ErrorKind, IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use anyhow::{Context, Result, ensure};
use kickless_spec::vhost_user::FrontendRequest as Code;
use kickless_vhost_user::{Error, FrontendMessage as Message, Header, Inflight, Reply, Wait};
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
    /// It has an in-flight buffer as its reply.
    Inflight(Inflight, OwnedFd),
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
        let reply = self.requester.call(message, self.acks, &Wait::FOREVER.at_most(LIMIT));
        answer(reply).with_context(|| format!("{message:?} with acks {}", self.acks))
    }

    /// Sends a request that the back-end does not decode, and takes its answer: a refusal, or the end of the
    /// connection.
    ///
    /// # Errors
    /// No answer comes, or another one.
    pub fn say_undecoded(
        &mut self,
        code: Code,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
        totals: &mut Totals,
    ) -> Result<Option<Answer>> {
        totals.messages += 1;
        let header = Header::request(code.raw(), self.acks, payload.len());
        if let Err(error) = send_raw(&self.socket, &[&header.to_bytes(), payload].concat(), fds) {
            ensure!(is_closed(error.kind()), "{code} cannot be sent: {error}");
            return Ok(None);
        }
        let reply = self.requester.recv_reply(code, &Wait::FOREVER.at_most(LIMIT));
        let answer = answer(reply.map(Some)).with_context(|| format!("{code} with acks {}", self.acks))?;
        ensure!(!matches!(answer, Some(Answer::Done)), "{code} is accepted");
        Ok(answer)
    }
}

fn answer(reply: Result<Option<Reply>, Error>) -> Result<Option<Answer>> {
    match reply {
        Ok(Some(Reply::U64(0)) | None) => Ok(Some(Answer::Done)),
        Ok(Some(Reply::U64(number))) => Ok(Some(Answer::Number(number))),
        Ok(Some(Reply::Config(None) | Reply::Inflight(_, None) | Reply::NoFd)) => Ok(Some(Answer::Refused)),
        Ok(Some(Reply::Log { mmap_size: 0, .. })) => Ok(Some(Answer::Refused)),
        Ok(Some(Reply::Inflight(described, Some(file)))) => Ok(Some(Answer::Inflight(described, file))),
        Ok(Some(_)) => Ok(Some(Answer::Done)),
        Err(Error::Closed | Error::ClosedMidMessage { .. }) => Ok(None),
        Err(Error::Io { source, .. }) if is_closed(source.kind()) => Ok(None),
        Err(error) => Err(error.into()),
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
