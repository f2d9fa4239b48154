//! The state of a queue that the path of a normal request does not use.

use kickless_device::Leave;
use kickless_disk as disk;
use std::collections::VecDeque;

/// The reason for which a poll ends.
pub(super) enum End {
    /// The budget is used up, or the ring may have more.
    Budget,
    /// No request of the ring may start, or there is none.
    Empty,
    /// A request of the ring would find no room: in the slots, in the engine, or in the device's budget.
    Full,
    /// The ring has a request, which may not start before this time is over.
    Halted { wait_ns: u64 },
}

/// Popped requests that do not wait for the disk, and what they cost.
pub(super) struct OtherWork {
    /// Set if any of the others may need work. The path of a normal request checks only this.
    pub(super) is_due: bool,
    /// The slot and the request that wait for room in the device's budget.
    pub(super) over_budget: Option<(u32, disk::Request)>,
    /// Slots of requests that run in steps, the next one first.
    pub(super) steps: VecDeque<u32>,
    /// The last turn ran a step.
    pub(super) stepped: bool,
    /// The cost of a step.
    pub(super) step_cost: u32,
    /// The cost of steps and extents that no poll has reported yet.
    pub(super) owed_cost: u32,
}

impl OtherWork {
    pub(super) fn new(step_cost: u32) -> Self {
        let (over_budget, steps) = (None, VecDeque::new());
        Self { is_due: false, over_budget, steps, stepped: false, step_cost, owed_cost: 0 }
    }

    /// Adds a request that goes on with another step.
    #[cold]
    pub(super) fn add_step(&mut self, slot: u32) {
        self.add_cost(self.step_cost);
        self.steps.push_back(slot);
    }

    /// Adds to the cost that the next poll reports.
    #[cold]
    pub(super) fn add_cost(&mut self, cost: u32) {
        self.owed_cost = self.owed_cost.saturating_add(cost);
        self.is_due = true;
    }

    /// Takes the cost that no poll has reported yet.
    pub(super) fn take_cost(&mut self) -> u32 {
        std::mem::take(&mut self.owed_cost)
    }
}

/// The kept requests of a queue.
#[derive(Default)]
pub(super) struct Kept {
    pub(super) slots: Vec<u32>,
    /// The time at which they start one last time, if a caller waits for them.
    pub(super) until: Option<u64>,
    /// The limits of the waits of kept requests that this queue has seen.
    pub(super) limits_seen: u64,
}

/// The stop of a queue for good.
#[derive(Default)]
pub(super) struct Stop {
    /// The task stops, and may leave these requests. No request may wait for a remote server without end.
    pub(super) leave: Option<Leave>,
    pub(super) cancel: Cancel,
    /// The number of unfinished requests that were left.
    pub(super) left: usize,
}

/// The cancellation of unfinished requests, to leave them.
#[derive(Default, PartialEq, Eq)]
pub(super) enum Cancel {
    #[default]
    No,
    At(u64),
    Done,
}

impl Stop {
    /// Returns whether unfinished requests are cancelled, at once or later.
    pub(super) fn cancels(&self) -> bool {
        self.cancel != Cancel::No
    }

    pub(super) fn has_cancelled(&self) -> bool {
        self.cancel == Cancel::Done
    }
}
