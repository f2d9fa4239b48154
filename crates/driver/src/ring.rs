//! A queue that threads share: who submits holds one lock, who completes another, and who kicks none.
//!
//! Lock order: completion before submission. Who holds the submission lock takes no other.

use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kickless_spec::blk::{S_IOERR, S_OK, S_UNSUPP};
use kickless_virtqueue::driver::{Completer, Glimpse, NoRoom, Submitter, Table};

use crate::block::{Blocks, Chain};
use crate::buffer::{Data, OwnMemory};
use crate::error::{Error, Failure, Invalid};
use crate::event::{Event, Kicker, SleeperEvent};
use crate::layout::Layout;
use crate::limits::Limits;
use crate::request::{Completion, Notify, Request};
use crate::short_spin::ShortSpin;
use crate::sleepers::{Calls, Sleepers};
use crate::slots::{Filler, Taker, slots};
use crate::wait_leader::WaitLeader;
use crate::waiter::{FreeWaiters, Waiter};

/// How often nobody asks whether the connection is still there while the ring is polled and has nothing.
const IDLE_POLLS: u32 = 2048;

thread_local! {
    /// This thread is handing out completions, and holds a completion lock.
    static DELIVERING: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is inside a handler of completions.
pub(crate) fn is_delivering() -> bool {
    DELIVERING.get()
}

/// Completions that are being handed out. What a caller does with one can panic: the rest is in order all the same.
struct Delivery<'a> {
    ring: &'a Ring,
    outer: bool,
    count: u64,
}

impl<'a> Delivery<'a> {
    #[inline]
    fn begin(ring: &'a Ring) -> Self {
        Self { ring, outer: DELIVERING.replace(true), count: 0 }
    }
}

impl Drop for Delivery<'_> {
    #[inline]
    fn drop(&mut self) {
        DELIVERING.set(self.outer);
        if self.count > 0 {
            // One writer at a time, under the completion lock.
            let completed = &self.ring.completed;
            completed.store(completed.load(Ordering::Relaxed) + self.count, Ordering::Release);
            self.ring.tell_watchers();
        }
    }
}

/// One queue.
pub(crate) struct Ring {
    index: usize,
    submission: Mutex<Submission>,
    completion: Mutex<CompletionSide>,
    /// Whether to take that lock, for who polls.
    glimpse: Glimpse,
    pub(crate) short_spin: ShortSpin,
    blocks: Blocks,
    own_memory: Arc<OwnMemory>,
    layout: Layout,
    kicker: Arc<Kicker>,
    /// The device signals it.
    pub(crate) call: Event,
    /// Wakes the thread that sleeps for the others.
    pub(crate) wake: Arc<Event>,
    pub(crate) wait_leader: WaitLeader,
    pub(crate) free_waiters: FreeWaiters,
    /// Completions for pollers that somebody else has found.
    ready: Mutex<VecDeque<Completion>>,
    ready_len: AtomicUsize,
    /// Who wants to know that something was completed: for room, or for `ready`.
    watchers: Mutex<Vec<Arc<Waiter>>>,
    watching: AtomicUsize,
    completed: AtomicU64,
    submitted: AtomicU64,
    kicks: AtomicU64,
    /// Those that were taken.
    calls: AtomicU64,
    idle_polls: AtomicU32,
    #[cfg(feature = "locked-kick")]
    locked_kick: bool,
}

struct Submission {
    submitter: Submitter,
    filler: Filler<Request>,
    limits: Limits,
    kick: Arc<Event>,
    chain: Chain,
    indirect: bool,
    /// Memory is about to change.
    held: bool,
    dead: bool,
}

/// What can be submitted of a batch.
struct Admitted {
    /// So many of its first requests.
    count: usize,
    /// There are descriptors enough for all of their buffers, without tables.
    direct: bool,
    /// Why no more.
    ended: Option<Error>,
}

struct CompletionSide {
    end: CompletionEnd,
    sleepers: Sleepers<SleeperEvent>,
}

/// The completing end of the queue.
struct CompletionEnd {
    completer: Completer,
    taker: Taker<Request>,
}

/// The completion end, for threads that sleep until the device calls.
struct RingEnd<'a> {
    ring: &'a Ring,
    end: &'a mut CompletionEnd,
}

impl Calls for RingEnd<'_> {
    type Error = Error;

    fn enable(&mut self) -> bool {
        self.end.completer.enable_calls()
    }

    fn disable(&mut self) {
        self.end.completer.disable_calls();
    }

    fn take(&mut self) {
        self.ring.take_calls();
    }

    fn hand_out(&mut self) -> Result<bool, Error> {
        self.ring.drain_and_keep_in(self.end)
    }

    fn has_kept(&self) -> bool {
        self.ring.has_ready()
    }
}

/// What a round of completions came to: how many were handed to pollers, and what ended it.
pub(crate) type Drained = (usize, Result<(), Error>);

/// What a queue has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Requests that were submitted; one that was sent again after a reconnection counts once.
    pub submitted: u64,
    /// Requests that were completed.
    pub completed: u64,
    /// Kicks that the device wanted and got.
    pub kicks: u64,
    /// Calls that the device made, whether anybody slept or not.
    pub calls: u64,
}

impl Ring {
    /// A queue in the memory that `layout` names, not yet known to the back-end.
    pub(crate) fn new(
        index: usize,
        layout: Layout,
        own_memory: Arc<OwnMemory>,
        limits: Limits,
        (kicker, kick): (Arc<Kicker>, Arc<Event>),
    ) -> Result<Self, Error> {
        let (submitter, mut completer) = layout.rings(&own_memory.region)?;
        // Until somebody sleeps: who polls needs none.
        completer.disable_calls();
        let blocks = layout.blocks(&own_memory.region)?;
        let size = usize::from(layout.size());
        let (filler, taker) = slots(size);
        let indirect = layout.indirect();
        let glimpse = completer.glimpse();
        glimpse.set(completer.position());
        let completing =
            CompletionSide { end: CompletionEnd { completer, taker }, sleepers: Sleepers::default() };
        let submission = Submission {
            submitter,
            filler,
            limits,
            kick,
            chain: Chain::new(),
            indirect,
            held: false,
            dead: false,
        };
        Ok(Self {
            index,
            submission: Mutex::new(submission),
            completion: Mutex::new(completing),
            glimpse,
            short_spin: ShortSpin::default(),
            blocks,
            own_memory,
            layout,
            kicker,
            call: Event::new()?,
            wake: Arc::new(Event::new()?),
            wait_leader: WaitLeader::default(),
            free_waiters: FreeWaiters::default(),
            ready: Mutex::new(VecDeque::with_capacity(size)),
            ready_len: AtomicUsize::new(0),
            watchers: Mutex::new(Vec::new()),
            watching: AtomicUsize::new(0),
            completed: AtomicU64::new(0),
            submitted: AtomicU64::new(0),
            kicks: AtomicU64::new(0),
            calls: AtomicU64::new(0),
            idle_polls: AtomicU32::new(0),
            #[cfg(feature = "locked-kick")]
            locked_kick: false,
        })
    }

    #[cfg(feature = "locked-kick")]
    pub(crate) fn set_locked_kick(&mut self, locked: bool) {
        self.locked_kick = locked;
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// What kicks the device.
    pub(crate) fn kick(&self) -> Arc<Event> {
        self.submission().kick.clone()
    }

    /// Kicks it by `kick`, whatever it wants.
    pub(crate) fn kick_by(&self, kick: &Event) {
        self.kicker.kick(kick);
    }

    fn submission(&self) -> MutexGuard<'_, Submission> {
        self.submission.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn completion(&self) -> MutexGuard<'_, CompletionSide> {
        self.completion.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lock for completions, unless somebody has it.
    fn try_completion(&self) -> Option<MutexGuard<'_, CompletionSide>> {
        match self.completion.try_lock() {
            Ok(completion) => Some(completion),
            Err(std::sync::TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(std::sync::TryLockError::WouldBlock) => None,
        }
    }

    /// Submits the first requests of the batch, as many as there is room for, and kicks if the device wants it.
    ///
    /// # Errors
    /// No room for the first one; a request that is wrong, those before it having been submitted; or the disk is dead. What
    /// was not submitted stays in the batch.
    pub(crate) fn submit(&self, batch: &mut Vec<Request>) -> Result<usize, Error> {
        let mut submission = self.submission();
        let Admitted { count, direct, mut ended } = self.admit(&mut submission, batch);
        let (mut taken, mut refused) = (0, None);
        let mut requests = batch.drain(..count);
        while let Some(request) = requests.as_slice().first() {
            let Some(id) = self.add(&mut submission, request, direct) else { break };
            let Some(request) = requests.next() else { break };
            if let Err(request) = submission.filler.fill(id, request) {
                refused = Some(request);
                break;
            }
            taken += 1;
        }
        if taken < count {
            // A device that lies can have it so.
            let back: Vec<Request> = refused.into_iter().chain(requests).collect();
            batch.splice(..0, back);
            ended = Some(Error::Full);
        } else {
            drop(requests);
        }
        self.publish(submission, taken);
        match ended {
            Some(error) if taken == 0 || !matches!(error, Error::Full) => Err(error),
            _ => Ok(taken),
        }
    }

    /// Submits one request. What is left of it is another.
    ///
    /// # Errors
    /// As [`Ring::submit`]; the request is as it was.
    pub(crate) fn submit_one(&self, request: &mut Request) -> Result<(), Error> {
        let mut submission = self.submission();
        let Admitted { count, direct, ended } = self.admit(&mut submission, std::slice::from_ref(request));
        if count == 0 {
            return Err(ended.unwrap_or(Error::Full));
        }
        let Some(id) = self.add(&mut submission, request, direct) else { return Err(Error::Full) };
        let taken = std::mem::replace(request, Request::flush());
        if let Err(back) = submission.filler.fill(id, taken) {
            *request = back;
            return Err(Error::Full);
        }
        self.publish(submission, 1);
        Ok(())
    }

    /// How many of these can be submitted now.
    #[inline]
    fn admit(&self, submission: &mut Submission, requests: &[Request]) -> Admitted {
        let Submission { submitter, limits, indirect, held, dead, .. } = submission;
        let mut admitted = Admitted { count: 0, direct: !*indirect, ended: None };
        if *dead || *held {
            admitted.ended = Some(if *dead { Error::Unplugged } else { Error::Full });
            return admitted;
        }
        // Takes ids back too, so that each that follows is known before it is used.
        let room = submitter.room();
        let (mut taken, mut descriptors) = (0, 0);
        for request in requests {
            let needs = match self.check(limits, request) {
                Ok(pieces) => pieces + 2,
                Err(invalid) => {
                    admitted.ended = Some(invalid.into());
                    break;
                }
            };
            let takes = if *indirect { 1 } else { needs };
            if taken + takes > room {
                admitted.ended = Some(Error::Full);
                break;
            }
            (taken, descriptors) = (taken + takes, descriptors + needs);
            admitted.count += 1;
        }
        // A table is one place more for the device to look at: it is for when descriptors get short.
        admitted.direct |= descriptors + usize::from(self.layout.size()) / 2 <= room;
        admitted
    }

    /// Shows the device what was added, and lets go of the lock before it kicks.
    #[inline]
    fn publish(&self, mut submission: MutexGuard<'_, Submission>, added: usize) {
        if added == 0 {
            return;
        }
        // One writer at a time, under the lock.
        self.submitted.store(self.submitted.load(Ordering::Relaxed) + added as u64, Ordering::Relaxed);
        if !submission.submitter.publish() {
            return;
        }
        self.kicks.store(self.kicks.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        // From here on the request can be done, the disk be closed and the connection be another: the eventfd stays.
        let kick = submission.kick.clone();
        #[cfg(feature = "locked-kick")]
        if self.locked_kick {
            self.kicker.kick(&kick);
            return;
        }
        drop(submission);
        self.kicker.kick(&kick);
    }

    /// Whether the device would take the request; how many descriptors of data it needs.
    #[inline]
    fn check(&self, limits: &Limits, request: &Request) -> Result<usize, Invalid> {
        if let Data::One(buffer) = &request.data
            && limits.is_plain(request, buffer)
            && buffer.is_of(&self.own_memory)
        {
            return Ok(1);
        }
        self.check_other(limits, request)
    }

    #[cold]
    fn check_other(&self, limits: &Limits, request: &Request) -> Result<usize, Invalid> {
        let pieces = limits.check(request)?;
        let ours = request.data.pieces().iter().all(|buffer| buffer.is_of(&self.own_memory));
        if ours { Ok(pieces) } else { Err(Invalid::ForeignBuffer) }
    }

    /// Adds a request that was admitted, without a table if `direct`. Under which id it has to be put before it is published: a
    /// device that is faster than that lies. `None`: there is no room after all.
    #[inline]
    fn add(&self, submission: &mut Submission, request: &Request, direct: bool) -> Option<u16> {
        let Submission { submitter, limits, chain, .. } = submission;
        let id = submitter.next_id()?;
        let table = (!direct).then(|| self.blocks.table(id));
        let added = match self.blocks.write_plain(id, request, limits) {
            Some(buffers) => submitter.add(&buffers, table),
            None => self.add_other(submitter, chain, (id, request, limits), table),
        };
        added.ok().filter(|added| *added == id)
    }

    /// Adds a request that is not a plain one. Apart, so that the way of those is short.
    #[inline(never)]
    fn add_other(
        &self,
        submitter: &mut Submitter,
        chain: &mut Chain,
        (id, request, limits): (u16, &Request, &Limits),
        table: Option<Table<'_>>,
    ) -> Result<u16, NoRoom> {
        self.blocks.write_request(id, request, limits, chain);
        submitter.add(chain.buffers(), table)
    }

    /// Hands out up to `max` completions: those for pollers to `each`, others to whom they are for.
    ///
    /// # Errors
    /// The device lied.
    #[inline]
    fn drain(&self, end: &mut CompletionEnd, max: usize, mut each: impl FnMut(Completion)) -> Drained {
        let mut for_poller = 0;
        let mut delivery = Delivery::begin(self);
        let mut ended = Ok(());
        while for_poller < max {
            match end.completer.pop() {
                Ok(Some(done)) => {
                    let status = self.blocks.status(done.id);
                    let Some(request) = end.taker.take(done.id) else {
                        ended = Err(Error::Unpublished { queue: self.index, id: done.id });
                        break;
                    };
                    // Only now may the id be used again.
                    end.completer.give_back(done.id);
                    delivery.count += 1;
                    let Request { notify, data, .. } = request;
                    let result = result(status);
                    match notify {
                        Notify::Poller(token) => {
                            for_poller += 1;
                            each(Completion { token, result, data });
                        }
                        other => deliver(other, result, data),
                    }
                }
                Ok(None) => break,
                Err(source) => {
                    ended = Err(Error::Lie { queue: self.index, source });
                    break;
                }
            }
        }
        drop(delivery);
        self.glimpse.set(end.completer.position());
        (for_poller, ended)
    }

    /// Hands completions out: those for pollers to `each`, at most `max` of them; how many, and whether the device lied about
    /// the next. None if another thread is at it.
    pub(crate) fn poll(&self, max: usize, mut each: impl FnMut(Completion)) -> Drained {
        let mut count = 0;
        while count < max && self.ready_len.load(Ordering::Acquire) > 0 {
            let Some(completion) = self.take_ready() else { break };
            each(completion);
            count += 1;
        }
        if count == max || !self.glimpse.sees() || is_delivering() {
            return (count, Ok(()));
        }
        let Some(mut completion) = self.try_completion() else { return (count, Ok(())) };
        let (polled, ended) = self.drain(&mut completion.end, max - count, each);
        if polled > 0 && !self.layout.event_idx() {
            // With an event index, the device calls once for each time that it was asked to.
            let CompletionSide { end, sleepers } = &mut *completion;
            sleepers.turn_calls_off(&mut RingEnd { ring: self, end });
        }
        drop(completion);
        (count + polled, ended)
    }

    /// Whether it is time to look at the connection, after a poll that found nothing.
    #[inline]
    pub(crate) fn is_idle(&self) -> bool {
        // Not exact when several threads poll, and need not be.
        let idle = self.idle_polls.load(Ordering::Relaxed).wrapping_add(1);
        self.idle_polls.store(idle, Ordering::Relaxed);
        idle.is_multiple_of(IDLE_POLLS)
    }

    /// Hands out everything that is done; what is for pollers is kept for them.
    pub(crate) fn drain_for_all(&self) -> Result<(), Error> {
        if is_delivering() {
            return Ok(());
        }
        self.drain_and_keep(&mut self.completion())
    }

    fn drain_and_keep(&self, completion: &mut CompletionSide) -> Result<(), Error> {
        let ended = self.drain_and_keep_in(&mut completion.end);
        // After a lie too, whatever was kept before it.
        if !matches!(ended, Ok(false)) {
            completion.sleepers.wake_all();
        }
        ended.map(drop)
    }

    /// Hands out everything that is done; whether something is kept for pollers, of which those that sleep have to hear.
    fn drain_and_keep_in(&self, end: &mut CompletionEnd) -> Result<bool, Error> {
        let (kept, ended) = self.drain(end, usize::MAX, |completion| self.keep(completion));
        ended.map(|()| kept > 0)
    }

    /// Keeps a completion for whoever polls. The bells have to be rung, under the same lock.
    fn keep(&self, completion: Completion) {
        let mut ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner);
        ready.push_back(completion);
        self.ready_len.store(ready.len(), Ordering::Release);
    }

    fn take_ready(&self) -> Option<Completion> {
        let mut ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner);
        let completion = ready.pop_front();
        self.ready_len.store(ready.len(), Ordering::Release);
        completion
    }

    /// Whether there is something for a poller, or for anybody, as far as can be seen in passing.
    pub(crate) fn is_due(&self) -> bool {
        self.has_ready() || self.is_due_in_ring()
    }

    /// Whether there is something that nobody has found yet. What is kept for pollers does not end a wait for something else.
    pub(crate) fn is_due_in_ring(&self) -> bool {
        self.glimpse.sees()
            && self.try_completion().is_some_and(|completion| completion.end.completer.is_due())
    }

    /// Whether there is something for a poller that somebody else has found.
    pub(crate) fn has_ready(&self) -> bool {
        self.ready_len.load(Ordering::Acquire) > 0
    }

    /// Asks for a call before a sleep. `false`: there is something already, so do not sleep. Either way
    /// [`Ring::disarm`] has to follow.
    pub(crate) fn arm(&self) -> bool {
        let CompletionSide { end, sleepers } = &mut *self.completion();
        sleepers.arm_thread(&mut RingEnd { ring: self, end })
    }

    /// After a sleep; `called`: by the device. A call that nobody has slept for ends the next sleep at once, which is rarer than
    /// there being none.
    ///
    /// # Errors
    /// The device lied.
    pub(crate) fn disarm(&self, called: bool) -> Result<(), Error> {
        let CompletionSide { end, sleepers } = &mut *self.completion();
        sleepers.disarm_thread(&mut RingEnd { ring: self, end }, called)
    }

    fn take_calls(&self) {
        self.calls.fetch_add(self.call.take(), Ordering::Relaxed);
    }

    /// Asks for a call before a sleep on the descriptor that `bell` belongs to. `false`: there is something to poll already.
    ///
    /// # Errors
    /// The device lied.
    pub(crate) fn arm_events(&self, event: &Arc<SleeperEvent>) -> Result<bool, Error> {
        if is_delivering() {
            return Ok(false);
        }
        let CompletionSide { end, sleepers } = &mut *self.completion();
        sleepers.arm_events(&mut RingEnd { ring: self, end }, event)
    }

    /// From now on `seat` is nudged whenever something was completed.
    pub(crate) fn watch(&self, waiter: &Arc<Waiter>) {
        let mut watchers = self.watchers.lock().unwrap_or_else(PoisonError::into_inner);
        watchers.push(waiter.clone());
        self.watching.store(watchers.len(), Ordering::Relaxed);
        // Partner: the fence in `tell_watchers`. Either that sees the watcher, or the watcher, who looks at the ring once
        // more after this, sees what was completed.
        fence(Ordering::SeqCst);
    }

    /// No more.
    pub(crate) fn unwatch(&self, waiter: &Arc<Waiter>) {
        let mut watchers = self.watchers.lock().unwrap_or_else(PoisonError::into_inner);
        watchers.retain(|other| !Arc::ptr_eq(other, waiter));
        self.watching.store(watchers.len(), Ordering::Relaxed);
    }

    #[inline]
    fn tell_watchers(&self) {
        // Partner: the fence in `watch`.
        fence(Ordering::SeqCst);
        if self.watching.load(Ordering::Relaxed) == 0 {
            return;
        }
        let watchers = self.watchers.lock().unwrap_or_else(PoisonError::into_inner);
        watchers.iter().for_each(|waiter| waiter.notify());
    }

    /// Requests that the device has.
    pub(crate) fn in_flight(&self) -> u64 {
        let completed = self.completed.load(Ordering::Acquire);
        self.submitted.load(Ordering::Acquire).saturating_sub(completed)
    }

    /// Requests that were completed: what [`Ring::counters`] says, without asking the kernel for anything.
    pub(crate) fn completed(&self) -> u64 {
        self.completed.load(Ordering::Relaxed)
    }

    /// Not for the fast path.
    pub(crate) fn counters(&self) -> Counters {
        Counters {
            submitted: self.submitted.load(Ordering::Relaxed),
            completed: self.completed.load(Ordering::Relaxed),
            kicks: self.kicks.load(Ordering::Relaxed),
            // The device counts them, and can count what it likes.
            calls: self.calls.load(Ordering::Relaxed).wrapping_add(self.call.pending()),
        }
    }

    /// What requests must keep to from now on.
    pub(crate) fn set_limits(&self, limits: Limits) {
        self.submission().limits = limits;
    }

    /// Nothing more can be submitted.
    pub(crate) fn shut(&self) {
        self.submission().dead = true;
    }

    /// Nothing can be submitted for now: the ring is as good as full.
    pub(crate) fn set_held(&self, held: bool) {
        self.submission().held = held;
        if !held {
            self.tell_watchers();
        }
    }

    /// Begins anew, for a back-end that knows nothing of this queue yet: what is in flight becomes the first that it gets.
    ///
    /// # Errors
    /// The ring cannot be made.
    pub(crate) fn restart(&self, limits: Limits, kick: Arc<Event>) -> Result<(), Error> {
        let mut completion = self.completion();
        // What the last back-end has completed counts. A lie of its own does not matter any more.
        let _ = self.drain_and_keep(&mut completion);
        let mut submission = self.submission();
        let mut in_flight: Vec<Request> = Vec::new();
        let taker = &mut completion.end.taker;
        in_flight.extend((0..taker.size()).filter_map(|id| taker.take(id)));
        let (submitter, completer) = self.layout.rings(&self.own_memory.region)?;
        (submission.submitter, submission.limits) = (submitter, limits);
        // Where kicks are writes: one that the last back-end has made to wait goes on.
        std::mem::replace(&mut submission.kick, kick).take();
        completion.end.completer = completer;
        let mut refused = Vec::new();
        let direct = !submission.indirect;
        for request in in_flight {
            // It was submitted when other limits held, perhaps.
            let allowed = limits.check(&request).is_ok();
            let added = if allowed { self.add(&mut submission, &request, direct) } else { None };
            match added {
                Some(id) => refused.extend(submission.filler.fill(id, request).err()),
                None => refused.push(request),
            }
        }
        // It is kicked in any case.
        let _ = submission.submitter.publish();
        drop(submission);
        self.fail(refused.into_iter());
        let CompletionSide { end, sleepers } = &mut *completion;
        self.glimpse.set(end.completer.position());
        // Threads go on asleep; others have a look. Nothing can have come yet, but from a device that lies, which whoever
        // polls next finds out.
        sleepers.wake_all();
        let _ = sleepers.restore_calls(&mut RingEnd { ring: self, end });
        Ok(())
    }

    /// Gives everything in flight back to its owner: nobody will ever complete it.
    pub(crate) fn kill(&self) {
        self.shut();
        // Where kicks are writes: one that the back-end has made to wait goes on.
        self.kick().take();
        let mut completion = self.completion();
        // What was completed before counts; a lie is what it was killed for, most likely.
        let _ = self.drain_and_keep(&mut completion);
        let taker = &mut completion.end.taker;
        self.fail((0..taker.size()).filter_map(|id| taker.take(id)));
        completion.sleepers.wake_all();
        drop(completion);
        self.tell_watchers();
        self.wait_leader.notify_all_waiters();
        self.wake.signal();
    }

    fn fail(&self, requests: impl Iterator<Item = Request>) {
        let mut delivery = Delivery::begin(self);
        for Request { notify, data, .. } in requests {
            delivery.count += 1;
            let result = Err(Failure::Dead);
            match notify {
                Notify::Poller(token) => self.keep(Completion { token, result, data }),
                other => deliver(other, result, data),
            }
        }
    }
}

/// What a status byte means.
#[inline]
fn result(status: Option<u8>) -> Result<(), Failure> {
    match status {
        Some(S_OK) => Ok(()),
        Some(S_IOERR) => Err(Failure::Io),
        Some(S_UNSUPP) => Err(Failure::Unsupported),
        Some(status) => Err(Failure::Status(status)),
        None => Err(Failure::NoStatus),
    }
}

/// Hands over what is not for a poller.
fn deliver(notify: Notify, result: Result<(), Failure>, data: Data) {
    match notify {
        Notify::Waiter(waiter) => waiter.complete((result, data)),
        Notify::Handler(handler, token) => {
            catch_panic(|| handler.complete(Completion { token, result, data }));
        }
        Notify::Poller(_) => {}
    }
}

/// Calls something of the caller's that runs on whichever thread finds the reason: others rely on that thread, so it goes on
/// after a panic, which has been printed by then.
pub(crate) fn catch_panic(call: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(call)).is_err() {
        tracing::error!("a handler panicked");
    }
}
