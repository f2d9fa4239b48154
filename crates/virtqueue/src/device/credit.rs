//! Credit: chains that are popped before there is data for them, and that can go back into the ring.
//!
//! A network card pops receive buffers ahead, so that they are ready for a frame. It may never need them: the
//! queue can stop, or guest memory can change, while no frame comes. So these chains are not in flight,
//! nothing waits for them, and they can be returned:
//!
//! ```text
//!   pop_credit    the next chain of the ring                 becomes the newest of the credit
//!   use_credit    the oldest of the credit                   is in flight from now on, and has to be pushed
//!   unpop         the newest of the credit                   goes back: the next pop returns it again
//! ```
//!
//! # Invariants
//! 1. The chains that a queue has popped and not pushed are, in the order of their pops, first those in
//!    flight and then the credit. A queue with credit pops only credit. The oldest is used and the newest is
//!    returned.
//! 2. The device writes nothing for credit: not to the buffers, not to the in-flight buffer, and not to the
//!    ring. Every pushed chain was in flight. So in a packed ring, used descriptors only overwrite
//!    descriptors of chains that were in flight. All of these come before the descriptors of the credit,
//!    which still hold what the driver wrote.
//! 3. The descriptors of the credit end where the next pop begins.
//!
//! So a chain is returned by arithmetic on our own indices: the avail index less one, or the position less
//! the chain's descriptors, which inverts the wrap counter if it crosses the start of the ring. The driver
//! does not notice.
//!
//! # The index check
//! A split queue accepts `avail.idx` if it is ahead by at most the number of free descriptors. Credit does
//! not count as free. A returned chain makes one more descriptor free, and the index one further ahead, so
//! the check still holds. Entries that were checked once may be popped a second time without another check
//! (`avail_seen` does not change). If the driver moves the index back meanwhile, the next check finds that.
//!
//! # Kicks
//! After a chain is returned, the event index in the ring may be ahead of the next entry. All entries between
//! the two are available already. `has_work` finds them, and [`Queue::arm`](super::Queue::arm) moves the
//! event index back and reports that there is something to pop. Their kick was given or suppressed before,
//! and no further kick comes for them. So the owner must look at the ring after it has returned credit,
//! before it sleeps.
//!
//! A device that wants no kicks puts the event index behind an index that the driver is known to have
//! published. That must be the last index that the device has seen, not the one up to which it has popped.
//! The latter may have gone back, and half a round later the event index would be ahead again.
//!
//! # IN_ORDER
//! A position is a count of pops (see [`super::order`]). The chains of the credit have the last positions,
//! and none of them is completed. So the newest one is removed from the end of the deque. The next chain gets
//! the same position.
//!
//! # The in-flight buffer
//! The buffer tells how far a device has popped: the used chains, and then the chains in flight (see
//! [`super::inflight`]). So the chains that it names must be the first of the popped ones, without a gap.
//! Credit is recorded when it is used (step *P* of that module), in the order of pops. By invariant 1, the
//! chains in flight have no gap. Before that, the buffer says that the chain is not popped, and the next
//! device finds it in the ring. The copies of a packed chain's descriptors are also made at that time. By
//! invariant 2 the descriptors are still there.
//!
//! A chain that an earlier process had in flight is already named in the buffer. It stays named if it is
//! popped as credit. If it is returned, it is again one of the chains to resubmit. These are popped before
//! all others, so invariant 1 holds for them.
//!
//! # Hostile drivers
//! The driver can change ring and descriptors while a chain is credit, and after it is returned. The second
//! pop reads and checks everything again. It may return another chain, or an error. The queue keeps only the
//! id and the number of descriptors of the first chain, in its own memory, and drops them when the chain is
//! returned. If descriptors change before they are copied into the in-flight buffer, the next device reports
//! an error of the ring, as for chains that are not credit.

use std::collections::VecDeque;

/// The chains of the credit that came from the ring, and not from the in-flight buffer; oldest first.
#[derive(Debug, Default)]
pub(super) struct Credit {
    chains: VecDeque<Chain>,
    /// Avail entries or packed descriptors of all of them.
    ring_descriptors: u16,
}

/// A chain of the credit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chain {
    /// The head, or the id in a packed ring.
    pub(super) id: u16,
    /// Its entries in the avail ring (one), or its descriptors in a packed ring.
    pub(super) ring_descriptors: u16,
}

impl Credit {
    pub(super) fn len(&self) -> u16 {
        // At most the number of the queue's entries.
        self.chains.len() as u16
    }

    /// Returns the number of avail entries or packed descriptors from the oldest chain to the next pop.
    pub(super) fn ring_descriptors(&self) -> u16 {
        self.ring_descriptors
    }

    pub(super) fn oldest(&self) -> Option<Chain> {
        self.chains.front().copied()
    }

    /// Adds a popped chain.
    pub(super) fn popped(&mut self, chain: Chain) {
        self.ring_descriptors += chain.ring_descriptors;
        self.chains.push_back(chain);
    }

    /// Removes the oldest chain, which is in flight from now on.
    pub(super) fn used(&mut self) {
        if let Some(chain) = self.chains.pop_front() {
            self.ring_descriptors -= chain.ring_descriptors;
        }
    }

    /// Removes the newest chain, which goes back into the ring.
    pub(super) fn unpopped(&mut self) -> Option<Chain> {
        let chain = self.chains.pop_back()?;
        self.ring_descriptors -= chain.ring_descriptors;
        Some(chain)
    }
}
