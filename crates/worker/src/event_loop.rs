//! THE loop: poll, submit, complete, arm, sleep.

use crate::clock::{Clock, Nanos};
use crate::entry::{Entry, State};
use crate::host_probe::HostProbe;
use crate::looks::Looks;
use crate::mailbox::{Key, Mailbox};
use crate::peers::Peers;
use crate::poll::Poll;
use crate::scheduler::Scheduler;
use crate::waiter::{Ready, Waiter};
use kickless_io::{Completion, Engine};
use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;
use tracing::error;

/// After so much work, in cost and visits made, kicks and the mailbox are looked at even if nothing needs waiting.
const WORK_BETWEEN_LOOKS: u32 = 128;
/// And after so much time.
const TIME_BETWEEN_LOOKS: Nanos = 50_000;
/// How long operations and calls wait that the kernel could not take and of which it will not tell.
pub(crate) const RETRY: Nanos = 1_000_000;

/// Closes the mailbox when the loop ends, however it ends: nobody waits for an answer that will not come.
struct CloseWhenDone(Arc<Mailbox>);

impl Drop for CloseWhenDone {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// What a turn of the loop was spent on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spent {
    Work,
    Looking,
    Asleep,
}

/// One worker's thread.
pub(crate) struct EventLoop {
    pub(crate) peers: Arc<Peers>,
    /// Its number among its peers.
    pub(crate) worker_id: usize,
    pub(crate) mailbox: Arc<Mailbox>,
    pub(crate) clock: Clock,
    pub(crate) poll: Poll,
    /// How long calls may be put off.
    pub(crate) call_coalesce: Option<Nanos>,
    pub(crate) engine: Engine,
    pub(crate) waiter: Waiter,
    pub(crate) host_probe: HostProbe,
    /// By task number, which is reused: nothing of a task is in flight when it goes.
    pub(crate) entries: Vec<Option<Entry>>,
    pub(crate) free: Vec<u32>,
    pub(crate) numbers: HashMap<Key, u32>,
    pub(crate) scheduler: Scheduler,
    /// Those that nap.
    pub(crate) naps: Vec<u32>,
    /// When the first of them is to be woken, or earlier.
    pub(crate) next_nap: Nanos,
    pub(crate) waiting: Vec<u32>,
    /// Those that owe a call.
    pub(crate) owing: Vec<u32>,
    /// When the first of these is due, or earlier.
    pub(crate) next_call: Nanos,
    /// Reaped, and those of one task among them.
    pub(crate) completions: Vec<Completion>,
    pub(crate) batch: Vec<Completion>,
    /// Events of the last wait, taken out so that tasks can change while they are handled.
    happened: Vec<Ready>,
    pub(crate) work: u32,
    /// Whether this turn found anything to do.
    pub(crate) worked: bool,
    pub(crate) engine_ready: bool,
    engine_failed: bool,
    pub(crate) ending: bool,
    looks: Looks,
    /// Time spent on work since loads were last looked at, and when that was.
    pub(crate) busy: Nanos,
    pub(crate) balanced: Nanos,
    /// Loads were above the limit the last time too.
    pub(crate) crowded: bool,
}

impl EventLoop {
    pub(crate) fn new(
        peers: Arc<Peers>,
        worker_id: usize,
        engine: Engine,
        poll: Poll,
        call_coalesce: Option<Nanos>,
    ) -> io::Result<Self> {
        let (mailbox, clock) = (peers.workers[worker_id].mailbox.clone(), peers.clock);
        let mut waiter = Waiter::new(mailbox.waker().as_fd(), engine.event())?;
        let host_probe = HostProbe::new(clock, &mut waiter)?;
        Ok(Self {
            peers,
            worker_id,
            mailbox,
            clock,
            poll,
            call_coalesce,
            engine,
            waiter,
            host_probe,
            entries: Vec::new(),
            free: Vec::new(),
            numbers: HashMap::new(),
            scheduler: Scheduler::default(),
            naps: Vec::new(),
            next_nap: Nanos::MAX,
            waiting: Vec::new(),
            owing: Vec::new(),
            next_call: Nanos::MAX,
            completions: Vec::new(),
            batch: Vec::new(),
            happened: Vec::new(),
            work: 0,
            worked: false,
            engine_ready: false,
            engine_failed: false,
            ending: false,
            looks: Looks::default(),
            busy: 0,
            balanced: 0,
            crowded: false,
        })
    }

    /// Runs until it is asked to end and all tasks have stopped.
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
            // A completion can queue an operation (the store after a load, the rest of a short transfer), which must not wait
            // for a sleep.
            if self.engine.needs_turn() {
                self.submit();
            }
            if self.ending && self.numbers.is_empty() {
                return Ok(());
            }
            self.pay_calls();
            let spent = if self.worked { Spent::Work } else { Spent::Looking };
            let idle = self.scheduler.is_empty();
            if idle || self.work >= WORK_BETWEEN_LOOKS || now.saturating_sub(looked) >= TIME_BETWEEN_LOOKS {
                self.work = 0;
                // What went into this turn so far is work all the same.
                now = self.account(now, spent);
                let waited = if idle {
                    self.sleep(now)?;
                    Spent::Asleep
                } else {
                    self.wait(Some(Duration::ZERO))?;
                    spent
                };
                // The time after the wait: what the wait changed has been counted up to then.
                now = self.account(now, waited);
                self.host_probe.look(now);
                self.balance(now);
                looked = now;
                continue;
            }
            if !self.worked {
                if !self.looks.is_time() {
                    continue;
                }
                std::hint::spin_loop();
            }
            now = self.account(now, spent);
        }
    }

    /// Books the time since `before`; the time now.
    #[inline]
    fn account(&mut self, before: Nanos, spent: Spent) -> Nanos {
        let now = self.clock.now();
        let passed = now.saturating_sub(before);
        match spent {
            Spent::Asleep => {}
            Spent::Work | Spent::Looking => {
                let looking = self.looks.share(passed, spent == Spent::Work);
                self.host_probe.spun(looking);
                self.busy += passed - looking;
            }
        }
        now
    }

    /// Starts what the tasks queued. An engine that has failed completes everything with its error, which the drivers
    /// then see; the loop goes on.
    fn submit(&mut self) {
        if let Err(error) = self.engine.submit()
            && !std::mem::replace(&mut self.engine_failed, true)
        {
            error!(engine = self.engine.name(), %error, "the I/O engine has failed");
        }
        // The kernel had no room for some, and may have it now, though nothing has completed.
        if self.engine.take_resumed() {
            self.unblock();
        }
    }

    /// Waits for whatever comes first: an event, the end of a nap, a call that is due.
    fn sleep(&mut self, now: Nanos) -> io::Result<()> {
        let heard = self.hears_completions();
        self.waiter.hear(self.engine.event(), heard)?;
        let retry = if self.engine.needs_turn() { now + RETRY } else { Nanos::MAX };
        let due = self.next_call.min(retry).min(self.next_nap);
        if due == Nanos::MAX {
            self.wait(None)?;
            return Ok(());
        }
        if !self.wait(Some(Duration::from_nanos(due.saturating_sub(now))))? && due > now {
            self.host_probe.slept(self.clock.now().saturating_sub(due));
        }
        Ok(())
    }

    /// Whether completions are to end a sleep: not if all who wait for any nap until a time, come what may.
    #[inline]
    fn hears_completions(&mut self) -> bool {
        let deaf = |entry: &Entry| matches!(entry.state, State::Napping { deaf: true, .. });
        if self.naps.is_empty() || !self.entries.iter().flatten().any(deaf) {
            return true;
        }
        self.entries.iter_mut().flatten().any(|entry| !deaf(entry) && entry.task.in_flight() > 0)
    }

    /// Waits, and handles what happened; whether anything did.
    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<bool> {
        let mut happened = std::mem::take(&mut self.happened);
        happened.extend(self.waiter.wait(timeout)?);
        let any = !happened.is_empty();
        for ready in happened.drain(..) {
            match ready {
                // The loop reaps after each wait.
                Ready::Engine => self.engine_ready = true,
                Ready::Kick(number) => self.kicked(number),
                Ready::Event(number) => self.event_came(number),
                Ready::Mailbox => {
                    for item in self.mailbox.take() {
                        self.handle(item);
                    }
                    self.unblock();
                }
            }
        }
        self.happened = happened;
        Ok(any)
    }

    /// Has those look that have napped long enough.
    #[inline]
    fn wake_naps(&mut self, now: Nanos) {
        if now < self.next_nap {
            return;
        }
        self.next_nap = Nanos::MAX;
        let mut naps = std::mem::take(&mut self.naps);
        naps.retain(|&number| {
            // One that was woken by something else is not in that state any more.
            let Some(entry) = self.entries[number as usize].as_mut() else { return false };
            if let State::Napping { until, .. } = entry.state
                && until > now
            {
                self.next_nap = self.next_nap.min(until);
                return true;
            }
            entry.naps = false;
            if matches!(entry.state, State::Napping { .. }) {
                self.make_polled(number);
            }
            false
        });
        self.naps = naps;
    }

    /// Makes the calls that are due.
    #[inline]
    fn pay_calls(&mut self) {
        if self.owing.is_empty() {
            return;
        }
        let now = self.clock.now();
        if now < self.next_call {
            return;
        }
        self.next_call = Nanos::MAX;
        let (entries, next_call) = (&mut self.entries, &mut self.next_call);
        self.owing.retain(|&number| {
            let Some(entry) = entries[number as usize].as_mut() else { return false };
            match entry.call_due {
                Some(due) if due > now => {
                    *next_call = due.min(*next_call);
                    return true;
                }
                Some(_) => {
                    let vring = entry.task.vring();
                    vring.send_pending_call();
                    // The kernel refused it.
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
