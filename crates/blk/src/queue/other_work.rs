//! Work other than the ring: requests that run in steps, and one that waits for room in the device's budget.
//!
//! A poll does this work and pops requests from the ring by turns.

use super::{Queue, Turn};
use kickless_device::{Context, Next};
use kickless_disk as disk;

impl Queue {
    /// Keeps a request until the device's budget has room for it.
    #[cold]
    pub(super) fn wait_for_budget(&mut self, slot: u32, wanted: disk::Request) {
        self.meter.waits(slot);
        self.over_budget = Some((slot, wanted));
        self.has_other_work = true;
    }

    /// Adds to the cost that the next poll reports.
    #[cold]
    pub(super) fn add_cost(&mut self, cost: u32) {
        self.owed_cost = self.owed_cost.saturating_add(cost);
        self.has_other_work = true;
    }

    /// Continues popped requests that do not wait for the disk.
    #[cold]
    pub(super) fn other_work(&mut self, context: &mut Context<'_>, budget: u32, cost: &mut u32) -> Turn {
        *cost = cost.saturating_add(std::mem::take(&mut self.owed_cost));
        if *cost >= budget && budget > 0 {
            return Turn::Over(Next::More);
        }
        if self.run_next_step(context) {
            return if budget == 0 { Turn::Over(Next::More) } else { Turn::Other };
        }
        if !self.start_over_budget(context) {
            let goes_on = !self.steps.is_empty() && budget > 0;
            return if goes_on { Turn::Other } else { Turn::Over(Next::Blocked) };
        }
        self.has_other_work = self.owed_cost > 0 || !self.steps.is_empty();
        Turn::Ring
    }

    /// Runs the next step, unless the last turn ran one. Steps and new requests from the ring alternate.
    /// Returns whether a step ran.
    fn run_next_step(&mut self, context: &mut Context<'_>) -> bool {
        if std::mem::replace(&mut self.stepped, false) {
            return false;
        }
        let Some(slot) = self.steps.pop_front() else { return false };
        self.stepped = true;
        let step = self.on_disk(context, slot, |disk, io_context, io| disk.retry(io_context, io));
        self.handle_next_step(slot, step);
        true
    }

    /// Starts the request that waits for room in the budget. Returns `false` if there is still no room.
    fn start_over_budget(&mut self, context: &mut Context<'_>) -> bool {
        if self.over_budget.is_none() {
            return true;
        }
        // This starts the prepared request first, because `over_budget` may wait for its completion.
        let prepared = self.prepared.take();
        self.start_on_disk(context, prepared);
        if let Some((slot, wanted)) = self.over_budget.take_if(|(slot, _)| self.slots.reserve(*slot)) {
            let step = self.on_disk(context, slot, |disk, io_context, io| disk.start(io_context, io, wanted));
            self.handle_next_step(slot, step);
        }
        self.over_budget.is_none()
    }
}
