//! The loop of a worker: poll, submit, complete, arm, sleep.

use crate::clock::{Clock, Nanos};
use crate::empty_turns::EmptyTurns;
use crate::entry::{Entry, TaskState};
use crate::host_probe::HostProbe;
use crate::item_slices::ItemSlices;
use crate::kicks_in_vain::KicksInVain;
use crate::mailbox::{Mailbox, TaskKey};
use crate::peers::Peers;
use crate::poll::Poll;
use crate::scheduler::Scheduler;
use crate::stall::StallWatch;
use crate::times::Times;
use crate::waiter::{Ready, Waiter};
use kickless_io::{Completion, Engine};
use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;
use tracing::error;

/// The work, in cost plus visits, after which the loop checks kicks and the mailbox even if it need not
/// sleep, unless that took less than [`WORK_TIME_MIN`].
const WORK_BETWEEN_WAITS: u32 = 128;
/// The time after which it does so.
const TIME_BETWEEN_WAITS: Nanos = 50_000;
/// The least time between two such checks. One is a system call of 0.3 us to 1 us, so it takes at most a
/// twentieth of the time. Frames of a network card take 20 ns each, so 128 of them would be too little work.
const WORK_TIME_MIN: Nanos = 20_000;
/// The time after which the loop retries operations and calls that the kernel refused. The kernel does not
/// report when it can take them.
pub(crate) const RETRY: Nanos = 1_000_000;

/// Closes the mailbox when the loop ends, even by a panic, so that no sender waits for an answer.
struct CloseWhenDone(Arc<Mailbox>);

impl Drop for CloseWhenDone {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// The use of a turn's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spent {
    Work,
    Polling,
    Asleep,
}

/// The state of one worker's thread.
pub(crate) struct EventLoop {
    pub(crate) peers: Arc<Peers>,
    /// The number of this worker among its peers.
    pub(crate) worker_id: usize,
    pub(crate) mailbox: Arc<Mailbox>,
    times: Arc<Times>,
    pub(crate) clock: Clock,
    /// The time on the clock, as it was read last.
    pub(crate) latest: Nanos,
    pub(crate) poll: Poll,
    pub(crate) engine: Engine,
    pub(crate) waiter: Waiter,
    pub(crate) host_probe: HostProbe,
    /// Tasks by number. Numbers are reused, because nothing of a task is in flight when it goes.
    pub(crate) entries: Vec<Option<Entry>>,
    pub(crate) free: Vec<u32>,
    pub(crate) numbers: HashMap<TaskKey, u32>,
    pub(crate) scheduler: Scheduler,
    /// Numbers of napping and of throttled tasks.
    pub(crate) naps: Vec<u32>,
    /// Numbers of tasks to whose kicks the worker does not listen.
    pub(crate) deaf: Vec<u32>,
    pub(crate) kicks_in_vain: KicksInVain,
    /// The time at which the first nap or throttling ends, or the worker listens again. Or an earlier one.
    pub(crate) next_nap: Nanos,
    /// Numbers of tasks for which the engine has room again. Empty between two turns.
    pub(crate) with_room: Vec<u32>,
    /// Numbers of tasks with a pending call.
    pub(crate) pending_calls: Vec<u32>,
    /// The time at which the first of these calls is due, or an earlier one.
    pub(crate) next_call: Nanos,
    /// Completions that were reaped, and those of one task among them.
    pub(crate) completions: Vec<Completion>,
    pub(crate) batch: Vec<Completion>,
    /// Tasks that took frames in the present poll of another task, and how many ([`crate::neighbours`]).
    pub(crate) takers: Vec<(u32, u32)>,
    /// Tasks to wake after this round, because of a poll of another task.
    pub(crate) woken: Vec<u32>,
    /// Events of the last wait. They are taken out while they are handled, so that tasks can change.
    ready: Vec<Ready>,
    pub(crate) work: u32,
    /// The number of requests that tasks have served, modulo 2^32.
    pub(crate) served: u32,
    /// This turn found something to do.
    pub(crate) worked: bool,
    pub(crate) engine_ready: bool,
    /// The mailbox can have items, although its eventfd was cleared.
    pub(crate) has_items: bool,
    pub(crate) item_slices: ItemSlices,
    engine_failed: bool,
    pub(crate) ending: bool,
    empty_turns: EmptyTurns,
    /// The time spent on work since loads were last compared, and the time of that comparison.
    pub(crate) busy: Nanos,
    pub(crate) last_balance: Nanos,
    /// The load was above the limit at the last comparison too.
    pub(crate) overloaded: bool,
    pub(crate) stalls: StallWatch,
}

impl EventLoop {
    pub(crate) fn new(peers: Arc<Peers>, worker_id: usize, engine: Engine, poll: Poll) -> io::Result<Self> {
        let (mailbox, clock) = (peers.workers[worker_id].mailbox.clone(), peers.clock);
        let times = peers.workers[worker_id].times.clone();
        let mut waiter = Waiter::new(mailbox.waker().as_fd(), engine.event())?;
        let host_probe = HostProbe::new(clock, &mut waiter)?;
        Ok(Self {
            peers,
            worker_id,
            mailbox,
            times,
            clock,
            latest: clock.now(),
            poll,
            engine,
            waiter,
            host_probe,
            entries: Vec::new(),
            free: Vec::new(),
            numbers: HashMap::new(),
            scheduler: Scheduler::default(),
            naps: Vec::new(),
            deaf: Vec::new(),
            kicks_in_vain: KicksInVain::default(),
            next_nap: Nanos::MAX,
            with_room: Vec::new(),
            pending_calls: Vec::new(),
            next_call: Nanos::MAX,
            completions: Vec::new(),
            batch: Vec::new(),
            takers: Vec::new(),
            woken: Vec::new(),
            ready: Vec::new(),
            work: 0,
            served: 0,
            worked: false,
            engine_ready: false,
            has_items: false,
            item_slices: ItemSlices::default(),
            engine_failed: false,
            ending: false,
            empty_turns: EmptyTurns::default(),
            busy: 0,
            last_balance: 0,
            overloaded: false,
            stalls: StallWatch::default(),
        })
    }

    /// Runs until the worker is asked to end and all tasks have stopped.
    pub(crate) fn run(mut self) -> io::Result<()> {
        let _closed = CloseWhenDone(self.mailbox.clone());
        self.turns()
    }

    fn turns(&mut self) -> io::Result<()> {
        let mut now = self.clock.now();
        let mut looked = now;
        loop {
            self.worked = false;
            self.wake_naps(now);
            self.visit_scheduled(now);
            self.submit();
            self.complete();
            // A completion can queue an operation (the store after a load, the rest of a short transfer),
            // which must not wait for a sleep.
            if self.engine.needs_turn() {
                self.submit();
            }
            // Before a sleep, because no event reports this room.
            if self.engine.has_sources_with_room() {
                self.wake_with_room();
            }
            if self.ending && self.numbers.is_empty() {
                return Ok(());
            }
            self.send_due_calls();
            let spent = if self.worked { Spent::Work } else { Spent::Polling };
            let idle = self.scheduler.is_empty();
            let passed = now.saturating_sub(looked);
            let is_due = self.work >= WORK_BETWEEN_WAITS && passed >= WORK_TIME_MIN;
            if idle || is_due || passed >= TIME_BETWEEN_WAITS {
                self.work = 0;
                // The turn so far is accounted for by itself, because a sleep may follow.
                now = self.account(now, spent);
                let waited = if idle {
                    self.times.set_asleep(true);
                    self.sleep(now)?;
                    self.times.set_asleep(false);
                    Spent::Asleep
                } else {
                    self.wait(Some(Duration::ZERO))?;
                    spent
                };
                if self.has_items {
                    // A kick that came in the wait goes before items.
                    self.carry_out_items(self.scheduler.is_empty());
                }
                // Use the time after the wait: changes during the wait have counted time up to it.
                now = self.account(now, waited);
                self.host_probe.sample_if_due(now);
                self.balance(now);
                looked = now;
                continue;
            }
            if !self.worked {
                if !self.empty_turns.clock_is_due() {
                    continue;
                }
                std::hint::spin_loop();
            }
            now = self.account(now, spent);
        }
    }

    /// Accounts for the time since `before`. Returns the time now.
    ///
    /// A task that has published requests has read the clock. If the engine has nothing to do, hardly any
    /// time has passed since, and belongs to the next turn. So a turn reads the clock once.
    #[inline]
    fn account(&mut self, before: Nanos, spent: Spent) -> Nanos {
        let was_read = self.latest > before && spent == Spent::Work && self.engine.in_flight() == 0;
        let now = if was_read { self.latest } else { self.clock.now() };
        let passed = now.saturating_sub(before);
        self.latest = now;
        match spent {
            Spent::Asleep => self.times.account(0, 0, now),
            Spent::Work | Spent::Polling => {
                self.stalls.note_turn(now, passed);
                let looking = self.empty_turns.time_polled(passed, spent == Spent::Work);
                self.host_probe.spun(looking);
                self.busy += passed - looking;
                self.times.account(passed - looking, looking, now);
            }
        }
        now
    }

    /// Submits the operations that tasks queued. An engine that has failed completes everything with its
    /// error, which the drivers then see. The loop goes on.
    fn submit(&mut self) {
        if let Err(error) = self.engine.submit()
            && !std::mem::replace(&mut self.engine_failed, true)
        {
            error!(engine = self.engine.name(), %error, "the I/O engine has failed");
        }
    }

    /// Waits for an event, the end of a nap, or a call that is due.
    fn sleep(&mut self, now: Nanos) -> io::Result<()> {
        let watch_engine = self.completions_end_sleep();
        self.waiter.watch_engine(self.engine.event(), watch_engine)?;
        let retry = if self.engine.needs_turn() { now + RETRY } else { Nanos::MAX };
        let due = self.next_call.min(retry).min(self.next_nap);
        if due <= now || self.has_unseen_work() {
            return self.wait(Some(Duration::ZERO)).map(drop);
        }
        let due = Some(due).filter(|&due| due < Nanos::MAX);
        let began = self.host_probe.falls_asleep();
        let events = self.wait(due.map(|due| Duration::from_nanos(due - now)))?;
        let now = self.clock.now();
        let served = match events {
            0 if began.is_some() => self.naps.iter().filter(|&&number| self.nap_is_over(number, now)).count(),
            _ => events,
        };
        self.host_probe.woke(began, due, now, events > 0, served as Nanos);
        Ok(())
    }

    /// Returns whether the next turn has work of which no event tells: items, or a source that can be told of
    /// room, because the one that was told before need not have taken it.
    pub(crate) fn has_unseen_work(&self) -> bool {
        self.has_items || self.engine.has_sources_with_room()
    }

    fn nap_is_over(&self, number: u32, now: Nanos) -> bool {
        let entry = self.entries.get(number as usize).and_then(Option::as_ref);
        entry.is_some_and(|entry| matches!(entry.state, TaskState::Napping { until, .. } if until <= now))
    }

    /// Returns whether completions should end a sleep. They should not if all tasks with requests in flight
    /// nap and ignore them.
    #[inline]
    fn completions_end_sleep(&mut self) -> bool {
        let ignore_completions =
            |entry: &Entry| matches!(entry.state, TaskState::Napping { ignore_completions: true, .. });
        if self.naps.is_empty() || !self.entries.iter().flatten().any(ignore_completions) {
            return true;
        }
        self.entries
            .iter_mut()
            .flatten()
            .any(|entry| !ignore_completions(entry) && entry.task.in_flight() > 0)
    }

    /// Waits, and handles all events. Returns their number.
    pub(crate) fn wait(&mut self, timeout: Option<Duration>) -> io::Result<usize> {
        let mut ready = std::mem::take(&mut self.ready);
        ready.extend(self.waiter.wait(timeout)?);
        let events = ready.len();
        for ready in ready.drain(..) {
            match ready {
                // The loop reaps after each wait.
                Ready::Engine => self.engine_ready = true,
                Ready::Kick(number) => self.handle_kick(number),
                Ready::Event(number) => self.handle_event(number),
                Ready::Mailbox => {
                    self.mailbox.waker().clear();
                    self.has_items = true;
                    self.wake_woken();
                }
            }
        }
        self.ready = ready;
        Ok(events)
    }

    /// Puts tasks whose naps are over, or whose limits admit a request again, on the poll list. Listens again
    /// to kicks that were ignored.
    #[inline]
    pub(crate) fn wake_naps(&mut self, now: Nanos) {
        if now >= self.next_nap {
            self.end_naps(now);
        }
    }

    #[inline(never)]
    fn end_naps(&mut self, now: Nanos) {
        self.next_nap = Nanos::MAX;
        let mut naps = std::mem::take(&mut self.naps);
        naps.retain(|&number| {
            // A task that was woken early is no longer in that state.
            let Some(entry) = self.entries[number as usize].as_mut() else { return false };
            let until = match entry.state {
                TaskState::Napping { until, .. } | TaskState::Throttled { until } => Some(until),
                _ => None,
            };
            if let Some(until) = until
                && until > now
            {
                self.next_nap = self.next_nap.min(until);
                return true;
            }
            entry.in_naps = false;
            if until.is_some() {
                self.make_polled(number);
            }
            false
        });
        self.naps = naps;
        if !self.deaf.is_empty() {
            self.listen_again(now);
        }
    }

    /// Sends the calls that are due.
    #[inline]
    fn send_due_calls(&mut self) {
        if self.pending_calls.is_empty() {
            return;
        }
        // A turn that has work for another device need not read the clock for this.
        let now = self.latest;
        if now < self.next_call {
            return;
        }
        self.next_call = Nanos::MAX;
        let (entries, next_call) = (&mut self.entries, &mut self.next_call);
        self.pending_calls.retain(|&number| {
            let Some(entry) = entries[number as usize].as_mut() else { return false };
            match entry.call_due {
                Some(due) if due > now => {
                    *next_call = due.min(*next_call);
                    return true;
                }
                Some(_) => {
                    let vring = entry.task.vring();
                    vring.send_pending_call();
                    // The kernel refused the call.
                    if vring.has_pending_call() {
                        let due = now.saturating_add(RETRY);
                        entry.call_due = Some(due);
                        *next_call = due.min(*next_call);
                        return true;
                    }
                }
                None => {}
            }
            entry.call_due = None;
            false
        });
    }
}
