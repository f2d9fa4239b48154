//! One end of a stream of messages: whole messages in and out of a unix socket.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use kickless_spec::vhost_user::FDS_MAX;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::assembly::{Assembly, Frame};
use crate::error::Error;
use crate::header::{HEADER_SIZE, Header, PAYLOAD_MAX};

/// How long to wait for the peer.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wait<'a> {
    stop: Option<BorrowedFd<'a>>,
    deadline: Option<Instant>,
}

impl<'a> Wait<'a> {
    /// As long as it takes.
    pub const FOREVER: Self = Self { stop: None, deadline: None };

    /// Until `stop` is readable (an eventfd, say), or in any state but idle. It is only looked at, never read.
    pub fn until(stop: BorrowedFd<'a>) -> Self {
        Self { stop: Some(stop), deadline: None }
    }

    /// Not at all: what can be done at once is done.
    pub fn never() -> Self {
        Self::FOREVER.at_most(Duration::ZERO)
    }

    /// The same, but no longer than `timeout` from now for the whole message.
    pub fn at_most(self, timeout: Duration) -> Self {
        Self { deadline: Instant::now().checked_add(timeout), ..self }
    }

    /// Returns once there is something to read from `fd`, or its end, or an error.
    ///
    /// # Errors
    /// [`Error::Interrupted`]: the wait is over.
    pub fn readable(&self, fd: impl AsFd) -> Result<(), Error> {
        self.ready(fd.as_fd(), PollFlags::IN)
    }

    /// Returns once something can be written to `fd`, or the attempt would fail.
    ///
    /// # Errors
    /// [`Error::Interrupted`]: the wait is over.
    pub fn writable(&self, fd: impl AsFd) -> Result<(), Error> {
        self.ready(fd.as_fd(), PollFlags::OUT)
    }

    /// Returns once `socket` is ready. `stop` goes first, so that a peer that never pauses cannot keep it from being
    /// seen.
    fn ready(&self, socket: BorrowedFd<'_>, interest: PollFlags) -> Result<(), Error> {
        loop {
            let timeout = match self.deadline {
                Some(deadline) => Timespec::try_from(deadline.saturating_duration_since(Instant::now())).ok(),
                None => None,
            };
            let mut fds = [
                PollFd::from_borrowed_fd(socket, interest),
                PollFd::from_borrowed_fd(self.stop.unwrap_or(socket), PollFlags::IN),
            ];
            let watched = if self.stop.is_some() { &mut fds[..] } else { &mut fds[..1] };
            match poll(watched, timeout.as_ref()) {
                Ok(0) => return Err(Error::Interrupted),
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(Error::io("poll", errno)),
            }
            return match watched.get(1) {
                Some(stop) if !stop.revents().is_empty() => Err(Error::Interrupted),
                _ => Ok(()),
            };
        }
    }
}

/// A connected stream socket that carries messages.
///
/// [`AsFd`] gives the socket for an external poll. Once it is readable, [`recv`](Self::recv) with [`Wait::never`] takes what
/// is there and returns the message if that completes one; with any other wait it blocks until the message is whole, the
/// peer is gone or the wait is over. Half a message is kept between calls.
///
/// The socket's blocking mode does not matter and is not changed.
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
    incoming: Assembly,
}

impl Channel {
    /// Takes over a connected stream socket.
    pub fn new(socket: impl Into<OwnedFd>) -> Self {
        Self { socket: socket.into(), incoming: Assembly::new() }
    }

    /// Receives a message; `None` if the peer closed the connection between two messages.
    ///
    /// File descriptors come close-on-exec. On every error they are closed. After [`Error::Interrupted`] call again; after
    /// any other error the stream is out of step or gone.
    pub fn recv(&mut self, wait: &Wait<'_>) -> Result<Option<Frame>, Error> {
        loop {
            wait.ready(self.socket.as_fd(), PollFlags::IN)?;
            let (n, fds) = match receive(self.socket.as_fd(), self.incoming.space()) {
                Ok(Some(piece)) => piece,
                Ok(None) => continue,
                Err(error) => {
                    self.incoming = Assembly::new();
                    return Err(error);
                }
            };
            if n == 0 {
                return match std::mem::take(&mut self.incoming).received() {
                    0 => Ok(None),
                    received => Err(Error::ClosedMidMessage { received }),
                };
            }
            if let Some(frame) = self.incoming.advance(n, fds)? {
                return Ok(Some(frame));
            }
        }
    }

    /// Sends a message with its file descriptors, at most [`FDS_MAX`], which go with its first byte.
    ///
    /// [`Error::Interrupted`] means that nothing was sent.
    pub fn send(
        &mut self,
        header: &Header,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
        wait: &Wait<'_>,
    ) -> Result<(), Error> {
        if payload.len() > PAYLOAD_MAX {
            return Err(Error::PayloadTooLarge { request: header.request, size: header.size });
        }
        if fds.len() > FDS_MAX {
            return Err(Error::TooManyFds);
        }
        let mut message = Vec::with_capacity(HEADER_SIZE + payload.len());
        message.extend_from_slice(&header.to_bytes());
        message.extend_from_slice(payload);
        let mut sent = 0;
        while sent < message.len() {
            match wait.ready(self.socket.as_fd(), PollFlags::OUT) {
                Err(Error::Interrupted) if sent > 0 => {
                    return Err(Error::SendInterrupted { sent, len: message.len() });
                }
                ready => ready?,
            }
            let fds = if sent == 0 { fds } else { &[] };
            sent += transmit(self.socket.as_fd(), message.get(sent..).unwrap_or_default(), fds)?;
        }
        Ok(())
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// One `recvmsg`: how many bytes came, and what came with them. Zero bytes: the peer is gone. `None`: nothing there after
/// all.
fn receive(socket: BorrowedFd<'_>, space: &mut [u8]) -> Result<Option<(usize, Vec<OwnedFd>)>, Error> {
    let mut control_space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut control_space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = match recvmsg(socket, &mut [IoSliceMut::new(space)], &mut control, flags) {
        Ok(received) => received,
        Err(Errno::INTR | Errno::AGAIN) => return Ok(None),
        // The peer closed with something of ours unread; all that it sent has been read.
        Err(Errno::CONNRESET) => return Ok(Some((0, Vec::new()))),
        Err(errno) => return Err(Error::io("recvmsg", errno)),
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(Error::TooManyFds);
    }
    Ok(Some((received.bytes, fds)))
}

/// One `sendmsg`. Returns the bytes that went, zero if the socket was full after all.
fn transmit(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<usize, Error> {
    let mut control_space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut control_space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Error::TooManyFds);
    }
    match sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
        Ok(n) => Ok(n),
        Err(Errno::INTR | Errno::AGAIN) => Ok(0),
        Err(Errno::PIPE | Errno::CONNRESET) => Err(Error::Closed),
        Err(errno) => Err(Error::io("sendmsg", errno)),
    }
}
