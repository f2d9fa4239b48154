//! Requests that are at the server or about to be sent.

use super::inbox::QueuedOp;
use super::wire;
use crate::IoError;
use crate::offload::{Flushes, OffloadKind, OffloadOp, WakeBatch};
use kickless_io::Errno;

/// The largest number of requests at a time. A server that handles fewer leaves the rest in the socket.
pub(super) const DEPTH: usize = 256;

/// One request in flight.
#[derive(Debug)]
pub(super) struct InFlightRequest {
    number: u64,
    losses: u8,
    pub(super) op: OffloadOp,
    cookie: u64,
    /// The number of bytes of a read that have arrived.
    pub(super) received: u64,
    /// The first error so far.
    pub(super) error: Option<u32>,
    /// For a flush: the number of writes that were acknowledged when it was sent, and its number among the
    /// flushes.
    covers: u64,
    flush: u64,
}

impl InFlightRequest {
    /// Returns the offset in the buffer for the disk's bytes from `at` on. Returns `None` if the request is
    /// not for all of them, or has received too much.
    pub(super) fn buffer_offset(&self, at: u64, len: u64) -> Option<usize> {
        let offset = at.checked_sub(self.op.at)?;
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.op.len);
        let fits = self.received.checked_add(len).is_some_and(|received| received <= self.op.len);
        (inside && fits && self.op.kind == OffloadKind::Read).then_some(offset as usize)
    }

    /// Returns the result of the request.
    fn result(&self) -> Result<(), IoError> {
        match self.error {
            Some(code) => Err(IoError::Os(errno_of(code))),
            // The server left out bytes, so they are unknown.
            None if self.op.kind == OffloadKind::Read && self.received != self.op.len => {
                Err(IoError::Os(Errno::IO))
            }
            None => Ok(()),
        }
    }
}

/// Converts the protocol's error numbers (section "Error values").
fn errno_of(code: u32) -> Errno {
    match code {
        1 => Errno::PERM,
        12 => Errno::NOMEM,
        22 => Errno::INVAL,
        28 => Errno::NOSPC,
        75 => Errno::OVERFLOW,
        95 => Errno::OPNOTSUPP,
        _ => Errno::IO,
    }
}

/// All requests of a connection, by slot. The cookie of a request contains its slot.
#[derive(Debug)]
pub(super) struct InFlight {
    slots: Vec<Option<InFlightRequest>>,
    free: Vec<u32>,
    /// Tells requests in the same slot apart.
    next: u32,
    /// The number of acknowledged writes, and how many of them the last completed flush covers.
    written: u64,
    flushed: u64,
    /// The flushes in flight, and the count of lost writes in each answer: see [`OffloadOp::lost_writes`].
    flushes: Flushes<InFlightRequest>,
}

impl InFlight {
    /// Makes an empty list. `lost_writes` is the count before this connection. `is_dirty`: the server may
    /// still lose writes of an earlier connection.
    pub(super) fn new(lost_writes: u64, is_dirty: bool) -> Self {
        Self {
            slots: (0..DEPTH).map(|_| None).collect(),
            free: (0..DEPTH as u32).rev().collect(),
            next: 0,
            written: u64::from(is_dirty),
            flushed: 0,
            flushes: Flushes::new(lost_writes),
        }
    }

    pub(super) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Inserts a request and returns its slot. The caller has checked that there is room.
    pub(super) fn insert(&mut self, queued: QueuedOp) -> Option<u32> {
        let QueuedOp { number, op, losses } = queued;
        let slot = self.free.pop()?;
        self.next = self.next.wrapping_add(1);
        let cookie = u64::from(self.next) << 32 | u64::from(slot);
        let flush = if op.kind == OffloadKind::Flush { self.flushes.begin() } else { u64::MAX };
        let covers = self.written;
        let request = InFlightRequest { number, losses, op, cookie, received: 0, error: None, covers, flush };
        self.slots[slot as usize] = Some(request);
        Some(slot)
    }

    /// Returns the bytes to send: a header, and the data after it.
    pub(super) fn to_send(&self, slot: u32) -> Option<([u8; wire::REQUEST_BYTES], &[u8])> {
        let request = self.get(slot)?;
        let OffloadOp { kind, at, len, .. } = request.op;
        let (command, flags) = wire::command(kind);
        let header = wire::request(command, flags, request.cookie, at, len as u32);
        let bytes = if matches!(kind, OffloadKind::Write { .. }) { request.op.bytes() } else { &[] };
        Some((header, bytes))
    }

    pub(super) fn get(&self, slot: u32) -> Option<&InFlightRequest> {
        self.slots.get(slot as usize)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, slot: u32) -> Option<&mut InFlightRequest> {
        self.slots.get_mut(slot as usize)?.as_mut()
    }

    /// Returns the slot of the request with this cookie.
    pub(super) fn find(&self, cookie: u64) -> Option<u32> {
        let slot = cookie as u32;
        self.get(slot).filter(|request| request.cookie == cookie).map(|_| slot)
    }

    /// Answers a request according to its replies.
    pub(super) fn finish(&mut self, slot: u32, wakes: &mut WakeBatch) {
        let Some(mut request) = self.remove(slot) else { return };
        let result = request.result();
        match request.op.kind {
            OffloadKind::Flush if result.is_ok() => {
                self.flushes.succeed(request.flush, request);
                return self.answer_flushes(wakes);
            }
            OffloadKind::Flush => self.flushes.fail(request.flush),
            OffloadKind::Write { durable: false }
            | OffloadKind::Zeroes { durable: false, .. }
            | OffloadKind::Discard { durable: false }
                if result.is_ok() =>
            {
                self.written += 1;
            }
            _ => {}
        }
        request.op.lost_writes = self.flushes.lost_writes();
        request.op.answer(result, wakes);
        // These flushes waited for the one that has failed now.
        self.answer_flushes(wakes);
    }

    fn answer_flushes(&mut self, wakes: &mut WakeBatch) {
        while let Some(mut request) = self.flushes.due() {
            self.flushed = self.flushed.max(request.covers);
            request.op.lost_writes = self.flushes.lost_writes();
            request.op.answer(Ok(()), wakes);
        }
    }

    fn remove(&mut self, slot: u32) -> Option<InFlightRequest> {
        let request = self.slots.get_mut(slot as usize)?.take()?;
        self.free.push(slot);
        Some(request)
    }

    /// Returns the number of times when acknowledged writes may have been lost, before this connection and on
    /// it.
    pub(super) fn lost_writes(&self) -> u64 {
        self.flushes.lost_writes()
    }

    /// Returns whether the server has acknowledged writes that may not be on stable storage.
    pub(super) fn is_dirty(&self) -> bool {
        self.written > self.flushed
    }

    pub(super) fn is_empty(&self) -> bool {
        self.free.len() == DEPTH && self.flushes.held().next().is_none()
    }

    /// Returns whether a request in flight changes data.
    pub(super) fn has_changes(&self) -> bool {
        let mut kinds = self.slots.iter().flatten().map(|request| request.op.kind);
        kinds.any(|kind| !matches!(kind, OffloadKind::Read | OffloadKind::Flush))
    }

    /// Removes all requests, in the order of their submission.
    pub(super) fn drain(&mut self) -> Vec<QueuedOp> {
        let mut was = std::mem::replace(self, Self::new(self.lost_writes(), self.is_dirty()));
        let held = std::iter::from_fn(|| was.flushes.take_if(|_, _| true));
        let all = was.slots.into_iter().flatten().chain(held);
        let mut left: Vec<_> =
            all.map(|InFlightRequest { number, op, losses, .. }| QueuedOp { number, op, losses }).collect();
        left.sort_unstable_by_key(|queued| queued.number);
        left
    }

    /// Returns whether a request with a smaller number is in flight.
    pub(super) fn any_before(&self, number: u64) -> bool {
        self.slots.iter().flatten().chain(self.flushes.held()).any(|request| request.number < number)
    }
}
