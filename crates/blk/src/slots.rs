//! Requests in flight, preallocated.

use crate::budget::{Budget, FREE};
use crate::failures::Operation;
use crate::request::Kind;
use kickless_disk::Io;
use kickless_memory::{Gpa, Marks, View};
use kickless_virtqueue::ChainId;
use std::sync::Arc;

/// One request in flight.
#[derive(Debug)]
pub(crate) struct Slot {
    /// Its chain.
    pub(crate) id: ChainId,
    /// Where its status byte goes.
    pub(crate) status: Gpa,
    /// The memory that `status` is in. Memory may have changed when the request is done, and the driver has to hear of
    /// it all the same. Kept from request to request, like the view of an `Iov`.
    pub(crate) view: Option<Arc<View>>,
    /// The operation that it asks for.
    pub(crate) operation: Operation,
    /// Bytes of data that the driver gets.
    pub(crate) read_len: u32,
    /// What the disk does for it.
    pub(crate) io: Io,
    /// Pieces that it has taken from the budget, from request to request.
    taken: usize,
    /// Its request takes from the budget.
    large: bool,
}

impl Slot {
    fn new() -> Self {
        Self {
            id: ChainId::default(),
            status: Gpa(0),
            view: None,
            operation: Operation::Read,
            read_len: 0,
            io: Io::default(),
            taken: 0,
            large: false,
        }
    }

    /// Takes in a request.
    pub(crate) fn fill(&mut self, view: &Arc<View>, id: ChainId, status: Gpa, kind: Kind, data_len: u64) {
        self.id = id;
        self.operation = Operation::of(kind);
        self.status = status;
        if !self.view.as_ref().is_some_and(|old| Arc::ptr_eq(old, view)) {
            self.view = Some(view.clone());
        }
        // A chain holds at most 2^32 bytes, its status byte among them.
        self.read_len = if matches!(kind, Kind::Read { .. }) { data_len as u32 } else { 0 };
    }
}

impl Slot {
    /// Whether its buffers have no more pieces than need not be accounted for.
    #[inline]
    pub(crate) fn is_small(&self) -> bool {
        self.io.buffers().count() <= FREE
    }

    /// Whether it has taken from the budget, for this request or for one before it.
    #[inline]
    pub(crate) fn took(&self) -> bool {
        self.taken > 0
    }

    /// Lets go of the buffers, and of memory that is not `current`.
    pub(crate) fn unpin_unless(&mut self, (current, marks): (&Arc<View>, &mut Marks)) {
        self.io.buffers_mut().unpin_unless(current, marks);
        View::unpin_unless(&mut self.view, current, marks);
    }
}

/// As many slots as the ring has entries. A slot grows what it needs with its first request and keeps it.
#[derive(Debug)]
pub(crate) struct Slots {
    slots: Vec<Slot>,
    free: Vec<u32>,
    budget: Arc<Budget>,
    /// Requests in flight that take from the budget.
    large: usize,
}

impl Slots {
    pub(crate) fn new(count: u16, budget: Arc<Budget>) -> Self {
        Self {
            slots: (0..count).map(|_| Slot::new()).collect(),
            // The lowest first, so that a queue which is never full touches few of them.
            free: (0..u32::from(count)).rev().collect(),
            budget,
            large: 0,
        }
    }

    /// A slot that is free. It stays so until [`Slots::take`].
    pub(crate) fn next(&self) -> Option<u32> {
        self.free.last().copied()
    }

    /// Takes the slot that [`Slots::next`] named.
    pub(crate) fn take(&mut self) {
        self.free.pop();
    }

    /// Accounts for the pieces of the request in a slot: of its buffers, and its extents. Whether there is room for them. A
    /// request for which there is none waits until another request of these slots has been released.
    #[cold]
    pub(crate) fn account(&mut self, slot: u32) -> bool {
        let Some(entry) = self.slots.get_mut(slot as usize) else { return true };
        // An extent takes less memory than two pieces.
        let more = 2 * entry.io.extents_len();
        if more + entry.io.buffers().count() <= FREE {
            return true;
        }
        let missing = (entry.io.buffers().capacity() + more).saturating_sub(entry.taken);
        if !self.budget.take(missing) {
            if self.large > 0 {
                return false;
            }
            self.budget.overdraw(missing);
        }
        entry.taken += missing;
        entry.large = true;
        self.large += 1;
        true
    }

    /// Gives a slot back, which has taken from the budget or not: see [`Slot::took`].
    #[inline]
    pub(crate) fn release(&mut self, slot: u32, took: bool) {
        self.free.push(slot);
        if took {
            self.settle(slot);
        }
    }

    /// Gives back to the budget what a slot has taken from it and does not keep.
    #[cold]
    fn settle(&mut self, slot: u32) {
        let Some(entry) = self.slots.get_mut(slot as usize) else { return };
        self.large -= usize::from(std::mem::take(&mut entry.large));
        let kept = self.budget.kept_of(entry.taken);
        entry.io.buffers_mut().shrink_to(kept.max(FREE));
        self.budget.give_back(entry.taken - kept);
        entry.taken = kept;
    }

    /// Takes memory back from a slot whose request was refused before it was accounted for.
    #[cold]
    pub(crate) fn refuse(&mut self, slot: u32, marks: &mut Marks) {
        let Some(entry) = self.slots.get_mut(slot as usize) else { return };
        // A request that was refused half-way has left pieces, and room for these is never given back.
        entry.io.buffers_mut().clear(marks);
        entry.io.buffers_mut().shrink_to(entry.taken.max(FREE));
        entry.io.drop_extents();
    }

    pub(crate) fn get(&mut self, slot: u32) -> &mut Slot {
        &mut self.slots[slot as usize]
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// The slots that are free.
    pub(crate) fn each_free(&mut self, mut each: impl FnMut(&mut Slot)) {
        for &slot in &self.free {
            each(&mut self.slots[slot as usize]);
        }
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        self.budget.give_back(self.slots.iter().map(|slot| slot.taken).sum());
    }
}

#[cfg(test)]
mod tests;
