//! Passes parcels from the polled task to other tasks of its worker.
//!
//! # Why a parcel changes no task but these two
//! The worker changes, stops and moves tasks only between two polls, on its own thread. So the task that
//! takes a parcel cannot leave during the poll of the task that offers it, and neither task keeps anything of
//! the other when the poll is over.
//!
//! Only a task on the poll list is asked. A task that sleeps on kicks must not use its ring, because the
//! event index of an armed ring stays where it is. A leaving task must pop nothing. Both find their frames in
//! the usual place when they are polled again.

use crate::clock::Nanos;
use crate::entry::{Entry, TaskState};
use crate::event_loop::EventLoop;
use kickless_device::{Context, Neighbours, Parcel, Polled};

/// The tasks beside the one that is polled.
struct Beside<'a> {
    /// The tasks with smaller numbers, and those with greater ones.
    before: &'a mut [Option<Entry>],
    after: &'a mut [Option<Entry>],
    /// The numbers of the tasks that have taken frames, each once, and how many.
    takers: &'a mut Vec<(u32, u32)>,
}

impl Beside<'_> {
    fn entry(&mut self, number: usize) -> Option<&mut Entry> {
        let entry = match number.checked_sub(self.before.len()) {
            None => &mut self.before[number],
            // Behind the polled task itself.
            Some(distance) => self.after.get_mut(distance.checked_sub(1)?)?,
        };
        entry.as_mut()
    }
}

impl Neighbours for Beside<'_> {
    fn offer(&mut self, task: u32, parcel: &Parcel<'_>) -> u32 {
        let Some(entry) = self.entry(task as usize) else { return 0 };
        if entry.state != TaskState::Polled || entry.is_leaving() {
            return 0;
        }
        let taken = entry.task.take_parcel(parcel);
        if taken > 0 {
            match self.takers.iter_mut().find(|taker| taker.0 == task) {
                Some(taker) => taker.1 = taker.1.saturating_add(taken),
                None => self.takers.push((task, taken)),
            }
        }
        taken
    }
}

impl EventLoop {
    /// Polls a task that may offer parcels. Returns `None` if there is no task with this number.
    #[inline(never)]
    pub(crate) fn poll_beside(
        &mut self,
        number: u32,
        budget: u32,
        now: Nanos,
        far_side_due: bool,
        served_others: u32,
    ) -> Option<Polled> {
        let (before, rest) = self.entries.split_at_mut_checked(number as usize)?;
        let (entry, after) = rest.split_first_mut()?;
        let mut beside = Beside { before, after, takers: &mut self.takers };
        let mut context = Context {
            engine: &mut self.engine,
            task: number,
            waker: self.mailbox.waker(),
            far_side_due,
            clock: self.clock,
            now_ns: self.latest,
            served_others,
            neighbours: Some(&mut beside),
        };
        let polled = entry.as_mut()?.task.poll(&mut context, budget);
        self.latest = context.now_ns;
        while let Some((taker, taken)) = self.takers.pop() {
            self.took(taker, taken, now);
        }
        Some(polled)
    }

    /// Publishes and counts the frames that a task has taken, as if a poll of its own had served them.
    fn took(&mut self, number: u32, frames: u32, now: Nanos) {
        let Some(entry) = self.entries[number as usize].as_mut() else { return };
        self.worked = true;
        self.served = self.served.wrapping_add(frames);
        entry.served_before = self.served;
        let vring = entry.task.vring();
        vring.publish();
        let counters = vring.counters();
        counters.requests.add(frames.into());
        counters.polls_with_work.add(1);
        if entry.spin_until.take().is_some() && !entry.quiet {
            counters.kicks_avoided.add(1);
        }
        entry.policy.found(now, frames);
        // More may have come to its far side meanwhile.
        entry.far_side_due = 0;
        self.note_pending_call(number);
    }
}
