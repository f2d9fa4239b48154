//! The connection of one client: bytes in, lines out.

use std::io::{self, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kickless_opener::{Peer, peer};
use rustix::event::PollFlags;
use serde_json::Value;

use super::reader::{Access, GivenFd, READ_BYTES, Reader, Received, is_later};
use super::turns::Share;
use crate::inbox::{Inbox, LostDescriptors};
use crate::lines::LineTooLong;
use crate::rpc::{RpcError, answer};

/// The most bytes of events that a client has not taken: some ten thousand events. A client that is further
/// behind is disconnected.
const EVENTS_BYTES_MAX: usize = 1 << 20;
/// The time after which a client that takes nothing, although there is something for it, is disconnected.
const SLOW_AFTER: Duration = Duration::from_secs(10);

/// The work of a line beside its own bytes, and that of a call beside the bytes of its answer. Most calls
/// look at each device.
const LINE_WORK: usize = 64;
const CALL_WORK: usize = 1 << 10;

/// The notifications that a client wants.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Subscriptions {
    pub(super) events: bool,
    /// The interval of the counters, and when they are due.
    pub(super) stats: Option<(Duration, Instant)>,
}

/// A connected client.
///
/// One call is executed at a time, and its answer is written before the next one is taken. So a client that
/// does not read its answers takes no memory beyond one of them.
///
/// Dropping it makes its thread close it.
pub(super) struct Connection {
    /// Dropped before the reader, whose thread has the last reference.
    stream: Arc<UnixStream>,
    reader: Reader,
    pub(super) access: Access,
    pub(super) peer: Peer,
    inbox: Inbox<GivenFd>,
    /// Bytes that are not written yet.
    unwritten: Vec<u8>,
    /// The inbox may have whole lines. Nothing is read before they are taken.
    has_lines: bool,
    /// The thread of this client reads.
    is_reading: bool,
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
    pub(super) share: Share,
    /// The work that was done for the client and is not charged yet: bytes that were taken or made.
    work: usize,
}

impl Connection {
    /// Takes a connection, which this thread reads and closes.
    ///
    /// # Errors
    /// The socket has no peer any more, or cannot be made non-blocking.
    pub(super) fn new(stream: UnixStream, access: Access, reader: Reader) -> io::Result<Self> {
        let stream = Arc::new(stream);
        reader.keep(&stream);
        let mut connection = Self {
            stream,
            reader,
            access,
            peer: Peer::default(),
            inbox: Inbox::default(),
            unwritten: Vec::new(),
            has_lines: false,
            is_reading: false,
            is_calling: false,
            at_end: false,
            is_closing: false,
            subscriptions: Subscriptions::default(),
            active: Instant::now(),
            share: Share::default(),
            work: 0,
        };
        connection.stream.set_nonblocking(true)?;
        connection.peer = peer(&connection.stream)?;
        Ok(connection)
    }

    /// Returns the events that the connection waits for. Returns `None` while its thread reads, which will
    /// find out if the client has left, and while lines wait for their turn.
    pub(super) fn interest(&self) -> Option<PollFlags> {
        Some(if !self.unwritten.is_empty() {
            PollFlags::OUT
        } else if self.is_reading {
            return None;
        } else if self.is_calling || self.at_end {
            PollFlags::empty()
        } else if self.has_lines {
            return None;
        } else {
            PollFlags::IN
        })
    }

    /// Returns whether a line can be taken: no call is executed and everything is written.
    pub(super) fn may_have_line(&self) -> bool {
        self.has_lines && !self.is_calling && !self.is_closing && self.unwritten.is_empty()
    }

    /// Returns the next line, if no call is executed and everything is written.
    ///
    /// # Errors
    /// The line is too long.
    pub(super) fn take_line(&mut self) -> Result<Option<&[u8]>, LineTooLong> {
        if !self.may_have_line() {
            return Ok(None);
        }
        let line = self.inbox.take()?;
        match line {
            Some(line) => self.work += LINE_WORK + line.len(),
            None => self.has_lines = false,
        }
        Ok(line)
    }

    /// Notes that a call is executed for the client.
    pub(super) fn add_call(&mut self) {
        self.work += CALL_WORK;
    }

    /// Returns the work that was done for the client since the last call.
    pub(super) fn take_work(&mut self) -> usize {
        std::mem::take(&mut self.work)
    }

    /// Takes `count` descriptors for the line that was taken last, and closes the others that came with it.
    ///
    /// # Errors
    /// Fewer have come, whose number is returned.
    pub(super) fn claim(&mut self, count: usize) -> Result<Vec<GivenFd>, usize> {
        self.inbox.claim(count)
    }

    /// Requests that the client's thread reads what has come.
    pub(super) fn read(&mut self) {
        self.is_reading = true;
        self.reader.read();
    }

    /// Takes the result of a read.
    ///
    /// # Errors
    /// The client is gone.
    pub(super) fn take_read(&mut self, received: io::Result<Received>) -> io::Result<()> {
        self.is_reading = false;
        let pushed = match received? {
            Received::Nothing => return Ok(()),
            Received::End => {
                self.at_end = true;
                return Ok(());
            }
            Received::Bytes(bytes, descriptors) => {
                self.has_lines = true;
                self.inbox.push(&bytes, descriptors)
            }
            Received::Lost(why) => Err(why),
        };
        self.active = Instant::now();
        match pushed {
            Ok(()) => Ok(()),
            Err(why @ LostDescriptors::TooMany) => self.refuse(RpcError::line(why.to_string())),
            Err(why) => self.refuse(RpcError::busy(why.to_string())),
        }
    }

    /// Writes a line, as far as the client takes it now.
    ///
    /// # Errors
    /// The client is gone.
    pub(super) fn write(&mut self, line: &str) -> io::Result<()> {
        self.work += line.len();
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
            match (&*self.stream).write(&self.unwritten[written..]) {
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
    pub(super) fn refuse(&mut self, why: RpcError) -> io::Result<()> {
        self.is_closing = true;
        self.write(&answer(&Value::Null, &Err(why)))
    }

    /// Returns whether the connection has nothing more to do.
    pub(super) fn is_over(&self) -> bool {
        let is_idle = self.unwritten.is_empty() && !self.is_calling && !self.is_reading;
        is_idle && (self.is_closing || self.at_end)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // The client notices now, although its thread may still close a descriptor.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}
