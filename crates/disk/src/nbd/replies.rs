//! Parses the replies of a server, simple and structured. Only the data are taken as they are.

use super::in_flight::InFlight;
use super::wire::*;
use crate::offload::{OffloadKind, WakeBatch};
use std::io::IoSliceMut;

/// The bytes to read at once, out_of_bounds those that go straight into a request's buffer. It is longer
/// than any header.
const STAGE_BYTES: usize = 16 << 10;

/// The largest error message in bytes.
const ERROR_BYTES_MAX: u32 = 4096 + 16;

/// The position in the stream of replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ParseState {
    /// Before a header.
    Header,
    /// Before the body of a chunk: `head` bytes to parse, then `rest` bytes.
    Body { slot: u32, kind: u16, done: bool, head: usize, rest: u64 },
    /// Within data for a request's buffer.
    Data { slot: u32, at: usize, left: usize, done: bool },
    /// Within bytes that are ignored.
    Skip { slot: u32, left: u64, done: bool },
}

/// The parser of one connection's replies.
#[derive(Debug)]
pub(crate) struct Replies {
    structured: bool,
    state: ParseState,
    stage: Box<[u8]>,
    /// The part of the stage that is read and not parsed.
    start: usize,
    end: usize,
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes.get(at..).and_then(|bytes| bytes.first_chunk()).copied().unwrap_or([0; N])
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(number(bytes, at))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(number(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(number(bytes, at))
}

impl Replies {
    pub(super) fn new(structured: bool) -> Self {
        let stage = vec![0; STAGE_BYTES].into_boxed_slice();
        Self { structured, state: ParseState::Header, stage, start: 0, end: 0 }
    }

    /// Returns whether all that was read are whole replies.
    pub(super) fn is_between_messages(&self) -> bool {
        self.state == ParseState::Header && self.start == self.end
    }

    /// Returns the memory for the next bytes of the stream: the buffer of a request, then the stage. They are
    /// never empty together.
    pub(super) fn space<'a>(&'a mut self, in_flight: &'a mut InFlight) -> [IoSliceMut<'a>; 2] {
        // The stage contains at most a part of a header.
        self.stage.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let data = match self.state {
            ParseState::Data { slot, at, left, .. } => in_flight
                .get_mut(slot)
                .and_then(|request| request.op.bytes_mut().get_mut(at..at + left))
                .unwrap_or_default(),
            _ => &mut [],
        };
        [IoSliceMut::new(data), IoSliceMut::new(&mut self.stage[self.end..])]
    }

    /// Parses `bytes` that were read into [`Replies::space`]. Answers completed requests.
    ///
    /// # Errors
    /// The server breaks the protocol, so the rest of the stream has no meaning.
    pub(super) fn received(
        &mut self,
        bytes: usize,
        in_flight: &mut InFlight,
        wakes: &mut WakeBatch,
    ) -> Result<(), Problem> {
        let direct = match self.state {
            ParseState::Data { left, .. } => left.min(bytes),
            _ => 0,
        };
        self.data_received(direct, in_flight, wakes);
        self.end += bytes - direct;
        while self.step(in_flight, wakes)? {}
        Ok(())
    }

    /// Records that `bytes` of data are in the request's buffer.
    fn data_received(&mut self, bytes: usize, in_flight: &mut InFlight, wakes: &mut WakeBatch) {
        if let ParseState::Data { slot, at, left, done } = &mut self.state {
            *at += bytes;
            *left -= bytes;
            let (slot, done) = (*slot, *done);
            if *left == 0 {
                self.state = ParseState::Header;
                if done {
                    in_flight.finish(slot, wakes);
                }
            }
        }
    }

    /// Takes this many staged bytes, if they are there. Returns their position.
    fn take(&mut self, bytes: usize) -> Option<usize> {
        let start = self.start;
        (self.end - start >= bytes).then(|| {
            self.start += bytes;
            start
        })
    }

    /// Parses one part of a reply. Returns whether there were enough bytes.
    fn step(&mut self, in_flight: &mut InFlight, wakes: &mut WakeBatch) -> Result<bool, Problem> {
        match self.state {
            ParseState::Header => self.header(in_flight, wakes),
            ParseState::Body { slot, kind, done, head, rest } => {
                let Some(at) = self.take(head) else { return Ok(false) };
                self.body(in_flight, wakes, (slot, kind, done), at, rest)?;
                Ok(true)
            }
            ParseState::Data { slot, at, left, .. } => {
                let here = left.min(self.end - self.start);
                let staged = &self.stage[self.start..self.start + here];
                if let Some(into) =
                    in_flight.get_mut(slot).and_then(|f| f.op.bytes_mut().get_mut(at..at + here))
                {
                    into.copy_from_slice(staged);
                }
                self.start += here;
                self.data_received(here, in_flight, wakes);
                Ok(here > 0)
            }
            ParseState::Skip { slot, left, done } => {
                let here = left.min((self.end - self.start) as u64);
                self.start += here as usize;
                if here == left {
                    self.ended(slot, done, in_flight, wakes);
                } else {
                    self.state = ParseState::Skip { slot, left: left - here, done };
                }
                Ok(here > 0 || left == 0)
            }
        }
    }

    /// Ends a chunk, and the reply if this was its last chunk.
    fn ended(&mut self, slot: u32, done: bool, in_flight: &mut InFlight, wakes: &mut WakeBatch) {
        self.state = ParseState::Header;
        if done {
            in_flight.finish(slot, wakes);
        }
    }

    fn header(&mut self, in_flight: &mut InFlight, wakes: &mut WakeBatch) -> Result<bool, Problem> {
        if self.end - self.start < 4 {
            return Ok(false);
        }
        match u32_at(&self.stage, self.start) {
            SIMPLE_REPLY_MAGIC => {
                let Some(at) = self.take(16) else { return Ok(false) };
                let (error, cookie) = (u32_at(&self.stage, at + 4), u64_at(&self.stage, at + 8));
                self.simple(error, cookie, in_flight, wakes)?;
            }
            STRUCTURED_REPLY_MAGIC if self.structured => {
                let Some(at) = self.take(20) else { return Ok(false) };
                let stage = &self.stage;
                let (flags, kind) = (u16_at(stage, at + 4), u16_at(stage, at + 6));
                let (cookie, len) = (u64_at(stage, at + 8), u32_at(stage, at + 16));
                self.chunk((flags & CHUNK_DONE != 0, kind), cookie, len, in_flight)?;
            }
            _ => return Err(Problem::Protocol("a message that is not a reply")),
        }
        Ok(true)
    }

    fn simple(
        &mut self,
        error: u32,
        cookie: u64,
        in_flight: &mut InFlight,
        wakes: &mut WakeBatch,
    ) -> Result<(), Problem> {
        let slot = in_flight.find(cookie).ok_or(Problem::Protocol("a reply without a request"))?;
        let Some(request) = in_flight.get_mut(slot) else { return Ok(()) };
        if request.op.kind == OffloadKind::Read && self.structured {
            return Err(Problem::Protocol("a simple reply to a read"));
        }
        if error != 0 {
            request.error.get_or_insert(error);
        } else if request.op.kind == OffloadKind::Read && request.op.len > 0 {
            request.received = request.op.len;
            let left = request.op.bytes().len();
            self.state = ParseState::Data { slot, at: 0, left, done: true };
            return Ok(());
        }
        in_flight.finish(slot, wakes);
        Ok(())
    }

    /// Parses the header of a chunk of a structured reply.
    fn chunk(
        &mut self,
        (done, kind): (bool, u16),
        cookie: u64,
        len: u32,
        in_flight: &InFlight,
    ) -> Result<(), Problem> {
        let slot = in_flight.find(cookie).ok_or(Problem::Protocol("a reply without a request"))?;
        let head = match kind {
            CHUNK_NONE if len == 0 && done => 0,
            CHUNK_DATA if len > 8 => 8,
            CHUNK_HOLE if len == 12 => 12,
            error if error & CHUNK_ERROR != 0 && (6..=ERROR_BYTES_MAX).contains(&len) => 6,
            _ => return Err(Problem::Protocol("an invalid chunk of a reply")),
        };
        let rest = u64::from(len) - head as u64;
        self.state = ParseState::Body { slot, kind, done, head, rest };
        Ok(())
    }

    /// Parses the head of a chunk's body, which is at `at` in the stage.
    fn body(
        &mut self,
        in_flight: &mut InFlight,
        wakes: &mut WakeBatch,
        (slot, kind, done): (u32, u16, bool),
        at: usize,
        rest: u64,
    ) -> Result<(), Problem> {
        let out_of_bounds = Problem::Protocol("data beyond the request");
        let Some(request) = in_flight.get_mut(slot) else { return Ok(()) };
        match kind {
            CHUNK_DATA => {
                let to = request.buffer_offset(u64_at(&self.stage, at), rest).ok_or(out_of_bounds)?;
                request.received += rest;
                self.state = ParseState::Data { slot, at: to, left: rest as usize, done };
            }
            CHUNK_HOLE => {
                let len = u64::from(u32_at(&self.stage, at + 8));
                let to = request.buffer_offset(u64_at(&self.stage, at), len).ok_or(out_of_bounds)?;
                request.received += len;
                if let Some(zeroes) = request.op.bytes_mut().get_mut(to..to + len as usize) {
                    zeroes.fill(0);
                }
                self.ended(slot, done, in_flight, wakes);
            }
            CHUNK_NONE => self.ended(slot, done, in_flight, wakes),
            _ => {
                let error = u32_at(&self.stage, at);
                // An error without a number is an error too.
                request.error.get_or_insert(error);
                self.state = ParseState::Skip { slot, left: rest, done };
            }
        }
        Ok(())
    }
}
