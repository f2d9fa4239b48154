//! Requests in flight, preallocated.

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
    /// Bytes of data that the driver gets.
    pub(crate) read_len: u32,
    /// What the disk does for it.
    pub(crate) io: Io,
}

impl Slot {
    fn new() -> Self {
        Self { id: ChainId::default(), status: Gpa(0), view: None, read_len: 0, io: Io::default() }
    }

    /// Takes in a request.
    pub(crate) fn fill(&mut self, view: &Arc<View>, id: ChainId, status: Gpa, kind: Kind, data_len: u64) {
        self.id = id;
        self.status = status;
        if !self.view.as_ref().is_some_and(|old| Arc::ptr_eq(old, view)) {
            self.view = Some(view.clone());
        }
        // A chain holds at most 2^32 bytes, its status byte among them.
        self.read_len = if matches!(kind, Kind::Read { .. }) { data_len as u32 } else { 0 };
    }
}

impl Slot {
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
}

impl Slots {
    pub(crate) fn new(count: u16) -> Self {
        Self {
            slots: (0..count).map(|_| Slot::new()).collect(),
            // The lowest first, so that a queue which is never full touches few of them.
            free: (0..u32::from(count)).rev().collect(),
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

    /// Gives a slot back.
    pub(crate) fn release(&mut self, slot: u32) {
        self.free.push(slot);
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
