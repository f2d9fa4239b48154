//! A poll of a task within the limits of its device.

use super::{Allowance, Direction, Limiter, Traffic};
use crate::{Context, Next, Polled, QueueTask};

impl Limiter {
    /// Polls a task within the limits. They are checked before the task pops anything, and charged
    /// afterwards, for the frames and requests that the task has told its ring
    /// ([`Vring::charge`](crate::Vring::charge)).
    ///
    /// - The budget is no larger than there are tokens, so the debt is that of the last request, as far as a
    ///   request costs what its bytes do.
    /// - While the limits are in debt, frames wait, and requests are not popped ([`Traffic`]).
    /// - A stop does not wait for tokens, and traffic that is discarded takes none ([`QueueTask::traffic`]).
    /// - Other tasks are offered no parcels, because only frames of the task's own polls are charged.
    ///
    /// An executor calls it instead of [`QueueTask::poll`]. Without limits, it costs the look at a flag.
    #[inline(always)]
    pub fn poll(&self, task: &mut dyn QueueTask, context: &mut Context<'_>, budget: u32) -> Polled {
        if self.is_on() { self.poll_limited(task, context, budget) } else { task.poll(context, budget) }
    }

    // A function of its own, so that a poll without limits costs no more instructions.
    #[cold]
    #[inline(never)]
    fn poll_limited(&self, task: &mut dyn QueueTask, context: &mut Context<'_>, budget: u32) -> Polled {
        let traffic = if budget > 0 { task.traffic() } else { None };
        let (Some(traffic), Some(now_ns)) = (traffic, self.now_if_on()) else {
            return task.poll(context, budget);
        };
        let held_ns = self.wait_ns(traffic, now_ns);
        if let Some(wait_ns) = held_ns
            && waits_for_tokens(traffic, task)
        {
            return Polled { served: 0, cost: 0, next: Next::Throttled { wait_ns } };
        }
        let budget = match (traffic, held_ns) {
            // Nothing new is popped.
            (Traffic::Requests, Some(_)) => budget,
            _ => budget.min(self.budget(traffic, now_ns)),
        };
        context.neighbours = None;
        task.vring().begin_limited(Allowance::new(held_ns, self.request_size()));
        let polled = task.poll(context, budget);
        if let Some(allowance) = task.vring().end_limited() {
            for (direction, requests, bytes) in allowance.carried() {
                self.charge(direction, requests, bytes, now_ns);
            }
        }
        polled
    }
}

/// Returns whether a task has nothing to do but to wait for tokens, if there are none.
fn waits_for_tokens(traffic: Traffic, task: &mut dyn QueueTask) -> bool {
    match traffic {
        // Whether the port has frames is not known.
        Traffic::Frames(Direction::Read) => true,
        // A driver that sends nothing is not throttled.
        Traffic::Frames(Direction::Write) => task.vring().has_work(),
        Traffic::Requests => false,
    }
}
