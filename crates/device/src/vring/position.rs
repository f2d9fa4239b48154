//! The position of a vring between two owners.

use super::Vring;
use crate::Position;

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
}
