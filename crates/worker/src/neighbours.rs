//! Passes parcels from the polled task to other tasks of its worker.
//!
//! # Why a parcel changes no task but these two
//! The worker changes, stops and moves tasks only between two polls, on its own thread. So the task that
//! takes a parcel cannot leave during the poll of the task that offers it, and neither task keeps anything of
//! the other when the poll is over.
//!
//! Only a task on the poll list is asked. A task that sleeps on kicks must not use its ring, because the
//! event index of an armed ring stays where it is. A leaving task must pop nothing. And only the polls of a
//! task are charged to the limits of its device. All of these find their frames in the usual place when they
//! are polled again.
//!
//! # Why a wake is not lost
//! A wake changes the poll list, so it waits for the end of the round. The rest is in [`crate::far_side`],
//! because a wake takes the place of an event.

use crate::clock::Nanos;
use crate::entry::{Entry, TaskState};
use crate::event_loop::EventLoop;
use kickless_device::{Context, Interest, Neighbours, Parcel, Polled};

/// The tasks beside the one that is polled.
struct Beside<'a> {
    /// The tasks with smaller numbers, and those with greater ones.
    before: &'a mut [Option<Entry>],
    after: &'a mut [Option<Entry>],
    /// The numbers of the tasks that have taken frames, each once, and how many.
    takers: &'a mut Vec<(u32, u32)>,
    /// The numbers of the tasks to wake after the round.
    woken: &'a mut Vec<u32>,
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
        if entry.state != TaskState::Polled || entry.is_leaving() || entry.placement.limiter.is_on() {
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

    fn wake(&mut self, task: u32) {
        self.woken.push(task);
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
        let (takers, woken) = (&mut self.takers, &mut self.woken);
        let (entry, mut beside) = (entry.as_mut()?, Beside { before, after, takers, woken });
        let mut context = Context {
            engine: &mut self.engine,
            task: number,
            waker: &entry.waker,
            far_side_due,
            clock: self.clock,
            now_ns: self.latest,
            served_others,
            neighbours: Some(&mut beside),
        };
        let polled = entry.placement.limiter.poll(&mut *entry.task, &mut context, budget);
        self.latest = context.now_ns;
        while let Some((taker, taken)) = self.takers.pop() {
            self.took(taker, taken, now);
        }
        Some(polled)
    }

    /// Does for each task that was woken in a poll what its event would do. Called after the visits of a
    /// round, because it changes the poll list.
    #[inline(never)]
    pub(crate) fn wake_neighbours(&mut self) {
        let mut woken = std::mem::take(&mut self.woken);
        for number in woken.drain(..) {
            let entry = self.entries.get(number as usize).and_then(Option::as_ref);
            if entry.is_some_and(|entry| entry.watched.unwrap_or_default() != Interest::None) {
                self.handle_event(number);
            }
        }
        self.woken = woken;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Poll;
    use crate::mailbox::{Holder, Mailbox, Placement, WorkItem};
    use crate::peers::Peers;
    use kickless_device::{Clock, Next, QueueTask, Vring};
    use kickless_io::{Engine, EngineKind, Waker};
    use kickless_sync::Mutex;
    use kickless_testing::{GuestRing, guest_memory};
    use kickless_virtqueue::device::Options;
    use std::sync::Arc;
    use std::sync::atomic::AtomicU32;
    use std::time::Duration;

    const NOW: Nanos = 1_000_000;

    struct Idle(Vring);

    impl QueueTask for Idle {
        fn vring(&mut self) -> &mut Vring {
            &mut self.0
        }

        fn poll(&mut self, _: &mut Context<'_>, _: u32) -> Polled {
            Polled { served: 0, cost: 0, next: Next::Idle }
        }

        fn in_flight(&self) -> usize {
            0
        }
    }

    /// Returns a worker that does not run, with one task.
    fn worker() -> EventLoop {
        let mailbox = Arc::new(Mailbox::new(Waker::of_worker().unwrap()));
        let peers = Arc::new(Peers::new(Clock::start(), vec![mailbox]));
        let engine = Engine::open(EngineKind::Threads, 1).unwrap();
        // One visit with work in a second is enough for polling.
        let poll = Poll::Rate { start_per_sec: 1, stop_idle: Duration::from_secs(1) };
        let mut worker = EventLoop::new(peers, 0, engine, poll).unwrap();
        let view = guest_memory(2 * GuestRing::BUFFERS, GuestRing::USER);
        let ring = GuestRing::new(view, Options::new(8, true, false).unwrap());
        let task = Idle(Vring::new(ring.parts()).unwrap());
        let placement = Placement {
            device: 0,
            weight: Arc::new(AtomicU32::new(1)),
            limiter: Arc::default(),
            home: None,
            holder: Arc::new(Mutex::new(Holder::Worker(0))),
        };
        worker.handle(WorkItem::Spawn(1, placement, Box::new(task)));
        worker
    }

    fn entry(worker: &mut EventLoop) -> &mut Entry {
        worker.entries[0].as_mut().unwrap()
    }

    #[test]
    fn frames_that_were_taken_are_work_of_the_worker_and_the_task() {
        let mut worker = worker();
        entry(&mut worker).far_side_due = NOW + 1;
        assert!(!worker.worked && !entry(&mut worker).policy.is_polled());
        worker.took(0, 3, NOW);
        assert!(worker.worked);
        assert!(entry(&mut worker).policy.is_polled(), "the policy does not learn of the frames");
        assert_eq!(entry(&mut worker).far_side_due, 0, "the far side is not looked at");
    }

    #[test]
    fn a_wake_does_what_the_event_would_do() {
        let mut worker = worker();
        for (state, watched, is_polled) in [
            (TaskState::Quiet, Some(Interest::Readable), true),
            (TaskState::Armed, Some(Interest::Readable), true),
            (TaskState::Armed, Some(Interest::None), false),
            (TaskState::Quiet, None, false),
            (TaskState::Blocked, Some(Interest::Readable), false),
        ] {
            let entry_before = entry(&mut worker);
            (entry_before.state, entry_before.watched) = (state, watched);
            // The second is for a task that is gone.
            worker.woken.extend([0, 9]);
            worker.wake_neighbours();
            let state_after = entry(&mut worker).state;
            assert_eq!(state_after == TaskState::Polled, is_polled, "{state:?} {watched:?}");
            assert!(worker.woken.is_empty());
        }
    }

    #[test]
    fn a_kick_is_avoided_if_the_task_was_spinning_for_it() {
        for (spins, quiet, avoided) in [(true, false, 1), (true, true, 0), (false, false, 0)] {
            let mut worker = worker();
            let entry_before = entry(&mut worker);
            (entry_before.spin_until, entry_before.quiet) = (spins.then_some(NOW + 1), quiet);
            for _ in 0..2 {
                worker.took(0, 3, NOW);
                let entry = entry(&mut worker);
                assert_eq!(entry.spin_until, None);
                assert_eq!(entry.task.vring().counters().kicks_avoided.get(), avoided, "{spins} {quiet}");
            }
        }
    }
}
