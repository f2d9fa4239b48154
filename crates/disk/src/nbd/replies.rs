//! What a server sends, taken apart: simple replies and structured ones. It is trusted with nothing but the data.

use super::in_flight::InFlight;
use super::wire::*;
use crate::offload::{OffloadKind, WakeBatch};
use std::io::IoSliceMut;

/// Bytes read at once beside those that go straight into a request's buffer. Longer than any header.
const STAGE_BYTES: usize = 16 << 10;

/// Bytes of what a server may say about an error.
const ERROR_BYTES_MAX: u32 = 4096 + 16;

/// Where in the stream of replies we are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Before a header.
    Header,
    /// Before the head of a chunk's body, which has so many bytes, and then so many more.
    Body { place: u32, kind: u16, done: bool, head: usize, rest: u64 },
    /// Within data that goes into a request's buffer.
    Data { place: u32, at: usize, left: usize, done: bool },
    /// Within something that is not looked at.
    Skip { place: u32, left: u64, done: bool },
}

/// The replies of one connection.
#[derive(Debug)]
pub(crate) struct Replies {
    structured: bool,
    state: State,
    stage: Box<[u8]>,
    /// What of it has been read and not taken apart.
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
        Self { structured, state: State::Header, stage, start: 0, end: 0 }
    }

    /// Where the next bytes of the stream go: first what a request's buffer wants, then the rest. Never nothing.
    pub(super) fn space<'a>(&'a mut self, in_flight: &'a mut InFlight) -> [IoSliceMut<'a>; 2] {
        // No more than a part of a header is there.
        self.stage.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let data = match self.state {
            State::Data { place, at, left, .. } => in_flight
                .get_mut(place)
                .and_then(|request| request.op.bytes_mut().get_mut(at..at + left))
                .unwrap_or_default(),
            _ => &mut [],
        };
        [IoSliceMut::new(data), IoSliceMut::new(&mut self.stage[self.end..])]
    }

    /// So many bytes have been put into [`Replies::space`]: takes them apart. Requests that are over are answered.
    ///
    /// # Errors
    /// The server does not keep to the protocol: nothing that it says from here on can be understood.
    pub(super) fn received(
        &mut self,
        bytes: usize,
        in_flight: &mut InFlight,
        wakes: &mut WakeBatch,
    ) -> Result<(), Problem> {
        let direct = match self.state {
            State::Data { left, .. } => left.min(bytes),
            _ => 0,
        };
        self.took(direct, in_flight, wakes);
        self.end += bytes - direct;
        while self.step(in_flight, wakes)? {}
        Ok(())
    }

    /// So many bytes of data have gone where they belong.
    fn took(&mut self, bytes: usize, in_flight: &mut InFlight, wakes: &mut WakeBatch) {
        if let State::Data { place, at, left, done } = &mut self.state {
            *at += bytes;
            *left -= bytes;
            let (place, done) = (*place, *done);
            if *left == 0 {
                self.state = State::Header;
                if done {
                    in_flight.finish(place, wakes);
                }
            }
        }
    }

    /// Takes so many staged bytes, if they are there.
    fn take(&mut self, bytes: usize) -> Option<usize> {
        let start = self.start;
        (self.end - start >= bytes).then(|| {
            self.start += bytes;
            start
        })
    }

    /// Goes on by one part of a reply; whether there was enough of it.
    fn step(&mut self, in_flight: &mut InFlight, wakes: &mut WakeBatch) -> Result<bool, Problem> {
        match self.state {
            State::Header => self.header(in_flight, wakes),
            State::Body { place, kind, done, head, rest } => {
                let Some(at) = self.take(head) else { return Ok(false) };
                self.body(in_flight, wakes, (place, kind, done), at, rest)?;
                Ok(true)
            }
            State::Data { place, at, left, .. } => {
                let here = left.min(self.end - self.start);
                let staged = &self.stage[self.start..self.start + here];
                if let Some(into) =
                    in_flight.get_mut(place).and_then(|f| f.op.bytes_mut().get_mut(at..at + here))
                {
                    into.copy_from_slice(staged);
                }
                self.start += here;
                self.took(here, in_flight, wakes);
                Ok(here > 0)
            }
            State::Skip { place, left, done } => {
                let here = left.min((self.end - self.start) as u64);
                self.start += here as usize;
                if here == left {
                    self.ended(place, done, in_flight, wakes);
                } else {
                    self.state = State::Skip { place, left: left - here, done };
                }
                Ok(here > 0 || left == 0)
            }
        }
    }

    /// A chunk is over, and with it perhaps the reply.
    fn ended(&mut self, place: u32, done: bool, in_flight: &mut InFlight, wakes: &mut WakeBatch) {
        self.state = State::Header;
        if done {
            in_flight.finish(place, wakes);
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
            _ => return Err(Problem::Protocol("something that is no reply")),
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
        let place = in_flight.find(cookie).ok_or(Problem::Protocol("a reply to no request"))?;
        let Some(request) = in_flight.get_mut(place) else { return Ok(()) };
        if request.op.kind == OffloadKind::Read && self.structured {
            return Err(Problem::Protocol("a simple reply to a read"));
        }
        if error != 0 {
            request.error.get_or_insert(error);
        } else if request.op.kind == OffloadKind::Read && request.op.len > 0 {
            request.got = request.op.len;
            let left = request.op.bytes().len();
            self.state = State::Data { place, at: 0, left, done: true };
            return Ok(());
        }
        in_flight.finish(place, wakes);
        Ok(())
    }

    /// The header of a chunk of a structured reply.
    fn chunk(
        &mut self,
        (done, kind): (bool, u16),
        cookie: u64,
        len: u32,
        in_flight: &InFlight,
    ) -> Result<(), Problem> {
        let place = in_flight.find(cookie).ok_or(Problem::Protocol("a reply to no request"))?;
        let head = match kind {
            CHUNK_NONE if len == 0 && done => 0,
            CHUNK_DATA if len > 8 => 8,
            CHUNK_HOLE if len == 12 => 12,
            error if error & CHUNK_ERROR != 0 && (6..=ERROR_BYTES_MAX).contains(&len) => 6,
            _ => return Err(Problem::Protocol("a part of a reply that does not belong there")),
        };
        let rest = u64::from(len) - head as u64;
        self.state = State::Body { place, kind, done, head, rest };
        Ok(())
    }

    /// The head of a chunk's body is at `at` in the stage.
    fn body(
        &mut self,
        in_flight: &mut InFlight,
        wakes: &mut WakeBatch,
        (place, kind, done): (u32, u16, bool),
        at: usize,
        rest: u64,
    ) -> Result<(), Problem> {
        let beside = Problem::Protocol("data that was not asked for");
        let Some(request) = in_flight.get_mut(place) else { return Ok(()) };
        match kind {
            CHUNK_DATA => {
                let to = request.place(u64_at(&self.stage, at), rest).ok_or(beside)?;
                request.got += rest;
                self.state = State::Data { place, at: to, left: rest as usize, done };
            }
            CHUNK_HOLE => {
                let len = u64::from(u32_at(&self.stage, at + 8));
                let to = request.place(u64_at(&self.stage, at), len).ok_or(beside)?;
                request.got += len;
                if let Some(zeroes) = request.op.bytes_mut().get_mut(to..to + len as usize) {
                    zeroes.fill(0);
                }
                self.ended(place, done, in_flight, wakes);
            }
            CHUNK_NONE => self.ended(place, done, in_flight, wakes),
            _ => {
                let error = u32_at(&self.stage, at);
                // One without a number is an error as well.
                request.error.get_or_insert(error);
                self.state = State::Skip { place, left: rest, done };
            }
        }
        Ok(())
    }
}
