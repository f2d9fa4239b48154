//! Credit: chains that were popped before there is anything to put into them, and that can go back into the ring.
//!
//! A network card pops receive buffers ahead, so that a frame finds them. It may never need them: the queue stops, or guest memory
//! changes, while no frame comes. So these chains are not in flight, nothing waits for them, and they can be returned:
//!
//! ```text
//!   pop_credit    the next chain of the ring                 becomes the newest of the credit
//!   use_credit    the oldest of the credit                   is in flight from now on, and has to be pushed
//!   unpop         the newest of the credit                   goes back: the next pop yields it again
//! ```
//!
//! # Invariants
//! 1. The chains that a queue has popped and not pushed are, in the order in which they were popped, first those in flight and then
//!    the credit. A queue with credit pops nothing but credit; the oldest is used and the newest is returned.
//! 2. The device writes nothing that concerns credit: not into the buffers, not into the in-flight buffer, and not into the ring. What
//!    is pushed was in flight. In a packed ring used descriptors therefore lie in places of chains that were in flight, all of which
//!    come before the places of the credit; those still hold what the driver wrote.
//! 3. The places of the credit end where the next pop begins.
//!
//! So a chain is returned by arithmetic on indices of our own: the avail index less one, or the place less the chain's descriptors,
//! which turns the wrap counter back if it crosses the start of the ring. The driver sees nothing of it.
//!
//! # The index check
//! A split queue believes `avail.idx` if it is no more than the free descriptors ahead. It counts credit as taken. A chain that is
//! returned is one less taken and one more ahead, so the sum is as before, and what was checked once may be popped a second time
//! without another look (`avail_seen` stays). An index that the driver has moved back meanwhile is found at the next look.
//!
//! # Kicks
//! The event index in the ring may be ahead of the next entry afterwards. All entries between the two are available already: they
//! are found by `has_work`, and [`Queue::arm`](super::Queue::arm) moves the event index back and says that there is something to pop.
//! Their kick was given or waived before, and none comes for them. So the owner looks at the ring after it has returned credit, before it
//! sleeps for anything that it would find there.
//!
//! A device that wants no kicks places the event index behind an index that the driver is known to have published. That is the index
//! that it has seen, not the one up to which it has popped: the latter may have gone back, and half a round further the
//! event index would be ahead again.
//!
//! # IN_ORDER
//! A position is a count of pops (see [`super::order`]). The chains of the credit have the last positions, and none of them was
//! completed, so the newest is taken off the end of the deque. The next chain gets the same position.
//!
//! # The in-flight buffer
//! It says how far a device has popped: what is used, and then the chains in flight (see [`super::inflight`]). So the chains that it
//! names have to be the first of those popped, without a gap. Credit is written down when it is used (its *P*), in the order of
//! pops: by invariant 1, the chains in flight have no gap. Before that the buffer says that the chain was not popped, and the next
//! device finds it in the ring. The copies of a packed chain's descriptors are made then, too; by invariant 2 they are
//! still there.
//!
//! A chain that an earlier process had in flight is named in the buffer already. Popped as credit it stays named, and returned
//! it is again one of those that have to be popped again. These come out before all others, so invariant 1 holds for them.
//!
//! # Hostile drivers
//! The driver can change ring and descriptors while a chain is credit, and after it was returned. The second pop reads and checks
//! everything again, and may yield another chain, or an error. What the queue keeps of the first (its id and how many
//! places it had) is of our own memory, and is gone when the chain is returned. Descriptors that differ when they are copied into the
//! in-flight buffer are the ring's error for the next device, as for chains that are not credit.

use std::collections::VecDeque;

/// The chains of the credit that came out of the ring, oldest first.
#[derive(Debug, Default)]
pub(super) struct Credit {
    chains: VecDeque<Chain>,
    /// Places of all of them.
    places: u16,
}

/// A chain as the ring needs it when it goes back.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chain {
    /// The head, or the id in a packed ring.
    pub(super) id: u16,
    /// Entries of the avail ring, of which it takes one, or descriptors of a packed ring.
    pub(super) places: u16,
}

impl Credit {
    #[inline]
    pub(super) fn len(&self) -> u16 {
        // No more than the queue has entries.
        self.chains.len() as u16
    }

    /// Returns how many places lie between the oldest chain and the next pop.
    #[inline]
    pub(super) fn places(&self) -> u16 {
        self.places
    }

    #[inline]
    pub(super) fn oldest(&self) -> Option<Chain> {
        self.chains.front().copied()
    }

    /// Adds a chain that was popped.
    #[inline]
    pub(super) fn popped(&mut self, chain: Chain) {
        self.places += chain.places;
        self.chains.push_back(chain);
    }

    /// Removes the oldest chain, which is in flight from now on.
    #[inline]
    pub(super) fn used(&mut self) {
        if let Some(chain) = self.chains.pop_front() {
            self.places -= chain.places;
        }
    }

    /// Removes the newest chain, which goes back into the ring.
    #[inline]
    pub(super) fn unpopped(&mut self) -> Option<Chain> {
        let chain = self.chains.pop_back()?;
        self.places -= chain.places;
        Some(chain)
    }
}
