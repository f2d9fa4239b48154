//! One end of a stream of messages: sends and receives complete messages over a unix socket.

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

use crate::assembly::{Assembly, Frame, HalfMessage};
use crate::error::Error;
use crate::header::{HEADER_SIZE, Header, PAYLOAD_MAX};

/// The limit of a wait for the peer: stop descriptors, a deadline, both or none.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wait<'a> {
    stops: [Option<BorrowedFd<'a>>; 2],
    deadline: Option<Instant>,
}

impl<'a> Wait<'a> {
    /// Waits without a limit.
    pub const FOREVER: Self = Self { stops: [None; 2], deadline: None };

    /// Waits until `stop` is readable (an eventfd, for example), or has an error. `stop` is polled, never
    /// read.
    pub fn until(stop: BorrowedFd<'a>) -> Self {
        Self { stops: [Some(stop), None], deadline: None }
    }

    /// Also ends the wait when `other` is readable, or has an error, as in [`Wait::until`].
    pub fn or_until(self, other: Option<BorrowedFd<'a>>) -> Self {
        // The second one is set only if the first is.
        let stops = if self.stops[0].is_some() { [self.stops[0], other] } else { [other, None] };
        Self { stops, ..self }
    }

    /// Does not wait: completes only what is possible at once.
    pub fn never() -> Self {
        Self::FOREVER.at_most(Duration::ZERO)
    }

    /// Adds a deadline for the whole message: `timeout` from now.
    pub fn at_most(self, timeout: Duration) -> Self {
        Self { deadline: Instant::now().checked_add(timeout), ..self }
    }

    /// Returns when `fd` is readable, at its end, or has an error.
    ///
    /// # Errors
    /// [`Error::Interrupted`] if the wait ended first.
    pub fn readable(&self, fd: impl AsFd) -> Result<(), Error> {
        self.ready(fd.as_fd(), PollFlags::IN)
    }

    /// Returns when `fd` is writable, or a write would fail.
    ///
    /// # Errors
    /// [`Error::Interrupted`] if the wait ended first.
    pub fn writable(&self, fd: impl AsFd) -> Result<(), Error> {
        self.ready(fd.as_fd(), PollFlags::OUT)
    }

    /// Returns when `socket` is ready. A stop has priority, so that a peer that never pauses cannot hide it.
    fn ready(&self, socket: BorrowedFd<'_>, interest: PollFlags) -> Result<(), Error> {
        loop {
            let timeout = match self.deadline {
                Some(deadline) => Timespec::try_from(deadline.saturating_duration_since(Instant::now())).ok(),
                None => None,
            };
            let [stop, other] = self.stops.map(|stop| stop.unwrap_or(socket));
            let [stop, other] = [stop, other].map(|stop| PollFd::from_borrowed_fd(stop, PollFlags::IN));
            let mut fds = [PollFd::from_borrowed_fd(socket, interest), stop, other];
            let watched = 1 + self.stops.iter().flatten().count();
            match poll(&mut fds[..watched], timeout.as_ref()) {
                Ok(0) => return Err(Error::Interrupted),
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(Error::io("poll", errno)),
            }
            return match fds[1..watched].iter().any(|stop| !stop.revents().is_empty()) {
                true => Err(Error::Interrupted),
                false => Ok(()),
            };
        }
    }
}

/// A connected stream socket that carries messages.
///
/// [`AsFd`] gives the socket for an external poll. Once it is readable, call [`recv`](Self::recv) with
/// [`Wait::never`]. It takes the bytes that are there, and returns a message if they complete one. With any
/// other wait, it blocks until the message is complete, the peer is gone or the wait is over. The start of an
/// incomplete message is kept between calls.
///
/// The blocking mode of the socket does not matter and is not changed.
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

    /// Returns the part of a message that has arrived, if it is not complete.
    pub fn half_message(&self) -> Option<HalfMessage<'_>> {
        self.incoming.half_message()
    }

    /// Begins with the part of a message that another process has received from this socket.
    ///
    /// # Errors
    /// It is no part of a message.
    pub fn with_half_message(self, bytes: &[u8], fds: Vec<OwnedFd>) -> Result<Self, Error> {
        Ok(Self { incoming: Assembly::of_half_message(bytes, fds)?, ..self })
    }

    /// Returns the number of bytes of a message that have arrived, if it is not complete.
    pub fn received(&self) -> usize {
        self.incoming.received()
    }

    /// Receives a message. Returns `None` if the peer closed the connection between two messages.
    ///
    /// File descriptors are close-on-exec, and every error closes them. After [`Error::Interrupted`] the
    /// caller can call again. After any other error the stream is out of step or gone.
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

    /// Sends a message with its file descriptors, at most [`FDS_MAX`], which go with the first byte.
    ///
    /// After [`Error::Interrupted`] nothing was sent.
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

/// Calls `recvmsg` once. Returns the number of bytes and the file descriptors that came, or `None` if nothing
/// was there. Zero bytes mean that the peer is gone.
fn receive(socket: BorrowedFd<'_>, space: &mut [u8]) -> Result<Option<(usize, Vec<OwnedFd>)>, Error> {
    let mut control_space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut control_space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = match recvmsg(socket, &mut [IoSliceMut::new(space)], &mut control, flags) {
        Ok(received) => received,
        Err(Errno::INTR | Errno::AGAIN) => return Ok(None),
        // The peer closed without reading all that we sent. Everything that it sent has been read.
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

/// Calls `sendmsg` once. Returns the number of sent bytes, which is zero if the socket was full.
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
