//! Credit: chains that are popped in advance (see
//! [`Queue::pop_credit`](kickless_virtqueue::device::Queue::pop_credit)).

use super::Vring;
use kickless_virtqueue::{Chain, ChainId};

impl Vring {
    /// Takes the next chain as credit. Returns `false` if there is none, as [`Vring::pop`].
    ///
    /// The chain is not in flight, nothing waits for it, and [`Vring::unpop`] returns it. A task pops all
    /// chains of its ring either with this or with [`Vring::pop`].
    pub fn pop_credit(&mut self, chain: &mut Chain) -> bool {
        if self.broken {
            return false;
        }
        if self.translation.is_some() {
            return self.pop_translated::<true>(chain);
        }
        match self.queue.pop_credit(&self.view, chain) {
            Ok(true) => true,
            Ok(false) => self.no_chain(None),
            Err(error) => self.no_chain(Some(error)),
        }
    }

    /// Moves the `count` oldest chains from the credit to the chains in flight, which must be pushed.
    ///
    /// Returns `false` if they are no longer credit, or if the ring is not in memory. None of them may be
    /// used then. The task calls [`Vring::unpop`] and forgets its whole credit.
    #[must_use]
    pub fn use_credit(&mut self, count: u16) -> bool {
        // The areas of a broken ring do not matter. The other conditions are the same for all chains.
        count <= self.queue.credit()
            && (self.queue.is_mapped() && !self.broken)
            && (0..count).all(|_| self.queue.use_credit())
    }

    /// Returns the `count` newest chains of the credit to the ring, or all if there are fewer. Later pops
    /// yield them again, with the driver's changes.
    ///
    /// The ring does this itself before it stops, and before new memory, new addresses or an invalidation
    /// take effect. Then [`Vring::credit`] is 0, and the task forgets its chains.
    pub fn unpop(&mut self, count: u16) {
        for _ in 0..count {
            let Some(head) = self.queue.unpop() else { return };
            if let Some(translation) = &mut self.translation {
                translation.chain_returned(head);
            }
        }
    }

    /// Returns the number of chains in the credit.
    pub fn credit(&self) -> u16 {
        self.queue.credit()
    }

    /// Completes chains that the driver must see together, such as a frame in several buffers. Each comes
    /// with the number of bytes written to it. They follow one another in the order of their pops. The driver
    /// sees either none or all of them.
    pub fn push_group(&mut self, group: &[(ChainId, u32)]) {
        if let Some(translation) = &mut self.translation {
            group.iter().for_each(|(id, _)| translation.chain_returned(id.head()));
        }
        self.queue.push_group(group);
        self.pushed |= !group.is_empty();
        if self.unseen.add(group.len() as u32) {
            self.show();
        }
    }
}
