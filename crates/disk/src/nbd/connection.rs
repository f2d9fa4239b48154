//! Requests and replies on an established connection. Nothing here waits.

use super::handshake::Export;
use super::in_flight::InFlight;
use super::inbox::QueuedOp;
use super::replies::Replies;
use super::wire::{self, Problem};
use crate::offload::WakeBatch;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg, sockopt};
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The largest number of requests in one system call.
const SENT_AT_ONCE: usize = 32;

/// The largest number of reads in a row before other work.
const READS_IN_A_ROW: usize = 16;

/// A connection to an export.
#[derive(Debug)]
pub(super) struct Connection {
    socket: OwnedFd,
    pub(super) export: Export,
    pub(super) in_flight: InFlight,
    replies: Replies,
    /// The slots of requests to send, oldest first, and the number of bytes of the first that are sent.
    unsent: VecDeque<u32>,
    sent: usize,
}

impl Connection {
    /// Makes a connection with nothing in flight. `lost_writes` is the count before it. `is_dirty`: the
    /// server may still lose writes of an earlier connection.
    pub(super) fn new(socket: OwnedFd, export: Export, lost_writes: u64, is_dirty: bool) -> Self {
        Self {
            socket,
            export,
            in_flight: InFlight::new(lost_writes, is_dirty),
            replies: Replies::new(export.structured),
            unsent: VecDeque::new(),
            sent: 0,
        }
    }

    /// Sets the counts before this connection, on which nothing is in flight.
    pub(super) fn set_counts(&mut self, lost_writes: u64, is_dirty: bool) {
        self.in_flight = InFlight::new(lost_writes, is_dirty);
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Returns whether to wait until the socket accepts more.
    pub(super) fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Returns whether nothing is in flight, and no part of a message has passed.
    pub(super) fn is_idle(&self) -> bool {
        self.in_flight.is_empty() && self.unsent.is_empty() && self.replies.is_between_messages()
    }

    /// Takes a request, to be sent. The caller has checked that there is room.
    pub(super) fn take(&mut self, queued: QueuedOp) {
        self.unsent.extend(self.in_flight.insert(queued));
    }

    /// Sends as much as the socket accepts. Returns whether there was anything.
    ///
    /// # Errors
    /// The connection has ended.
    pub(super) fn send(&mut self) -> Result<bool, Problem> {
        let mut any = false;
        while !self.unsent.is_empty() {
            let parts: Vec<_> = self
                .unsent
                .iter()
                .take(SENT_AT_ONCE)
                .filter_map(|&slot| self.in_flight.to_send(slot))
                .collect();
            let mut slices = Vec::with_capacity(2 * parts.len());
            let mut skip = self.sent;
            for (header, bytes) in &parts {
                for part in [&header[..], bytes] {
                    let here = skip.min(part.len());
                    skip -= here;
                    if here < part.len() {
                        slices.push(IoSlice::new(&part[here..]));
                    }
                }
            }
            let (mut control, flags) = (SendAncillaryBuffer::default(), SendFlags::NOSIGNAL);
            let mut bytes = match sendmsg(&self.socket, &slices, &mut control, flags) {
                Ok(bytes) => bytes + self.sent,
                Err(Errno::AGAIN) => return Ok(any),
                Err(Errno::INTR) => continue,
                Err(error) => return Err(lost(error)),
            };
            any = true;
            let lengths: Vec<usize> =
                parts.iter().map(|(header, bytes)| header.len() + bytes.len()).collect();
            for length in lengths {
                if bytes < length {
                    break;
                }
                bytes -= length;
                self.unsent.pop_front();
            }
            self.sent = bytes;
        }
        Ok(any)
    }

    /// Receives and parses replies, and answers completed requests. Returns whether there was anything.
    ///
    /// # Errors
    /// The connection has ended, or must be closed.
    pub(super) fn receive(&mut self, wakes: &mut WakeBatch) -> Result<bool, Problem> {
        for turn in 0..READS_IN_A_ROW {
            let Self { socket, replies, in_flight, .. } = self;
            match rustix::io::readv(&*socket, &mut replies.space(in_flight)) {
                Ok(0) => return Err(Problem::Closed),
                Ok(bytes) => replies.received(bytes, in_flight, wakes)?,
                Err(Errno::AGAIN) => return Ok(turn > 0),
                Err(Errno::INTR) => {}
                Err(error) => return Err(lost(error)),
            }
        }
        Ok(true)
    }

    /// Ends the connection. Tells the server so if nothing is in flight and the socket accepts that.
    pub(super) fn leave(self) {
        if self.in_flight.is_empty() {
            let bytes = wire::request(wire::CMD_DISC, 0, 0, 0, 0);
            let _ = rustix::net::send(&self.socket, &bytes, SendFlags::NOSIGNAL);
            // Otherwise the end of a TCP connection could overtake these bytes.
            let _ = sockopt::set_socket_linger(&self.socket, None);
        }
    }

    /// Returns the socket of a connection that is given up.
    pub(super) fn into_socket(self) -> OwnedFd {
        self.socket
    }
}

fn lost(error: Errno) -> Problem {
    match error {
        Errno::PIPE | Errno::CONNRESET => Problem::Closed,
        error => Problem::Io(io::Error::from(error)),
    }
}
