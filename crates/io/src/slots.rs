//! Operations in flight.

use crate::files::Held;
use crate::{Op, Token};

/// An operation that has been queued, and all that it uses.
#[derive(Debug)]
pub(crate) struct InFlight {
    pub(crate) token: Token,
    pub(crate) held: Held,
    pub(crate) op: Op,
}

/// A slab of at most `depth` operations, allocated once.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    slots: Vec<Option<InFlight>>,
    free: Vec<u32>,
    depth: usize,
}

impl Slots {
    pub(crate) fn new(depth: usize) -> Self {
        // Address space only: a place costs memory from its first use on.
        Self { slots: Vec::with_capacity(depth), free: Vec::with_capacity(depth), depth }
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

    #[inline]
    pub(crate) fn get_mut(&mut self, place: u32) -> Option<&mut InFlight> {
        self.slots.get_mut(place as usize)?.as_mut()
    }

    #[inline]
    pub(crate) fn remove(&mut self, place: u32) -> Option<InFlight> {
        let operation = self.slots.get_mut(place as usize)?.take()?;
        self.free.push(place);
        Some(operation)
    }
}
