//! The preallocated slots of requests in flight.

use crate::budget::{Budget, UNCOUNTED_PIECES};
use crate::operation::Operation;
use crate::request::Kind;
use kickless_disk::{Extent, Io, Request};
use kickless_memory::{Gpa, Iov, Marks, PinnedByte, View};
use kickless_virtqueue::ChainId;
use std::sync::Arc;

/// A copy of a request as it started, for another start.
#[derive(Debug, Default)]
pub(crate) struct KeptRequest {
    wanted: Option<Request>,
    buffers: Iov,
    extents: Vec<Extent>,
    /// The number of resumes of the device when the request started last.
    pub(crate) resumes: u64,
    /// Its next error is reported.
    pub(crate) is_last: bool,
}

/// The slot of one request.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) id: ChainId,
    /// Its status byte. The driver needs the status even if the memory of the guest changes before the
    /// request is done.
    pub(crate) status: PinnedByte,
    pub(crate) operation: Operation,
    /// The number of bytes of data that the driver gets.
    pub(crate) read_len: u32,
    /// The state of the request at the disk.
    pub(crate) io: Io,
    /// The copy of the request for another start, if the device stops on errors.
    pub(crate) kept: Option<Box<KeptRequest>>,
    /// The number of pieces that the slot has reserved. It keeps some of them from request to request.
    taken: usize,
    /// The current request has a reservation.
    reserving: bool,
}

impl Slot {
    fn new() -> Self {
        Self {
            id: ChainId::default(),
            status: PinnedByte::default(),
            operation: Operation::Read,
            read_len: 0,
            io: Io::default(),
            kept: None,
            taken: 0,
            reserving: false,
        }
    }

    /// Stores a new request.
    #[inline(always)]
    pub(crate) fn fill(&mut self, view: &Arc<View>, id: ChainId, status: Gpa, kind: Kind, data_len: u64) {
        self.id = id;
        self.operation = Operation::of(kind);
        self.status.set(view, status);
        // A chain holds at most 2^32 bytes, its status byte among them.
        self.read_len = if matches!(kind, Kind::Read { .. }) { data_len as u32 } else { 0 };
    }
}

impl Slot {
    /// Returns whether its buffers need no reservation.
    #[inline]
    pub(crate) fn is_small(&self) -> bool {
        self.io.buffers().count() <= UNCOUNTED_PIECES
    }

    /// Returns whether it has a reservation, from this request or an earlier one.
    #[inline]
    pub(crate) fn has_reservation(&self) -> bool {
        self.taken > 0
    }

    /// Copies what the request needs to start again.
    pub(crate) fn keep(&mut self, wanted: Request, resumes: u64, marks: &mut Marks) {
        let kept = self.kept.get_or_insert_default();
        kept.buffers.copy_from(self.io.buffers(), marks);
        kept.extents.clone_from(self.io.extents_mut());
        (kept.wanted, kept.resumes, kept.is_last) = (Some(wanted), resumes, false);
    }

    /// Restores the request as it started, and returns it. `is_last`: its next error is reported.
    pub(crate) fn restore(&mut self, resumes: u64, is_last: bool, marks: &mut Marks) -> Option<Request> {
        let kept = self.kept.as_deref_mut()?;
        self.io.buffers_mut().copy_from(&kept.buffers, marks);
        self.io.extents_mut().clone_from(&kept.extents);
        (kept.resumes, kept.is_last) = (resumes, is_last);
        kept.wanted
    }

    /// Returns the number of pieces in the copy of the request.
    fn kept_pieces(&self) -> usize {
        self.kept.as_ref().map_or(0, |kept| kept.buffers.count() + 2 * kept.extents.len())
    }

    /// Releases the buffers, and the memory if it is not `current`.
    #[inline]
    pub(crate) fn unpin_unless(&mut self, (current, marks): (&Arc<View>, &mut Marks)) {
        self.io.buffers_mut().unpin_unless(current, marks);
        if let Some(kept) = &mut self.kept {
            kept.buffers.unpin_unless(current, marks);
        }
        self.status.unpin_unless(current, marks);
    }
}

/// The slots of a queue, one for each entry of the ring.
///
/// A slot allocates memory for its first request and keeps it, as far as the [`Budget`] allows.
#[derive(Debug)]
pub(crate) struct Slots {
    slots: Vec<Slot>,
    free: Vec<u32>,
    budget: Arc<Budget>,
    /// The number of requests in flight with a reservation.
    reserving: usize,
}

impl Slots {
    pub(crate) fn new(count: u16, budget: Arc<Budget>) -> Self {
        Self {
            slots: (0..count).map(|_| Slot::new()).collect(),
            // The lowest slot is used first, so that a queue that is never full touches few of them.
            free: (0..u32::from(count)).rev().collect(),
            budget,
            reserving: 0,
        }
    }

    /// Returns a free slot. It stays free until [`Slots::take_next`].
    pub(crate) fn next(&self) -> Option<u32> {
        self.free.last().copied()
    }

    /// Takes the slot that [`Slots::next`] returned.
    pub(crate) fn take_next(&mut self) {
        self.free.pop();
    }

    /// Reserves room for the pieces of a request: its buffers and its extents.
    ///
    /// Returns `false` if there is no room. Then the request must wait until another request of these slots
    /// is released.
    #[cold]
    pub(crate) fn reserve(&mut self, slot: u32) -> bool {
        let Some(entry) = self.slots.get_mut(slot as usize) else { return true };
        // An extent needs less memory than two pieces.
        let more = 2 * entry.io.extents_len() + entry.kept_pieces();
        if more + entry.io.buffers().count() <= UNCOUNTED_PIECES {
            return true;
        }
        let missing = (entry.io.buffers().capacity() + more).saturating_sub(entry.taken);
        if !self.budget.try_take(missing) {
            if self.reserving > 0 {
                return false;
            }
            self.budget.take_beyond_limit(missing);
        }
        entry.taken += missing;
        entry.reserving = true;
        self.reserving += 1;
        true
    }

    /// Frees a slot. `reserved` is the result of [`Slot::has_reservation`].
    #[inline]
    pub(crate) fn release(&mut self, slot: u32, reserved: bool) {
        self.free.push(slot);
        if reserved {
            self.return_excess(slot);
        }
    }

    /// Returns the part of a slot's reservation that it does not keep.
    #[cold]
    fn return_excess(&mut self, slot: u32) {
        let Some(entry) = self.slots.get_mut(slot as usize) else { return };
        self.reserving -= usize::from(std::mem::take(&mut entry.reserving));
        let kept = self.budget.kept_part_of(entry.taken);
        entry.io.buffers_mut().shrink_to(kept.max(UNCOUNTED_PIECES));
        entry.kept = None;
        self.budget.give_back(entry.taken - kept);
        entry.taken = kept;
    }

    /// Frees the memory of a slot whose request was refused before it had a reservation.
    #[cold]
    pub(crate) fn clear_refused(&mut self, slot: u32, marks: &mut Marks) {
        let Some(entry) = self.slots.get_mut(slot as usize) else { return };
        // A request that was refused in the middle has left pieces. Without this, the slot would keep room
        // for them.
        entry.io.buffers_mut().clear(marks);
        entry.io.buffers_mut().shrink_to(entry.taken.max(UNCOUNTED_PIECES));
        entry.io.drop_extents();
    }

    #[inline]
    pub(crate) fn get(&mut self, slot: u32) -> &mut Slot {
        &mut self.slots[slot as usize]
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Returns the states of all requests at the disk. Those of free slots are at rest.
    pub(crate) fn each_io(&mut self) -> impl Iterator<Item = &mut Io> {
        self.slots.iter_mut().map(|slot| &mut slot.io)
    }

    /// Calls `each` with every free slot.
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
