//! Records of the requests in flight at one queue.
//!
//! Each slot holds the record of one request. The number of the slot is the token of the request. Threads
//! that share a queue may reap one another's requests. The thread that reaps a request owns its slot from
//! then on.
//!
//! A thread stores the record before it submits the request. Another thread may load the record after the
//! request completed. The queue synchronises these two threads, so relaxed loads and stores are enough.

use std::sync::atomic::{AtomicU64, Ordering};

use super::ledger::Claim;

/// The slot of one request.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    /// The time when it was due or made, in nanoseconds since the start of the turn.
    start: AtomicU64,
    block: AtomicU64,
    /// The generation of the block after the request, and [`READ`] if it is a read.
    generation_and_read: AtomicU64,
}

const READ: u64 = 1 << 32;

/// The record of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotRecord {
    pub(crate) start: u64,
    pub(crate) read: bool,
    pub(crate) claim: Claim,
}

impl Slot {
    /// Stores the record, before the request is submitted.
    #[inline]
    pub(crate) fn store(&self, record: SlotRecord) {
        self.start.store(record.start, Ordering::Relaxed);
        self.block.store(record.claim.block, Ordering::Relaxed);
        let read = if record.read { READ } else { 0 };
        self.generation_and_read.store(u64::from(record.claim.generation) | read, Ordering::Relaxed);
    }

    /// Loads the record, after the request completed.
    #[inline]
    pub(crate) fn load(&self) -> SlotRecord {
        let what = self.generation_and_read.load(Ordering::Relaxed);
        let claim = Claim { block: self.block.load(Ordering::Relaxed), generation: what as u32 };
        SlotRecord { start: self.start.load(Ordering::Relaxed), read: what & READ != 0, claim }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_what_was_stored() {
        let slot = Slot::default();
        for read in [false, true] {
            let record =
                SlotRecord { start: 7, read, claim: Claim { block: u64::MAX, generation: u32::MAX } };
            slot.store(record);
            assert_eq!(slot.load(), record);
        }
    }
}
