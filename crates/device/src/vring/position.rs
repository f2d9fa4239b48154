//! The position of a vring between two owners.

use super::{Vring, is_resumed};
use crate::{Areas, Position};

impl Vring {
    /// Returns all credit to the ring, and returns the ring's position. Nothing else of the ring changes, so
    /// this process can also go on with it: the areas stay mapped, and kicks stay as they are.
    ///
    /// Kicks that come from now on stay in the descriptor. The next owner polls the ring once.
    pub fn position(&mut self) -> Position {
        self.unpop(u16::MAX);
        // The contents of damaged memory are no valid answer to a request.
        let unpublished = if self.is_intact() { self.queue.unpublished() } else { Vec::new() };
        self.commit_marks();
        Position {
            next_avail: self.queue.resume_at(),
            in_flight: self.queue.in_flight(),
            unpublished,
            is_broken: self.broken,
        }
    }
    /// Sets the position at which a vring of [`Vring::unmapped`] begins. Touches no memory of the guest. The
    /// in-flight buffer goes before the position, as in [`VringParts`](crate::VringParts).
    ///
    /// A ring that was broken stays so. This is neither logged nor reported again.
    pub fn begin_at(&mut self, position: &Position) {
        self.queue.begin_at(position.next_avail);
        self.queue.push_unpublished(&position.unpublished);
        self.pushed = !position.unpublished.is_empty();
        self.is_resumed = is_resumed(&self.options, position.next_avail);
        self.broken = position.is_broken;
    }

    /// Maps the areas of a vring of [`Vring::unmapped`], which no other process uses any more. Its task runs
    /// next. A ring whose areas are not in guest memory rests until they are.
    pub fn begin(&mut self) {
        // Behind a vIOMMU, the first pop asks for translations.
        if !self.broken && matches!(self.areas, Areas::User(_)) {
            self.remap();
        }
        self.commit_marks();
    }
}
