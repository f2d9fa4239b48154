//! Chains that are popped ahead: credit (see [`Queue::pop_credit`](kickless_virtqueue::device::Queue::pop_credit)).

use super::Vring;
use kickless_virtqueue::{Chain, ChainId};

impl Vring {
    /// Takes the next chain as credit: it is not in flight, nothing waits for it, and [`Vring::unpop`] returns it. `false` where there is
    /// none, as [`Vring::pop`]. A task pops all chains of its ring in one way or the other.
    #[inline]
    pub fn pop_credit(&mut self, chain: &mut Chain) -> bool {
        if self.broken {
            return false;
        }
        if self.translation.is_some() {
            return self.pop_translated::<true>(chain);
        }
        match self.queue.pop_credit(&self.view, chain) {
            Ok(true) => true,
            Ok(false) => self.came_to_nothing(None),
            Err(error) => self.came_to_nothing(Some(error)),
        }
    }

    /// Takes the `count` oldest chains off the credit: they are in flight from now on, and have to be pushed.
    ///
    /// `false`: they are no credit any more, or the ring is not in memory. None of them is used. What the task still has as credit
    /// is to be forgotten, after [`Vring::unpop`].
    #[must_use]
    pub fn use_credit(&mut self, count: u16) -> bool {
        // A broken ring has no areas that matter; the rest holds for all chains alike.
        count <= self.queue.credit()
            && (self.queue.is_mapped() && !self.broken)
            && (0..count).all(|_| self.queue.use_credit())
    }

    /// Returns the `count` newest chains of the credit to the ring, or all if they are fewer. The next pops yield them again, or what
    /// the driver has made of them.
    ///
    /// The ring does this by itself before it stops, and before new memory, new addresses or an invalidation take effect. Then
    /// [`Vring::credit`] is 0, and the task forgets its chains.
    pub fn unpop(&mut self, count: u16) {
        for _ in 0..count {
            let Some(head) = self.queue.unpop() else { return };
            if let Some(translation) = &mut self.translation {
                translation.gave_back(head);
            }
        }
    }

    /// Returns the number of chains in the credit.
    #[inline]
    pub fn credit(&self) -> u16 {
        self.queue.credit()
    }

    /// Completes chains that the driver has to see together, each with the bytes written to it: a frame in several buffers. They
    /// follow one another in the order of their pops. The driver sees none of them before all.
    #[inline]
    pub fn push_group(&mut self, group: &[(ChainId, u32)]) {
        if let Some(translation) = &mut self.translation {
            group.iter().for_each(|(id, _)| translation.gave_back(id.head));
        }
        self.queue.push_group(group);
        self.pushed |= !group.is_empty();
        self.unseen = self.unseen.saturating_add(group.len() as u32);
        if self.unseen >= self.unseen_max {
            self.show();
        }
    }
}
