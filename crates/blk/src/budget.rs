//! The limit on memory for the buffer pieces of a device's requests in flight.
//!
//! A guest decides how many pieces a request has, and how many requests are in flight. With the default
//! number and size of queues, it could ask for 65536 requests with 32768 pieces of 16 bytes each, or 32 GiB.
//! The limit works as follows:
//!
//! * Each slot may have room for [`UNCOUNTED_PIECES`] pieces. That is enough for nearly every request, and
//!   is not counted.
//! * A slot reserves room beyond that from the device's [`Budget`], which all its queues share.
//! * A request that finds too little room waits in its slot, and its queue pops no more requests. It goes on
//!   when another request of the same queue that has a reservation ends. If no other request of the queue has
//!   one, the request does not wait: it reserves more than there is. So no queue waits for another, and each
//!   queue can always have one request in flight.
//! * A slot keeps its room for the next request, unless less than half of the budget is left. So idle slots
//!   keep at most half of the budget, and the other half is always there for requests in flight.
//!
//! So a device with q queues of n entries has room for at most the sum of:
//!
//! * [`PIECES_MAX`] pieces,
//! * [`UNCOUNTED_PIECES`] pieces for each of the q n slots,
//! * twice the largest request for each of the q queues: one that reserved more than there was, and one that
//!   waits.
//!
//! With 64 queues of 1024 entries these are 16 MiB, 32 MiB and 64 MiB.
//!
//! A device that stops on errors also has a copy of each request in flight. Copies are reserved as the
//! requests are, and those that are not counted double the second summand.
//!
//! The budget is one atomic number. No other data depend on it, so its orders are relaxed.

use std::sync::atomic::{AtomicUsize, Ordering};

/// The number of pieces for which every slot may have room without a reservation.
pub(crate) const UNCOUNTED_PIECES: usize = 32;
/// The number of pieces in the budget: 8192 requests of 512 KiB in pages of 4 KiB, or 16 MiB.
const PIECES_MAX: usize = 1 << 20;
/// The largest number of pieces for which an idle slot keeps room.
const KEPT_PIECES_MAX: usize = 256;

/// The number of pieces that the slots of a device have reserved.
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

    /// Reserves room for `pieces`, if there is enough.
    pub(crate) fn try_take(&self, pieces: usize) -> bool {
        let enough = |taken: usize| taken.checked_add(pieces).filter(|sum| *sum <= self.max);
        self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, enough).is_ok()
    }

    /// Reserves room for `pieces`, even if there is not enough.
    pub(crate) fn take_beyond_limit(&self, pieces: usize) {
        self.taken.fetch_add(pieces, Ordering::Relaxed);
    }

    /// Returns room for `pieces` that were reserved.
    pub(crate) fn give_back(&self, pieces: usize) {
        self.taken.fetch_sub(pieces, Ordering::Relaxed);
    }

    /// Returns how many of its `pieces` an idle slot may keep reserved.
    pub(crate) fn kept_part_of(&self, pieces: usize) -> usize {
        let scarce = self.taken.load(Ordering::Relaxed) > self.max / 2;
        if scarce { 0 } else { pieces.min(KEPT_PIECES_MAX) }
    }

    #[cfg(test)]
    pub(crate) fn taken(&self) -> usize {
        self.taken.load(Ordering::Relaxed)
    }
}
