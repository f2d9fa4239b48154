//! When work items are carried out, so that they take a bounded part of the time of a busy worker.
//!
//! An item takes from half a microsecond to some tens. Nobody is charged for it, and a front-end can send one
//! message after the other, each of which is an item for each of its queues. A session waits until its items
//! are done, so there are at most as many as all devices have queues. The worker carries them out in their
//! order, for [`SLICE`] at a time. If tasks have served requests since the last slice, the next one begins
//! only when [`PAUSE`] times the duration of the last one has passed. So items take at most a quarter of the
//! time, and a request waits for one slice.
//!
//! Items that are left stay in the mailbox. A task that moves takes its items with it from there.

use crate::clock::Nanos;

/// The time for which items are carried out before tasks are visited again.
const SLICE: Nanos = 20_000;
/// The duration of a pause, as a multiple of that of the slice before it.
const PAUSE: Nanos = 3;
/// The longest pause. A slice can seem long because the thread was interrupted.
const PAUSE_MAX: Nanos = 1_000_000;

/// The slices in which items are carried out. Pure.
#[derive(Debug)]
pub(crate) struct ItemSlices {
    pub(crate) slice: Nanos,
    /// The end of the last slice's pause.
    pub(crate) due: Nanos,
    /// The number of requests that had been served at the end of the last slice.
    served: u32,
}

impl Default for ItemSlices {
    fn default() -> Self {
        Self { slice: SLICE, due: 0, served: 0 }
    }
}

impl ItemSlices {
    /// Returns whether a slice may begin. `idle`: no task is on the list. `served`: the number of requests
    /// that tasks have served.
    pub(crate) fn may_begin(&self, now: Nanos, idle: bool, served: u32) -> bool {
        idle || served == self.served || now >= self.due
    }

    /// Returns whether a slice is over.
    pub(crate) fn is_over(&self, began: Nanos, now: Nanos) -> bool {
        now.saturating_sub(began) >= self.slice
    }

    /// Ends a slice, and begins its pause.
    pub(crate) fn end(&mut self, began: Nanos, now: Nanos, served: u32) {
        self.due = now + (PAUSE * now.saturating_sub(began)).min(PAUSE_MAX);
        self.served = served;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a worker with more items than it can carry out, on a clock of the test. Returns the part of the
    /// time that items took, in percent.
    fn percent_of_items(item: Nanos, visits: Nanos, served_in_a_turn: u32) -> Nanos {
        let (mut slices, mut now, mut served, mut in_items) = (ItemSlices::default(), 0, 0u32, 0);
        while now < 100_000_000 {
            now += visits;
            served = served.wrapping_add(served_in_a_turn);
            if slices.may_begin(now, false, served) {
                let began = now;
                while !slices.is_over(began, now) {
                    now += item;
                }
                slices.end(began, now, served);
                in_items += now - began;
            }
        }
        in_items * 100 / now
    }

    #[test]
    fn items_take_at_most_a_quarter_of_a_busy_workers_time() {
        for (item, visits) in [(500, 20_000), (2000, 5000), (20_000, 50_000), (100_000, 600)] {
            let percent = percent_of_items(item, visits, 1);
            assert!((15..=25).contains(&percent), "{percent} % with items of {item} ns");
        }
    }

    #[test]
    fn items_need_not_pause_for_tasks_that_serve_nothing() {
        assert!(percent_of_items(2000, 100, 0) > 90);
        let mut slices = ItemSlices::default();
        slices.end(0, 5000, 7);
        assert!(!slices.may_begin(5001, false, 8));
        assert!(slices.may_begin(5001, true, 8), "nothing is on the list");
        assert!(slices.may_begin(20_000, false, 8));
        // The thread was interrupted for a second.
        slices.end(0, 1_000_000_000, 8);
        assert!(slices.may_begin(1_000_000_000 + PAUSE_MAX, false, 9));
    }
}
