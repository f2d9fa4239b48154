//! What is remembered of the requests in flight at one queue.
//!
//! A slot is one request's, and its number the request's token. Whoever reaps a request has its slot from then on: threads
//! that share a queue do not get their own requests back. The queue orders what one thread wrote into a slot before the
//! submission with what another reads after the completion, so that plain loads and stores do.

use std::sync::atomic::{AtomicU64, Ordering};

use super::ledger::Claim;

/// One request.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    /// When it began, in nanoseconds of the run.
    start: AtomicU64,
    block: AtomicU64,
    /// The generation that is to be in the block afterwards; with this bit, it is a read.
    generation_and_read: AtomicU64,
}

const READ: u64 = 1 << 32;

/// What a slot says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotRecord {
    pub(crate) start: u64,
    pub(crate) read: bool,
    pub(crate) claim: Claim,
}

impl Slot {
    /// Before the request is submitted.
    #[inline]
    pub(crate) fn store(&self, record: SlotRecord) {
        self.start.store(record.start, Ordering::Relaxed);
        self.block.store(record.claim.block, Ordering::Relaxed);
        let read = if record.read { READ } else { 0 };
        self.generation_and_read.store(u64::from(record.claim.generation) | read, Ordering::Relaxed);
    }

    /// After it was completed.
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
