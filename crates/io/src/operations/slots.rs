//! The slots of operations in flight.

use crate::files::Files;
use crate::operations::in_flight::InFlight;
use crate::operations::merge::Merged;
use rustix::io::Errno;

/// A slab of at most `depth` operations, allocated once. An operation does not move while it is in its slot.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    slots: Vec<Option<InFlight>>,
    free: Vec<u32>,
    depth: usize,
    /// Unused boxes, kept for later merges.
    #[expect(clippy::vec_box, reason = "operations hold them boxed, for few have one")]
    spare: Vec<Box<Merged>>,
}

impl Slots {
    pub(crate) fn new(depth: usize) -> Self {
        // This reserves address space only: a slot costs memory from its first use on.
        Self { slots: Vec::with_capacity(depth), free: Vec::with_capacity(depth), depth, spare: Vec::new() }
    }

    pub(crate) fn used(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(crate) fn room(&self) -> usize {
        self.depth - self.used()
    }

    /// Puts an operation into a slot. Returns the slot. The caller has checked that there is room.
    #[inline]
    pub(crate) fn insert(&mut self, operation: InFlight) -> u32 {
        debug_assert!(self.room() > 0);
        if let Some(op_slot) = self.free.pop() {
            self.slots[op_slot as usize] = Some(operation);
            return op_slot;
        }
        // The table must not move, because the kernel has addresses of segments in it.
        assert!(self.slots.len() < self.depth, "more operations than the engine has slots");
        self.slots.push(Some(operation));
        (self.slots.len() - 1) as u32
    }

    /// Puts an operation into a slot, merged with the one in `first`, which the kernel does not know yet.
    /// Returns the operation if the two cannot be merged. The caller has checked that there is room.
    #[expect(clippy::result_large_err, reason = "the operation comes back in the error")]
    pub(crate) fn merge(&mut self, first: u32, next: InFlight) -> Result<(), InFlight> {
        let Some(Some(operation)) = self.slots.get_mut(first as usize) else { return Err(next) };
        if !operation.can_merge(&next) {
            return Err(next);
        }
        let mut merged = match operation.merged.take() {
            Some(merged) => merged,
            None => {
                let mut merged = self.spare.pop().unwrap_or_default();
                merged.add(&mut operation.op);
                merged
            }
        };
        let op_slot = self.insert(next);
        if let Some(next) = self.get_mut(op_slot) {
            merged.add(&mut next.op);
        }
        merged.op_slots.push(op_slot);
        if let Some(operation) = self.get_mut(first) {
            operation.merged = Some(merged);
        }
        Ok(())
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, op_slot: u32) -> Option<&mut InFlight> {
        self.slots.get_mut(op_slot as usize)?.as_mut()
    }

    /// Returns all operations.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut InFlight> {
        self.slots.iter_mut().flatten()
    }

    /// Returns whether the operation in `op_slot` was cancelled.
    pub(crate) fn is_cancelled(&self, op_slot: u32) -> bool {
        matches!(self.slots.get(op_slot as usize), Some(Some(InFlight { cancelled: true, .. })))
    }

    /// Returns the slots of the operations that were cancelled.
    pub(crate) fn cancelled(&self) -> Vec<u32> {
        (0..self.slots.len() as u32).filter(|op_slot| self.is_cancelled(*op_slot)).collect()
    }

    #[inline]
    fn remove(&mut self, op_slot: u32) -> Option<InFlight> {
        let operation = self.slots.get_mut(op_slot as usize)?.take()?;
        self.free.push(op_slot);
        Some(operation)
    }

    /// Takes out the operation in `op_slot` and those that are merged with it.
    pub(crate) fn take(&mut self, op_slot: u32, mut each: impl FnMut(InFlight)) {
        let Some(mut operation) = self.remove(op_slot) else { return };
        let merged = operation.merged.take();
        each(operation);
        for op_slot in merged.iter().flat_map(|merged| &merged.op_slots) {
            if let Some(operation) = self.remove(*op_slot) {
                each(operation);
            }
        }
    }

    /// Returns whether the operation in `op_slot`, with those that are merged with it, would have had to
    /// wait. Then a thread must do it.
    #[inline]
    pub(crate) fn is_missed(&mut self, op_slot: u32, result: Result<u32, Errno>, files: &mut Files) -> bool {
        let Some(operation) = self.get_mut(op_slot) else { return false };
        operation.nowait && {
            let bytes = operation.bytes();
            let missed = files.is_missed(operation.held, operation.op.kind, bytes, result);
            operation.nowait = !missed;
            missed
        }
    }

    /// Completes the operation in `op_slot` with the kernel's result. Takes out operations of which something
    /// was done, each with its own result. Merged operations of which nothing was done stay. Their slots go
    /// to `split`, to be done again each by itself, unless they were cancelled. If the kernel has cancelled
    /// the operation, all are taken out.
    #[inline]
    pub(crate) fn complete(
        &mut self,
        op_slot: u32,
        result: Result<u32, Errno>,
        split: &mut Vec<u32>,
        mut each: impl FnMut(InFlight, Result<u32, Errno>),
    ) {
        let Some(operation) = self.get_mut(op_slot) else { return };
        if let Some(merged) = operation.merged.take() {
            return self.complete_all(op_slot, merged, result, split, each);
        }
        if let Some(operation) = self.remove(op_slot) {
            let result = operation.result(result);
            each(operation, result);
        }
    }

    fn complete_all(
        &mut self,
        first: u32,
        mut merged: Box<Merged>,
        result: Result<u32, Errno>,
        split: &mut Vec<u32>,
        mut each: impl FnMut(InFlight, Result<u32, Errno>),
    ) {
        let mut left = u64::from(result.unwrap_or(0));
        for op_slot in std::iter::once(first).chain(merged.op_slots.iter().copied()) {
            let Some(operation) = self.get_mut(op_slot) else { continue };
            let here = left.min(operation.op.buffers.len());
            left -= here;
            if result == Err(Errno::CANCELED) || (operation.cancelled && here == 0) {
                let cancelled = self.remove(op_slot).into_iter();
                cancelled.for_each(|operation| each(operation, Err(Errno::CANCELED)));
            } else if here == 0 {
                operation.unmerged = true;
                split.push(op_slot);
            } else if let Some(operation) = self.remove(op_slot) {
                // At most the bytes that were transferred in all.
                each(operation, Ok(here as u32));
            }
        }
        merged.clear();
        self.spare.push(merged);
    }
}
