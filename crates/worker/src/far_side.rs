//! Events of tasks' far sides: when the worker watches them, and what they start.
//!
//! # Why no event is lost
//! The worker watches a descriptor edge-triggered. A wait reports each event that comes while the descriptor
//! is registered, once. Registering it, or registering another interest, reports a readiness that is already
//! there.
//!
//! A task goes to sleep in three steps, and the worker waits for nothing between them:
//! 1. A poll finds the far side unready.
//! 2. The task becomes quiet, or is armed with an interest.
//! 3. The worker registers the interest, unless it is registered already.
//!
//! An event before step 1 is seen by the poll. After step 1 there are two cases. If the interest is
//! registered, the event is kept for the next wait, which finds the task asleep and has it polled. If it is
//! not, step 3 reports it.
//!
//! A check of a far side can be a system call. So only some polls of a spinning task check it, as the worker
//! says. Only these count as step 1: after the others, the task stays polled.
//!
//! An event of a task that is not asleep is dropped. Such a task is polled again before it sleeps, or is
//! leaving. A napping task is not watched, so that no event ends the nap; the poll after the nap sees what
//! came.
//!
//! A sender of the same worker can take the place of the event ([`crate::neighbours`]): its port then signals
//! nothing, and the worker does after the round what the event would do. It drops the wake of a task that is
//! not asleep or not watched, as the event would be dropped or kept. This loses nothing, because frames that
//! are there are an event by themselves: the port signals them when the task asks for its event in step 2.
//! No other task gets the number of the woken one before the end of the round, because a task comes only
//! between two rounds, or comes back under its own number.
//!
//! A work item makes a sleeping task polled, as a kick does. An event that comes at the same time finds it
//! polled, and is dropped. A task that leaves is not watched any more before its number is free, and a wait
//! handles all of its events before a task can leave. So no event is handled for another task that gets the
//! number later.
//!
//! # Why nothing waits for credit
//! Credit is not in flight. The worker has the task return it in the same call that takes it away from the
//! task: before an update that changes what credit refers to takes effect, and before a stopped task is
//! detached. No event of the far side, no kick and no completion is needed for that.

use crate::entry::TaskState;
use crate::event_loop::EventLoop;
use kickless_device::{Interest, Update};

impl EventLoop {
    /// Watches the event of a task that goes to sleep, if the task asks for it.
    pub(crate) fn watch_event(&mut self, number: u32) {
        let Some(entry) = self.entries[number as usize].as_mut() else { return };
        let Some(interest) = entry.task.event().map(|event| event.interest) else { return };
        // A broken ring rests: nothing can be done about its far side.
        let is_broken = interest != Interest::None && entry.task.vring().is_broken();
        self.register(number, if is_broken { Interest::None } else { interest });
    }

    /// Stops watching the event of a task. Its descriptor stays registered.
    pub(crate) fn ignore_event(&mut self, number: u32) {
        self.register(number, Interest::None);
    }

    fn register(&mut self, number: u32, interest: Interest) {
        let Some(entry) = self.entries[number as usize].as_mut() else { return };
        if entry.watched.unwrap_or_default() == interest {
            return;
        }
        let Some(event) = entry.task.event() else { return };
        match self.waiter.watch(event.fd, interest, number, entry.watched.is_some()) {
            Ok(()) => entry.watched = Some(interest),
            Err(error) => {
                entry.task.vring().fail(&format_args!("its worker cannot wait for its events: {error}"));
            }
        }
    }

    /// Forgets the descriptor of a task that leaves.
    pub(crate) fn forget_event(&mut self, number: u32) {
        let Some(entry) = self.entries[number as usize].as_mut() else { return };
        if entry.watched.take().is_some()
            && let Some(event) = entry.task.event()
        {
            self.waiter.remove(event.fd);
        }
    }

    /// Handles an event of a task's far side.
    pub(crate) fn handle_event(&mut self, number: u32) {
        let entry = self.entries.get_mut(number as usize).and_then(Option::as_mut);
        if entry.is_some_and(|entry| {
            matches!(entry.state, TaskState::Armed | TaskState::Quiet | TaskState::Draining)
        }) {
            self.make_polled(number);
        }
    }

    /// Has a task return its credit if the update changes what credit refers to.
    pub(crate) fn return_credit_before(&mut self, number: u32, update: &Update) {
        if let Update::Memory(_) | Update::Addresses(_) | Update::Invalidate(..) = update
            && let Some(entry) = self.entries[number as usize].as_mut()
        {
            entry.task.return_credit();
        }
    }
}
