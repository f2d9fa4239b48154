//! VIRTIO_F_IN_ORDER: chains go back in the order of their pops, whatever the order of their completions
//! (virtio 1.3, sections 2.7.9 and 2.8.9).
//!
//! # Positions
//! Each pop assigns a *position*: the count of all pops, modulo 2^16. The chain carries it ([`ChainId`]), and
//! it comes back when the chain is pushed. The chains in flight have consecutive positions, and the deque
//! holds them in that order. So the index of a chain in the deque is its position less the position of the
//! oldest, and completing a chain takes constant time in any order. A queue has at most 2^15 chains in
//! flight, so no two of them share a position.
//!
//! The head alone does not identify a chain: in a split ring, a driver can make the same head available
//! twice, and then both chains are in flight.
//!
//! A position that is not in flight, or was pushed already, changes nothing. A caller that pushes a chain
//! twice harms only its own ring.

use crate::ChainId;
use std::collections::VecDeque;

/// The popped chains that have not gone back, oldest first. They are at most the entries of the queue.
#[derive(Debug, Default)]
pub(super) struct Order {
    chains: VecDeque<Entry>,
    /// Position of the oldest.
    first: u16,
    /// Number of lookups, for tests.
    #[cfg(test)]
    lookups: u64,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    head: u16,
    /// The bytes written, after the device has completed the chain.
    done: Option<u32>,
}

impl Order {
    /// Adds a popped chain and returns its name.
    #[inline]
    pub(super) fn popped(&mut self, head: u16) -> ChainId {
        // Fewer than 2^16 are in flight.
        let position = self.first.wrapping_add(self.chains.len() as u16);
        self.chains.push_back(Entry { head, done: None });
        ChainId::new(head, position)
    }

    /// Removes the newest chain, which goes back into the ring and was not completed.
    #[inline]
    pub(super) fn unpopped(&mut self) {
        let newest = self.chains.pop_back();
        debug_assert!(newest.is_some_and(|entry| entry.done.is_none()), "a completed chain goes back");
    }

    /// Records that the device has completed a chain. Then [`Order::next`] returns the chains that go back.
    #[inline]
    pub(super) fn pushed(&mut self, id: ChainId, len: u32) {
        let index = usize::from(id.position().wrapping_sub(self.first));
        if let Some(Entry { done: done @ None, .. }) = self.entry(index) {
            *done = Some(len);
        }
    }

    /// Removes the oldest chain and returns its head and length, if the device has completed it.
    #[inline]
    pub(super) fn next(&mut self) -> Option<(u16, u32)> {
        let &mut Entry { head, done: Some(len) } = self.entry(0)? else { return None };
        self.chains.pop_front();
        self.first = self.first.wrapping_add(1);
        Some((head, len))
    }

    #[inline]
    fn entry(&mut self, index: usize) -> Option<&mut Entry> {
        #[cfg(test)]
        {
            self.lookups += 1;
        }
        self.chains.get_mut(index)
    }
}

#[cfg(test)]
mod tests;
