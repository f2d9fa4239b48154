//! A device whose stores can be cut off.

use super::driver::Tag;
use super::memory::{Cut, World};
use crate::address_space::AddressSpace;
use crate::device::credit::Credit;
use crate::device::{PopOutcome, UnpublishedUsed, packed, split};
use crate::{Buffer, Chain, RingError};
use kickless_memory::{Gpa, Iova, Marks, Span, View};
use std::collections::HashMap;
use std::sync::Arc;

enum Ring {
    Split(split::SplitQueue<Cut>),
    Packed(packed::PackedQueue<Cut>),
}

pub(super) struct Device<'w> {
    ring: Ring,
    world: &'w World,
    view: Arc<View>,
    chain: Chain,
    credit: Credit,
    ids: HashMap<Tag, u16>,
}

macro_rules! ring {
    ($device:expr, $method:ident($($arg:expr),*)) => {
        match &mut $device.ring {
            Ring::Split(queue) => queue.$method($($arg),*),
            Ring::Packed(queue) => queue.$method($($arg),*),
        }
    };
}

impl<'w> Device<'w> {
    fn new(world: &'w World, next_avail: u16) -> Self {
        let ring = match world.options.is_packed() {
            true => Ring::Packed(packed::PackedQueue::new(world.options, next_avail)),
            false => Ring::Split(split::SplitQueue::new(world.options, next_avail)),
        };
        let (chain, credit) = (Chain::default(), Credit::default());
        Self { ring, world, view: Arc::default(), chain, credit, ids: HashMap::new() }
    }

    /// Makes a device that records its chains in flight. `next_avail` is the front-end's index, which may be
    /// wrong.
    pub(super) fn start(world: &'w World, next_avail: u16) -> Self {
        Self::with_unpublished(world, next_avail, &[])
    }

    pub(super) fn with_unpublished(
        world: &'w World,
        next_avail: u16,
        unpublished: &[UnpublishedUsed],
    ) -> Self {
        let mut device = Self::new(world, next_avail);
        ring!(device, track(world.region.clone()));
        ring!(device, push_unpublished(unpublished));
        device.remap();
        device
    }

    pub(super) fn untracked(world: &'w World, next_avail: u16) -> Self {
        let mut device = Self::new(world, next_avail);
        device.remap();
        device
    }

    pub(super) fn remap(&mut self) {
        ring!(self, remap(self.world.metadata(), &mut Marks::off()));
    }

    /// Removes the queue's areas. The next ones may be of another kind.
    pub(super) fn unmap(&mut self) {
        self.ring = match &mut self.ring {
            Ring::Split(queue) => Ring::Split(queue.moved(&mut Marks::off())),
            Ring::Packed(queue) => Ring::Packed(queue.moved(&mut Marks::off())),
        };
    }

    pub(super) fn pop(&mut self) -> Result<Option<Tag>, RingError> {
        let (mut view, mut marks) = (&*self.view, Marks::off());
        let (space, chain) = (&mut view, &mut self.chain);
        let popped = ring!(self, pop(space, chain, &mut marks));
        self.note(popped)
    }

    pub(super) fn pop_credit(&mut self) -> Result<Option<Tag>, RingError> {
        let (mut view, mut marks) = (&*self.view, Marks::off());
        let (space, chain, credit) = (&mut view, &mut self.chain, &mut self.credit);
        let popped = ring!(self, pop_credit(space, chain, &mut marks, credit));
        self.note(popped)
    }

    pub(super) fn use_credit(&mut self) -> bool {
        ring!(self, use_credit(&mut self.credit))
    }

    /// Returns the newest chain of the credit, which must be this one, to the ring.
    pub(super) fn unpop(&mut self, tag: Tag) {
        assert_eq!(ring!(self, unpop(&mut self.credit)), self.ids.remove(&tag));
    }

    pub(super) fn credit(&self) -> u16 {
        self.credit.len()
            + match &self.ring {
                Ring::Split(queue) => queue.resubmitted_credit(),
                Ring::Packed(queue) => queue.resubmitted_credit(),
            }
    }

    fn note(&mut self, popped: Result<PopOutcome, RingError>) -> Result<Option<Tag>, RingError> {
        if popped? != PopOutcome::Chain {
            return Ok(None);
        }
        // A hostile chain may have no buffer.
        let tag = self.chain.readable().first().map_or(0, |buffer| buffer.addr.0);
        self.ids.insert(tag, self.chain.id.head());
        Ok(Some(tag))
    }

    /// Pops while the translations of chains are missing.
    pub(super) fn pop_in_vain(&mut self) -> Result<PopOutcome, RingError> {
        let (space, chain, mut marks) = (&mut MissingTranslations, &mut self.chain, Marks::off());
        ring!(self, pop(space, chain, &mut marks))
    }

    /// Returns whether there is work for a device that polls and for one that is about to sleep, and how
    /// much.
    pub(super) fn work(&mut self) -> (bool, bool, u16) {
        let (has_work, pending) = (ring!(self, has_work()), ring!(self, pending()));
        (has_work, ring!(self, arm(&mut Marks::off())), pending)
    }

    pub(super) fn push(&mut self, tag: Tag) {
        let id = self.ids[&tag];
        ring!(self, push(id, 0));
    }

    pub(super) fn show(&mut self) {
        ring!(self, show(&mut Marks::off()));
    }

    pub(super) fn publish(&mut self) {
        let _ = ring!(self, publish(&mut Marks::off()));
    }

    /// Returns the index of the next device, and the held chains.
    pub(super) fn stop(mut self) -> (u16, Vec<UnpublishedUsed>) {
        let unpublished = ring!(self, take_unpublished(&mut Marks::off()));
        (self.next_avail(), unpublished)
    }

    pub(super) fn resume_at(&self) -> u16 {
        match &self.ring {
            Ring::Split(queue) => queue.resume_at(),
            Ring::Packed(queue) => queue.resume_at(),
        }
    }

    pub(super) fn next_avail(&self) -> u16 {
        match &self.ring {
            Ring::Split(queue) => queue.next_avail(),
            Ring::Packed(queue) => queue.next_avail(),
        }
    }

    pub(super) fn resubmissions(&self) -> u16 {
        match &self.ring {
            Ring::Split(queue) => queue.resubmissions(),
            Ring::Packed(queue) => queue.resubmissions(),
        }
    }

    pub(super) fn in_flight(&self) -> u16 {
        let popped = match &self.ring {
            Ring::Split(queue) => queue.in_flight(),
            Ring::Packed(queue) => queue.in_flight(),
        };
        popped - self.credit.len()
    }
}

/// An address space with no translation.
struct MissingTranslations;

impl AddressSpace<'_> for MissingTranslations {
    fn add_buffer(&mut self, _: &mut Vec<Buffer>, _: Iova, _: u32, _: bool) {}

    fn table(&mut self, _: Iova, _: u32) -> Option<Span<'static>> {
        None
    }

    fn read(&mut self, _: Iova, _: &mut [u8]) -> bool {
        false
    }

    fn finish(&mut self, _: &mut Vec<Buffer>, _: &mut usize, _: u64) {}

    fn prefetch_for_write(&self, _: Gpa) {}

    fn is_missing(&self) -> bool {
        true
    }
}
