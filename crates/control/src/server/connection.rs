//! The connection of one client: bytes in, lines out.

use std::fmt::Display;
use std::io::{self, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};
use serde_json::Value;

use crate::inbox::{DESCRIPTORS_MAX, Inbox, LostDescriptors};
use crate::lines::LineTooLong;
use crate::rpc::{RpcError, answer};

/// The most bytes of one read. It bounds the memory of a client together with the longest line.
const READ_BYTES: usize = 16 << 10;

/// The most bytes of events that a client has not taken: some ten thousand events. A client that is further
/// behind is disconnected.
const EVENTS_BYTES_MAX: usize = 1 << 20;
/// The time after which a client that takes nothing, although there is something for it, is disconnected.
const SLOW_AFTER: Duration = Duration::from_secs(10);

/// The notifications that a client wants.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Subscriptions {
    pub(super) events: bool,
    /// The interval of the counters, and when they are due.
    pub(super) stats: Option<(Duration, Instant)>,
}

/// The process that connected.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Peer {
    pub(super) uid: u32,
    pub(super) pid: i32,
}

/// The calls that a socket serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// All calls.
    Full,
    /// Calls that change nothing.
    ReadOnly,
}

/// A connected client.
///
/// One call is executed at a time, and its answer is written before the next one is taken. So a client that
/// does not read its answers takes no memory beyond one of them.
pub(super) struct Connection {
    stream: UnixStream,
    pub(super) access: Access,
    pub(super) peer: Peer,
    inbox: Inbox<OwnedFd>,
    /// Bytes that are not written yet.
    unwritten: Vec<u8>,
    /// A call of this client is executed on a thread.
    pub(super) is_calling: bool,
    /// The client sends nothing more.
    at_end: bool,
    /// The connection closes when everything is written.
    is_closing: bool,
    /// The events and counters that the client wants.
    pub(super) subscriptions: Subscriptions,
    /// The last time at which bytes moved. The client that was idle for longest makes room for a new one.
    pub(super) active: Instant,
}

impl Connection {
    /// Takes a connection.
    ///
    /// # Errors
    /// The socket has no peer any more, or cannot be made non-blocking.
    pub(super) fn new(stream: UnixStream, access: Access) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        let peer = socket_peercred(&stream)?;
        let peer = Peer { uid: peer.uid.as_raw(), pid: peer.pid.as_raw_nonzero().get() };
        Ok(Self {
            stream,
            access,
            peer,
            inbox: Inbox::default(),
            unwritten: Vec::new(),
            is_calling: false,
            at_end: false,
            is_closing: false,
            subscriptions: Subscriptions::default(),
            active: Instant::now(),
        })
    }

    /// Returns the events that the connection waits for.
    pub(super) fn interest(&self) -> PollFlags {
        if !self.unwritten.is_empty() {
            PollFlags::OUT
        } else if self.is_calling || self.at_end {
            PollFlags::empty()
        } else {
            PollFlags::IN
        }
    }

    /// Returns the next line, if no call is executed and everything is written.
    ///
    /// # Errors
    /// The line is too long.
    pub(super) fn take_line(&mut self) -> Result<Option<&[u8]>, LineTooLong> {
        if self.is_calling || self.is_closing || !self.unwritten.is_empty() {
            return Ok(None);
        }
        self.inbox.take()
    }

    /// Takes `count` descriptors for the line that was taken last, and closes the others that came with it.
    ///
    /// # Errors
    /// Fewer have come, whose number is returned.
    pub(super) fn claim(&mut self, count: usize) -> Result<Vec<OwnedFd>, usize> {
        self.inbox.claim(count)
    }

    /// Reads what has come, with its descriptors if the socket serves all calls. Without space for them, the
    /// kernel closes them.
    ///
    /// # Errors
    /// The client is gone.
    pub(super) fn read(&mut self) -> io::Result<Result<(), LostDescriptors>> {
        let mut bytes = [0; READ_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let space = if self.access == Access::Full { &mut space[..] } else { &mut [] };
        let mut control = RecvAncillaryBuffer::new(space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received = recvmsg(&self.stream, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)
            .map_err(io::Error::from);
        let received = match received {
            Ok(received) => received,
            Err(error) if is_later(&error) => return Ok(Ok(())),
            Err(error) => return Err(error),
        };
        let rights = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(rights) => Some(rights),
            _ => None,
        });
        let descriptors: Vec<OwnedFd> = rights.flatten().collect();
        if received.bytes == 0 {
            self.at_end = true;
            return Ok(Ok(()));
        }
        self.active = Instant::now();
        // There were more than there is space for, or this process has no free descriptor.
        if self.access == Access::Full && received.flags.contains(ReturnFlags::CTRUNC) {
            let is_full = descriptors.len() < DESCRIPTORS_MAX;
            return Ok(Err(if is_full { LostDescriptors::NoRoom } else { LostDescriptors::TooMany }));
        }
        Ok(self.inbox.push(&bytes[..received.bytes], descriptors))
    }

    /// Writes a line, as far as the client takes it now.
    ///
    /// # Errors
    /// The client is gone.
    pub(super) fn write(&mut self, line: &str) -> io::Result<()> {
        self.unwritten.extend_from_slice(line.as_bytes());
        self.write_rest()
    }

    /// Writes a notification, as far as the client takes it now. Leaves out a line that may be left out, if
    /// the client has not taken an earlier one.
    ///
    /// # Errors
    /// The client is gone, or takes too little.
    pub(super) fn notify(&mut self, line: &str, may_be_left_out: bool) -> io::Result<()> {
        let is_behind = !self.unwritten.is_empty();
        let is_slow = is_behind && self.active.elapsed() > SLOW_AFTER;
        if is_slow || (!may_be_left_out && self.unwritten.len() + line.len() > EVENTS_BYTES_MAX) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        if is_behind && may_be_left_out { Ok(()) } else { self.write(line) }
    }

    /// Writes the rest of earlier lines, as far as the client takes it now.
    ///
    /// # Errors
    /// The client is gone.
    pub(super) fn write_rest(&mut self) -> io::Result<()> {
        let mut written = 0;
        while written < self.unwritten.len() {
            match self.stream.write(&self.unwritten[written..]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(len) => {
                    self.active = Instant::now();
                    written += len;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_later(&error) => break,
                Err(error) => return Err(error),
            }
        }
        self.unwritten.drain(..written);
        if self.unwritten.is_empty() {
            // An answer can be long, and most are short.
            self.unwritten.shrink_to(READ_BYTES);
        }
        Ok(())
    }

    /// Answers that a line is not taken, and closes the connection when everything is written.
    ///
    /// # Errors
    /// The client is gone.
    pub(super) fn refuse(&mut self, why: &dyn Display) -> io::Result<()> {
        self.close_after_write();
        self.write(&answer(&Value::Null, &Err(RpcError::line(why.to_string()))))
    }

    /// Closes the connection when everything is written.
    fn close_after_write(&mut self) {
        self.is_closing = true;
    }

    /// Returns whether the connection has nothing more to do.
    pub(super) fn is_over(&self) -> bool {
        self.unwritten.is_empty() && !self.is_calling && (self.is_closing || self.at_end)
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

fn is_later(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}
