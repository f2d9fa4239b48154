//! How much memory the requests in flight of one device may take for the pieces of their buffers.
//!
//! A guest decides how many pieces a request has, and how many requests it has in flight: 32768 pieces of 16 bytes each, in
//! 65536 requests with the default number and size of queues, which would be 32 GiB. So:
//!
//! * Each slot may have room for [`FREE`] pieces. That is nearly every request, and is not accounted for.
//! * What a slot has room for beyond that is taken from the device's [`Budget`], which all its queues share.
//! * A request for which there is too little waits in its slot, and its queue pops nothing more, until one of the queue's own
//!   requests that took from the budget ends. A queue that has none of these in flight does not wait: it takes more than there
//!   is. So no queue waits for another one, and each can go on with one request at a time, however much the others take.
//! * A slot keeps its room for the next request, unless less than half of the budget is left. So what idle slots keep is at most half of
//!   it, and the other half is always there for requests in flight.
//!
//! In all, a device with q queues of n entries takes at most [`PIECES_MAX`] pieces, [`FREE`] for each of q n slots, and twice the largest
//! request for each of the q queues: one that took more than there was, and one that waits. With 64 queues of 1024 entries that is
//! 16 MiB, 32 MiB and 64 MiB.
//!
//! The count is one atomic number that nothing else depends on, so its orders are relaxed.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Pieces for which every slot may have room.
pub(crate) const FREE: usize = 32;
/// Pieces that all requests of a device may have beyond that: 8192 requests of 512 KiB in pages of 4 KiB, or 16 MiB.
const PIECES_MAX: usize = 1 << 20;
/// Pieces that an idle slot keeps room for.
const KEPT: usize = 256;

/// The pieces that the slots of a device have taken.
#[derive(Debug)]
pub(crate) struct Budget {
    taken: AtomicUsize,
    max: usize,
}

impl Default for Budget {
    fn default() -> Self {
        Self::new(PIECES_MAX)
    }
}

impl Budget {
    pub(crate) fn new(max: usize) -> Self {
        Self { taken: AtomicUsize::new(0), max }
    }

    /// Takes so many, if there are as many.
    pub(crate) fn take(&self, pieces: usize) -> bool {
        let enough = |taken: usize| taken.checked_add(pieces).filter(|sum| *sum <= self.max);
        self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, enough).is_ok()
    }

    /// Takes so many, whether there are as many or not.
    pub(crate) fn overdraw(&self, pieces: usize) {
        self.taken.fetch_add(pieces, Ordering::Relaxed);
    }

    /// Gives so many back that were taken.
    pub(crate) fn give_back(&self, pieces: usize) {
        self.taken.fetch_sub(pieces, Ordering::Relaxed);
    }

    /// Returns how many pieces of those that it has taken a slot keeps.
    pub(crate) fn kept_of(&self, pieces: usize) -> usize {
        let scarce = self.taken.load(Ordering::Relaxed) > self.max / 2;
        if scarce { 0 } else { pieces.min(KEPT) }
    }

    #[cfg(test)]
    pub(crate) fn taken(&self) -> usize {
        self.taken.load(Ordering::Relaxed)
    }
}
