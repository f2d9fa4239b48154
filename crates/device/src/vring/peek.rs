//! Chains of a single descriptor, in batches (see [`Queue::peek`](kickless_virtqueue::device::Queue::peek)).

use super::Vring;
use kickless_virtqueue::device::{Direction, SingleChain};

impl Vring {
    /// Reads the next chains into `into`, and returns their number, if each has a single descriptor in this
    /// direction. They stay in the ring. Stops at the first other chain.
    ///
    /// A task that finds none pops the next chain by [`Vring::pop`], or by [`Vring::pop_credit`], which also
    /// find what is wrong with the ring.
    #[inline]
    pub fn peek(&mut self, direction: Direction, into: &mut [SingleChain]) -> usize {
        if self.broken || self.translation.is_some() {
            return 0;
        }
        self.queue.peek(&self.view, direction, into)
    }

    /// Completes the chains that the last [`Vring::peek`] has read, or some of them in their order. The task
    /// has used the ring for nothing else in between. The driver sees the completions together, and others as
    /// in [`Vring::push`].
    #[inline]
    pub fn complete_peeked(&mut self, chains: &[SingleChain]) {
        self.queue.complete_peeked(chains);
        self.pushed |= !chains.is_empty();
        if self.unseen.add(chains.len() as u32) {
            self.show();
        }
    }
}
