//! Work other than the ring: requests that run in steps, and one that waits for room in the device's budget.
//!
//! A poll does this work and pops requests from the ring by turns.

use super::Queue;
use super::state::{End, OtherWork};
use kickless_device::Context;
use kickless_disk as disk;

impl Queue {
    /// Keeps a request until the device's budget has room for it.
    #[cold]
    pub(super) fn wait_for_budget(&mut self, slot: u32, wanted: disk::Request) {
        self.meter.waits(slot);
        self.other_work.over_budget = Some((slot, wanted));
        self.other_work.is_due = true;
    }

    /// Continues popped requests that do not wait for the disk. Returns whether the turn is over, or the
    /// ring is next. The error is the end of the poll.
    #[cold]
    pub(super) fn do_other_work(
        &mut self,
        context: &mut Context<'_>,
        budget: u32,
        cost: &mut u32,
    ) -> Result<bool, End> {
        *cost = cost.saturating_add(self.other_work.take_cost());
        if *cost >= budget && budget > 0 {
            return Err(End::Budget);
        }
        if self.run_next_step(context) {
            return if budget == 0 { Err(End::Budget) } else { Ok(true) };
        }
        if !self.start_over_budget(context) {
            return Err(End::Full);
        }
        let OtherWork { owed_cost, steps, .. } = &self.other_work;
        self.other_work.is_due = *owed_cost > 0 || !steps.is_empty();
        Ok(false)
    }

    /// Runs the next step, unless the last turn ran one. Steps and new requests from the ring alternate.
    /// Returns whether a step ran.
    fn run_next_step(&mut self, context: &mut Context<'_>) -> bool {
        let OtherWork { stepped, steps, .. } = &mut self.other_work;
        if std::mem::take(stepped) {
            return false;
        }
        let Some(slot) = steps.pop_front() else { return false };
        *stepped = true;
        let step = self.on_disk(context, slot, |disk, io_context, io| disk.retry(io_context, io));
        self.take_step(slot, step);
        true
    }

    /// Starts the request that waits for room in the budget. Returns `false` if there is still no room.
    fn start_over_budget(&mut self, context: &mut Context<'_>) -> bool {
        if self.other_work.over_budget.is_none() {
            return true;
        }
        // This starts the prepared request first, because the other one may wait for its completion.
        self.start_prepared(context);
        let over_budget = &mut self.other_work.over_budget;
        if let Some((slot, wanted)) = over_budget.take_if(|(slot, _)| self.slots.reserve(*slot)) {
            let step = self.on_disk(context, slot, |disk, io_context, io| disk.start(io_context, io, wanted));
            self.take_step(slot, step);
        }
        self.other_work.over_budget.is_none()
    }
}
