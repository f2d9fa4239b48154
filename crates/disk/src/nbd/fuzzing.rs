//! Runs the parsers of a server's messages for the fuzz target.

use super::handshake::negotiate;
use super::in_flight::InFlight;
use super::inbox::QueuedOp;
use super::replies::Replies;
use super::wire::{
    CHUNK_DATA, GREETING, OPT_GO, OPT_STRUCTURED_REPLY, OPTION_MAGIC, OPTION_REPLY_MAGIC, REP_ACK, REP_INFO,
    SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC,
};
use crate::SECTOR;
use crate::offload::{AnswerSlot, OffloadKind, WakeBatch};
use kickless_io::{AlignedBuf, Waker};
use std::io::{self, Read, Write};
use std::sync::Arc;

/// The requests in flight: reads, and two of other kinds.
const REQUESTS: u64 = 8;
const BYTES: u64 = 2048;

/// A server with a fixed output.
struct Canned<'a>(&'a [u8]);

impl Read for Canned<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(into)
    }
}

impl Write for Canned<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        Ok(from.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns whether the handshake succeeds with a server that sends these bytes.
///
/// # Panics
/// The sizes of requests to this export would be invalid.
pub fn handshake(said: &[u8]) -> bool {
    let Ok(export) = negotiate(&mut Canned(said), "export") else { return false };
    let sizes = export.sizes.of_ops();
    assert!(sizes.block().is_power_of_two() && (512..=65536).contains(&sizes.block()));
    assert!(sizes.payload_max() >= sizes.block() && sizes.payload_max().is_multiple_of(sizes.block()));
    assert!(export.accessible_size() <= export.size);
    let limits = export.sizes.limits(false, true, true);
    assert!(limits.discard.is_some_and(|ranges| u64::from(ranges.alignment) * SECTOR == sizes.block()));
    true
}

/// Returns whether the handshake succeeds with a server that describes its export by these bodies of
/// information, each after a byte with its length.
pub fn handshake_with_infos(mut bodies: &[u8]) -> bool {
    let answer = |option: u32, kind: u32, body: &[u8]| {
        let len = body.len() as u32;
        [&OPTION_REPLY_MAGIC.to_be_bytes()[..], &[option, kind, len].map(u32::to_be_bytes).concat(), body]
            .concat()
    };
    let mut said = [&GREETING.to_be_bytes()[..], &OPTION_MAGIC.to_be_bytes(), &[0, 3]].concat();
    said.extend(answer(OPT_STRUCTURED_REPLY, REP_ACK, &[]));
    said.extend(answer(OPT_GO, REP_INFO, &[0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0x6d]));
    while let Some((&len, rest)) = bodies.split_first() {
        let (body, rest) = rest.split_at(rest.len().min(len.into()));
        said.extend(answer(OPT_GO, REP_INFO, body));
        bodies = rest;
    }
    said.extend(answer(OPT_GO, REP_ACK, &[]));
    handshake(&said)
}

/// Makes a server's output from a script: replies to existing requests, and arbitrary bytes.
fn stream(mut script: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut next = |count: usize| {
        let (here, rest) = script.split_at(count.min(script.len()));
        script = rest;
        let mut word = [0; 8];
        word[8 - here.len()..].copy_from_slice(here);
        (!here.is_empty()).then(|| u64::from_be_bytes(word))
    };
    while let Some(kind) = next(1) {
        let (place, error) = (next(1).unwrap_or(0) % (REQUESTS + 1), next(1).unwrap_or(0));
        let cookie = (place + 1) << 32 | place;
        match kind % 4 {
            0 => bytes.extend(error.to_be_bytes()),
            1 => {
                bytes.extend(SIMPLE_REPLY_MAGIC.to_be_bytes());
                bytes.extend((error as u32 % 2).to_be_bytes());
                bytes.extend(cookie.to_be_bytes());
                bytes.extend((0..next(2).unwrap_or(0) % 4096).map(|i| i as u8));
            }
            _ => {
                let (len, at) = (next(2).unwrap_or(0) % 4096, next(2).unwrap_or(0));
                let of = [CHUNK_DATA, 0, 2, 0x8001, 0x8002, error as u16][error as usize % 6];
                bytes.extend(STRUCTURED_REPLY_MAGIC.to_be_bytes());
                bytes.extend((kind as u16 >> 2).to_be_bytes());
                bytes.extend(of.to_be_bytes());
                bytes.extend(cookie.to_be_bytes());
                bytes.extend((len as u32).to_be_bytes());
                bytes.extend(&[&at.to_be_bytes()[..], &len.to_be_bytes()[4..]].concat());
                bytes.extend((12..len).map(|i| i as u8));
            }
        }
    }
    bytes
}

/// Parses replies that come in pieces of `step` bytes. Returns the number of answered requests.
///
/// # Panics
/// A request was answered twice, or an incomplete read succeeded.
pub fn replies(structured: bool, step: usize, script: &[u8]) -> usize {
    let (mut in_flight, mut wakes) = (InFlight::new(0, false), WakeBatch::default());
    let Ok(waker) = Waker::new() else { return 0 };
    let slots: Vec<_> = (0..REQUESTS).map(|_| Arc::new(AnswerSlot::default())).collect();
    for (number, slot) in (0..).zip(&slots) {
        let (kind, buffer) = match number {
            0 => (OffloadKind::Flush, None),
            1 => (OffloadKind::Write { durable: false }, AlignedBuf::new(BYTES as usize, 512).ok()),
            _ => (OffloadKind::Read, AlignedBuf::new(BYTES as usize, 512).ok()),
        };
        let len = if buffer.is_some() { BYTES } else { 0 };
        let op = slot.op(kind, (number * BYTES, len), buffer, &waker);
        in_flight.insert(QueuedOp { number, op, losses: 0 });
    }
    let mut replies = Replies::new(structured);
    let said = stream(script);
    let mut rest = &said[..];
    while !rest.is_empty() {
        let mut here = 0;
        for slice in &mut replies.space(&mut in_flight) {
            let fits = slice.len().min(rest.len()).min(step.max(1) - here.min(step));
            let (now, later) = rest.split_at(fits);
            slice[..fits].copy_from_slice(now);
            (rest, here) = (later, here + fits);
        }
        assert!(here > 0, "there is no room for the server's output");
        if replies.received(here, &mut in_flight, &mut wakes).is_err() {
            break;
        }
    }
    slots.iter().filter(|slot| slot.take().is_some()).count()
}
