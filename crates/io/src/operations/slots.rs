//! Operations in flight.

use crate::files::Files;
use crate::operations::in_flight::InFlight;
use crate::operations::merge::Merged;
use rustix::io::Errno;

/// A slab of at most `depth` operations, allocated once.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    slots: Vec<Option<InFlight>>,
    free: Vec<u32>,
    depth: usize,
    /// To be used again.
    #[expect(clippy::vec_box, reason = "operations hold them boxed, for few have one")]
    spare: Vec<Box<Merged>>,
}

impl Slots {
    pub(crate) fn new(depth: usize) -> Self {
        // Address space only: a place costs memory from its first use on.
        Self { slots: Vec::with_capacity(depth), free: Vec::with_capacity(depth), depth, spare: Vec::new() }
    }

    pub(crate) fn used(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(crate) fn room(&self) -> usize {
        self.depth - self.used()
    }

    /// Puts one in; its place. The caller has looked for room.
    #[inline]
    pub(crate) fn insert(&mut self, operation: InFlight) -> u32 {
        debug_assert!(self.room() > 0);
        if let Some(place) = self.free.pop() {
            self.slots[place as usize] = Some(operation);
            return place;
        }
        self.slots.push(Some(operation));
        (self.slots.len() - 1) as u32
    }

    /// Puts one in, as one with the operation at `first`, of which the kernel knows nothing yet; it comes
    /// back where the two do not fit together. The caller has looked for room.
    pub(crate) fn join(&mut self, first: u32, next: InFlight) -> Result<(), InFlight> {
        let Some(Some(operation)) = self.slots.get_mut(first as usize) else { return Err(next) };
        if !operation.takes(&next) {
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
        let place = self.insert(next);
        if let Some(next) = self.get_mut(place) {
            merged.add(&mut next.op);
        }
        merged.places.push(place);
        if let Some(operation) = self.get_mut(first) {
            operation.merged = Some(merged);
        }
        Ok(())
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, place: u32) -> Option<&mut InFlight> {
        self.slots.get_mut(place as usize)?.as_mut()
    }

    /// Returns all operations.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut InFlight> {
        self.slots.iter_mut().flatten()
    }

    /// Returns whether the operation at `place` was cancelled.
    pub(crate) fn is_cancelled(&self, place: u32) -> bool {
        matches!(self.slots.get(place as usize), Some(Some(InFlight { cancelled: true, .. })))
    }

    /// Returns the places of the operations that were cancelled.
    pub(crate) fn cancelled(&self) -> Vec<u32> {
        (0..self.slots.len() as u32).filter(|place| self.is_cancelled(*place)).collect()
    }

    #[inline]
    fn remove(&mut self, place: u32) -> Option<InFlight> {
        let operation = self.slots.get_mut(place as usize)?.take()?;
        self.free.push(place);
        Some(operation)
    }

    /// Takes out the operation at `place` and those that are one with it.
    pub(crate) fn take(&mut self, place: u32, mut each: impl FnMut(InFlight)) {
        let Some(mut operation) = self.remove(place) else { return };
        let merged = operation.merged.take();
        each(operation);
        for place in merged.iter().flat_map(|merged| &merged.places) {
            if let Some(operation) = self.remove(*place) {
                each(operation);
            }
        }
    }

    /// Whether the operation at `place`, with those that are one with it, would have had to wait: then a
    /// thread is to do it.
    #[inline]
    pub(crate) fn is_missed(&mut self, place: u32, result: Result<u32, Errno>, files: &mut Files) -> bool {
        let Some(operation) = self.get_mut(place) else { return false };
        operation.nowait && {
            let bytes = operation.bytes();
            let missed = files.is_missed(operation.held, operation.op.kind, bytes, result);
            operation.nowait = !missed;
            missed
        }
    }

    /// The kernel has done what it was told of `place`, and this came of it. Operations of which it has done
    /// something are taken out, each with what came of it; the places of those that were merged and of which
    /// it has done nothing go to `again`: they are to be done each by itself, unless they were cancelled.
    /// Where the kernel has cancelled them all are taken out.
    #[inline]
    pub(crate) fn complete(
        &mut self,
        place: u32,
        result: Result<u32, Errno>,
        again: &mut Vec<u32>,
        mut each: impl FnMut(InFlight, Result<u32, Errno>),
    ) {
        let Some(operation) = self.get_mut(place) else { return };
        if let Some(merged) = operation.merged.take() {
            return self.complete_all(place, merged, result, again, each);
        }
        if let Some(operation) = self.remove(place) {
            let result = operation.result(result);
            each(operation, result);
        }
    }

    fn complete_all(
        &mut self,
        first: u32,
        mut merged: Box<Merged>,
        result: Result<u32, Errno>,
        again: &mut Vec<u32>,
        mut each: impl FnMut(InFlight, Result<u32, Errno>),
    ) {
        let mut left = u64::from(result.unwrap_or(0));
        for place in std::iter::once(first).chain(merged.places.iter().copied()) {
            let Some(operation) = self.get_mut(place) else { continue };
            let here = left.min(operation.op.buffers.len());
            left -= here;
            if result == Err(Errno::CANCELED) || (operation.cancelled && here == 0) {
                let cancelled = self.remove(place).into_iter();
                cancelled.for_each(|operation| each(operation, Err(Errno::CANCELED)));
            } else if here == 0 {
                operation.alone = true;
                again.push(place);
            } else if let Some(operation) = self.remove(place) {
                // No more than were transferred in all.
                each(operation, Ok(here as u32));
            }
        }
        merged.clear();
        self.spare.push(merged);
    }
}
