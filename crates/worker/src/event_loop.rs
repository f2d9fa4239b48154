//! THE loop: poll, submit, complete, arm, sleep.

use crate::mailbox::{Item, Key, Mailbox};
use crate::policy::{Host, Nanos, Policy, Verdict};
use crate::poll::Poll;
use crate::waiter::{Ready, Waiter};
use kickless_device::{Context, Next, Source, Stopped, Update, Vring};
use kickless_io::{Completion, Engine};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};
use tracing::{debug, error};

/// Heads that a source may pop in one visit, so that one busy queue cannot keep the others waiting.
const BUDGET: u32 = 64;
/// After so much work, in heads popped and visits made, kicks and the mailbox are looked at even if nothing needs waiting.
const WORK_BETWEEN_LOOKS: u32 = 128;
/// How long operations wait that the kernel could not take and of which it will not tell.
const RETRY: Duration = Duration::from_millis(1);

/// The states of a source; see the crate's documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Armed,
    Ready,
    Blocked,
    /// Stopping, with something in flight.
    Draining,
}

struct Entry {
    key: Key,
    source: Box<dyn Source>,
    state: State,
    /// It is among those that any completion, or the waker, makes ready.
    waits: bool,
    policy: Policy,
    /// Who waits for it to stop.
    stopping: Vec<Sender<Stopped>>,
}

/// Closes the mailbox when the loop ends, however it ends: nobody waits for an answer that will not come.
struct CloseWhenDone(Arc<Mailbox>);

impl Drop for CloseWhenDone {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// One worker's thread.
pub(crate) struct EventLoop {
    poll: Poll,
    started: Instant,
    mailbox: Arc<Mailbox>,
    engine: Engine,
    waiter: Waiter,
    /// By source number, which is reused: nothing of a source is in flight when it goes.
    entries: Vec<Option<Entry>>,
    free: Vec<u32>,
    numbers: HashMap<Key, u32>,
    ready: VecDeque<u32>,
    waiting: Vec<u32>,
    /// Reaped, and those of one source among them.
    completions: Vec<Completion>,
    batch: Vec<Completion>,
    /// Events of the last wait, taken out so that sources can change while they are handled.
    happened: Vec<Ready>,
    work: u32,
    engine_ready: bool,
    engine_failed: bool,
    ending: bool,
}

impl EventLoop {
    pub(crate) fn new(mailbox: Arc<Mailbox>, engine: Engine, poll: Poll) -> io::Result<Self> {
        let waiter = Waiter::new(mailbox.waker().as_fd(), engine.event())?;
        Ok(Self {
            poll,
            started: Instant::now(),
            mailbox,
            engine,
            waiter,
            entries: Vec::new(),
            free: Vec::new(),
            numbers: HashMap::new(),
            ready: VecDeque::new(),
            waiting: Vec::new(),
            completions: Vec::new(),
            batch: Vec::new(),
            happened: Vec::new(),
            work: 0,
            engine_ready: false,
            engine_failed: false,
            ending: false,
        })
    }

    /// Runs until it is asked to end and all sources have stopped.
    pub(crate) fn run(mut self) -> io::Result<()> {
        let _closed = CloseWhenDone(self.mailbox.clone());
        self.turn()
    }

    fn turn(&mut self) -> io::Result<()> {
        loop {
            self.visit_ready();
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
            let timeout = match (self.ready.is_empty(), self.engine.needs_turn()) {
                (true, false) => None,
                (true, true) => Some(RETRY),
                (false, _) => Some(Duration::ZERO),
            };
            if timeout != Some(Duration::ZERO) || self.work >= WORK_BETWEEN_LOOKS {
                self.work = 0;
                self.wait(timeout)?;
            }
        }
    }

    /// Starts what the sources queued. An engine that has failed completes everything with its error, which the drivers
    /// then see; the loop goes on.
    fn submit(&mut self) {
        if let Err(error) = self.engine.submit()
            && !std::mem::replace(&mut self.engine_failed, true)
        {
            error!(engine = self.engine.name(), %error, "the I/O engine has failed");
        }
    }

    /// Each ready source once, a budget each.
    fn visit_ready(&mut self) {
        if self.ready.is_empty() {
            return;
        }
        let (now, host) = (self.now(), Host::default());
        for _ in 0..self.ready.len() {
            let Some(number) = self.ready.pop_front() else { return };
            let Some(entry) = self.entries[number as usize].as_mut() else { continue };
            let stopping = !entry.stopping.is_empty();
            let mut context =
                Context { engine: &mut self.engine, source: number, waker: self.mailbox.waker() };
            let polled = entry.source.poll(&mut context, if stopping { 0 } else { BUDGET });
            self.work += 1 + polled.served;
            let counters = entry.source.vring().counters();
            if polled.served > 0 {
                counters.requests.add(polled.served.into());
                counters.polls_with_work.add(1);
                entry.policy.found(now, polled.served);
            } else {
                counters.polls_without_work.add(1);
            }
            match polled.next {
                Next::More => self.ready.push_back(number),
                Next::Blocked => {
                    entry.state = State::Blocked;
                    self.let_wait(number);
                }
                Next::Waiting if stopping => {
                    entry.state = State::Blocked;
                    self.let_wait(number);
                }
                Next::Idle if stopping => self.try_finish(number),
                next => match entry.policy.empty(now, &host, entry.source.in_flight() > 0) {
                    Verdict::Spin { .. } | Verdict::Nap { .. } => self.ready.push_back(number),
                    Verdict::Arm if entry.source.vring().arm() => {
                        entry.source.vring().disarm();
                        entry.policy.still_busy();
                        self.ready.push_back(number);
                    }
                    Verdict::Arm => {
                        entry.policy.armed(now);
                        entry.state = State::Armed;
                        if next == Next::Waiting {
                            self.let_wait(number);
                        }
                    }
                },
            }
        }
    }

    /// Reaps the engine and gives each source its own.
    fn complete(&mut self) {
        // An engine that says it is ready is listened to even if nothing is in flight: only a reap makes it unready.
        if self.engine.in_flight() == 0 && !std::mem::take(&mut self.engine_ready) {
            return;
        }
        self.engine.reap(&mut self.completions);
        if self.completions.is_empty() {
            return;
        }
        let now = self.now();
        let mut completions = std::mem::take(&mut self.completions);
        let mut rest = completions.drain(..).peekable();
        while let Some(first) = rest.next() {
            let number = first.token.source;
            self.batch.push(first);
            while let Some(next) = rest.next_if(|next| next.token.source == number) {
                self.batch.push(next);
            }
            let Some(entry) = self.entries[number as usize].as_mut() else {
                self.batch.clear();
                continue;
            };
            let mut context =
                Context { engine: &mut self.engine, source: number, waker: self.mailbox.waker() };
            let waits = entry.source.complete(&mut context, &mut self.batch);
            self.batch.clear();
            if entry.state == State::Ready {
                entry.policy.found(now, 0);
            }
            if waits {
                self.make_ready(number);
            } else if entry.state == State::Draining {
                self.try_finish(number);
            }
        }
        drop(rest);
        self.completions = completions;
        // Any completion can have made the room that a source waits for.
        self.unblock();
    }

    fn now(&self) -> Nanos {
        self.started.elapsed().as_nanos() as Nanos
    }

    fn let_wait(&mut self, number: u32) {
        if let Some(entry) = self.entries[number as usize].as_mut()
            && !std::mem::replace(&mut entry.waits, true)
        {
            self.waiting.push(number);
        }
    }

    /// Has all who wait look whether there is room by now.
    fn unblock(&mut self) {
        let mut waiting = std::mem::take(&mut self.waiting);
        // Who was first the last time is last now: where there is little room, it is not always the same source's.
        if !waiting.is_empty() {
            waiting.rotate_left(1);
        }
        for number in waiting.drain(..) {
            // A number can have a new owner, who does not wait.
            if let Some(entry) = self.entries[number as usize].as_mut()
                && std::mem::take(&mut entry.waits)
            {
                self.make_ready(number);
            }
        }
        self.waiting = waiting;
    }

    /// Puts a source on the ready list, if it is not there or about to be.
    fn make_ready(&mut self, number: u32) {
        let now = self.now();
        let Some(entry) = self.entries[number as usize].as_mut() else { return };
        match entry.state {
            State::Ready => return,
            State::Armed => {
                entry.source.vring().disarm();
                entry.policy.woken(now, &Host::default(), 0);
            }
            State::Blocked | State::Draining => {}
        }
        entry.state = State::Ready;
        self.ready.push_back(number);
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let mut happened = std::mem::take(&mut self.happened);
        happened.extend(self.waiter.wait(timeout)?);
        for ready in happened.drain(..) {
            match ready {
                // The loop reaps after each wait.
                Ready::Engine => self.engine_ready = true,
                Ready::Kick(number) => {
                    if let Some(entry) = self.entries.get_mut(number as usize).and_then(Option::as_mut) {
                        entry.source.vring().counters().kicks.add(1);
                        if entry.state == State::Armed {
                            self.make_ready(number);
                        }
                    }
                }
                Ready::Mailbox => {
                    self.mailbox.waker().clear();
                    for item in self.mailbox.take() {
                        self.handle(item);
                    }
                    self.unblock();
                }
            }
        }
        self.happened = happened;
        Ok(())
    }

    fn handle(&mut self, item: Item) {
        match item {
            Item::Put(key, source) => self.put(key, source),
            Item::Update(key, update, done) => {
                if let Some(&number) = self.numbers.get(&key) {
                    self.update(number, update);
                }
                // Whoever asked may have gone.
                let _ = done.send(());
            }
            Item::Stop(key, done) => {
                if let Some(&number) = self.numbers.get(&key)
                    && let Some(entry) = self.entries[number as usize].as_mut()
                {
                    entry.stopping.push(done);
                    self.make_ready(number);
                }
            }
            Item::End => {
                self.ending = true;
                let all: Vec<u32> = self.numbers.values().copied().collect();
                for number in all {
                    if let Some(entry) = self.entries[number as usize].as_mut() {
                        // Nobody hears the answer; the source stops all the same.
                        entry.stopping.push(std::sync::mpsc::channel().0);
                        self.make_ready(number);
                    }
                }
            }
        }
    }

    fn put(&mut self, key: Key, mut source: Box<dyn Source>) {
        let number = self.free.pop().unwrap_or(self.entries.len() as u32);
        let attached = source.attach(&mut self.engine);
        let vring = source.vring();
        let watched = vring.kick().map_or(Ok(()), |kick| self.waiter.add(kick.as_fd(), number));
        if let Err(error) = attached.and(watched) {
            vring.fail(&format_args!("its worker cannot serve it: {error}"));
        }
        vring.disarm();
        vring.call();
        let entry = Entry {
            key,
            source,
            state: State::Ready,
            waits: false,
            policy: Policy::new(self.poll, 1024),
            stopping: Vec::new(),
        };
        match self.entries.get_mut(number as usize) {
            Some(place) => *place = Some(entry),
            None => self.entries.push(Some(entry)),
        }
        self.numbers.insert(key, number);
        self.ready.push_back(number);
    }

    fn update(&mut self, number: u32, update: Update) {
        let Some(entry) = self.entries[number as usize].as_mut() else { return };
        let vring = entry.source.vring();
        let memory = matches!(update, Update::Memory(_));
        if let Update::Kick(new) = &update {
            if let Some(old) = vring.kick() {
                self.waiter.remove(old.as_fd());
            }
            let watched = new.as_ref().map_or(Ok(()), |new| self.waiter.add(new.as_fd(), number));
            if let Err(error) = watched {
                vring.fail(&format_args!("cannot wait for its kicks: {error}"));
            }
        }
        vring.apply(update);
        if memory {
            entry.source.memory_changed();
        }
        self.make_ready(number);
    }

    /// Ends a stopping source if nothing of it is in flight.
    fn try_finish(&mut self, number: u32) {
        let Some(entry) = self.entries[number as usize].as_mut() else { return };
        if entry.source.in_flight() > 0 {
            entry.state = State::Draining;
            return;
        }
        let Some(mut entry) = self.entries[number as usize].take() else { return };
        self.numbers.remove(&entry.key);
        self.free.push(number);
        entry.source.detach(&mut self.engine);
        let vring: &mut Vring = entry.source.vring();
        if let Some(kick) = vring.kick() {
            self.waiter.remove(kick.as_fd());
        }
        let stopped = vring.stop();
        debug!(queue = vring.index(), next_avail = stopped.next_avail, "queue stopped");
        // Everything that the source held (memory above all) is let go before anybody hears that it stopped.
        drop(entry.source);
        for done in entry.stopping {
            let _ = done.send(stopped.clone());
        }
    }
}
