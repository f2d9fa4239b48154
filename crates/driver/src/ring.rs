//! A queue that threads share. A submitting thread holds one lock, a completing thread another, and a kick
//! needs none.
//!
//! Lock order: completion before submission. A thread that holds the submission lock takes no other lock.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard};

use kickless_spec::blk::{S_IOERR, S_OK, S_UNSUPP};
use kickless_sync::lock;
use kickless_virtqueue::driver::{Completer, CompletionHint, NoRoom, Submitter, Table};

use crate::block::{Blocks, Chain};
use crate::buffer::OwnMemory;
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

/// The number of empty polls between two checks of the connection.
const IDLE_POLLS: u32 = 2048;

thread_local! {
    /// Set while this thread delivers completions, and so holds a completion lock.
    static DELIVERING: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether this thread delivers completions. So it runs a callback, which must not wait, because it
/// could wait for itself.
pub(crate) fn is_delivering() -> bool {
    DELIVERING.get()
}

/// The delivery of some completions. If a caller's code panics during it, `drop` still updates the queue.
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
            // There is one writer at a time, under the completion lock.
            let completed = &self.ring.completed;
            completed.store(completed.load(Ordering::Relaxed) + self.count, Ordering::Release);
            self.ring.tell_watchers();
        }
    }
}

/// The queue.
pub(crate) struct Ring {
    index: usize,
    submission: Mutex<Submission>,
    completion: Mutex<CompletionSide>,
    /// Shows pollers whether taking the lock of `completion` makes sense.
    hint: CompletionHint,
    pub(crate) short_spin: ShortSpin,
    blocks: Blocks,
    own_memory: Arc<OwnMemory>,
    layout: Layout,
    kicker: Arc<Kicker>,
    /// Signalled by the device.
    pub(crate) call: Event,
    /// Wakes the leader of the waiting threads.
    pub(crate) wake: Arc<Event>,
    pub(crate) wait_leader: WaitLeader,
    pub(crate) free_waiters: FreeWaiters,
    /// Completions for pollers that another thread has found.
    ready: Mutex<VecDeque<Completion>>,
    ready_len: AtomicUsize,
    /// The waiters to notify when a request completes, because they wait for room or for `ready`.
    watchers: Mutex<Vec<Arc<Waiter>>>,
    watching: AtomicUsize,
    completed: AtomicU64,
    submitted: AtomicU64,
    kicks: AtomicU64,
    /// The number of calls that were taken from the eventfd.
    calls: AtomicU64,
    idle_polls: AtomicU32,
}

struct Submission {
    submitter: Submitter,
    filler: Filler<Request>,
    limits: Limits,
    kick: Arc<Event>,
    chain: Chain,
    indirect: bool,
    /// Submissions are refused for now, because the memory is about to change.
    held: bool,
    dead: bool,
}

/// The part of a batch that can be submitted.
struct Admitted {
    /// The number of requests, from the first on.
    count: usize,
    /// There are enough descriptors for all buffers without indirect tables.
    direct: bool,
    /// The reason why the next request cannot be submitted. `None` if the whole batch can be.
    ended: Option<Error>,
}

struct CompletionSide {
    end: CompletionEnd,
    sleepers: Sleepers<SleeperEvent>,
}

/// The completion end of the ring.
struct CompletionEnd {
    completer: Completer,
    taker: Taker<Request>,
    /// The id of the last completion.
    last: u16,
}

/// The completion end as the sleepers need it.
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

/// The result of a round of completions: the number delivered to pollers, and the error that ended it.
pub(crate) type Drained = (usize, Result<(), Error>);

/// The counters of a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Submitted requests. A request that was sent again after a reconnection counts once.
    pub submitted: u64,
    /// Completed requests.
    pub completed: u64,
    /// Kicks of the device.
    pub kicks: u64,
    /// Calls of the device, whether a thread slept or not.
    pub calls: u64,
}

impl Ring {
    /// Makes a queue in the memory of `layout`. The back-end does not know it yet.
    pub(crate) fn new(
        index: usize,
        layout: Layout,
        own_memory: Arc<OwnMemory>,
        limits: Limits,
        (kicker, kick): (Arc<Kicker>, Arc<Event>),
    ) -> Result<Self, Error> {
        let (submitter, mut completer) = layout.rings(&own_memory.region)?;
        // Calls are off until a thread sleeps.
        completer.disable_calls();
        let size = usize::from(layout.size());
        let data = own_memory.region.area(layout.data(), Blocks::len(layout.size()), 64)?;
        let blocks = Blocks::new(data, layout.data(), layout.size());
        let (filler, taker) = slots(size);
        let indirect = layout.indirect();
        let hint = completer.hint();
        hint.set(completer.position());
        let completing = CompletionSide {
            end: CompletionEnd { completer, taker, last: 0 },
            sleepers: Sleepers::default(),
        };
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
            hint,
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
        })
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns the eventfd that kicks the device.
    pub(crate) fn kick(&self) -> Arc<Event> {
        lock(&self.submission).kick.clone()
    }

    /// Kicks the device through `kick`, without a check.
    pub(crate) fn kick_by(&self, kick: &Event) {
        self.kicker.kick(kick);
    }

    /// Locks the completion side, unless another thread has locked it.
    fn try_completion(&self) -> Option<MutexGuard<'_, CompletionSide>> {
        match self.completion.try_lock() {
            Ok(completion) => Some(completion),
            Err(std::sync::TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(std::sync::TryLockError::WouldBlock) => None,
        }
    }

    /// Submits the first requests of the batch, as many as there is room for, and kicks if the device wants
    /// it.
    ///
    /// # Errors
    /// - There is no room for the first request.
    /// - A request is invalid. Those before it were submitted.
    /// - The disk is dead.
    ///
    /// Requests that were not submitted stay in the batch.
    pub(crate) fn submit(&self, batch: &mut Vec<Request>) -> Result<usize, Error> {
        let mut submission = lock(&self.submission);
        let Admitted { count, direct, mut ended } = self.admit(&mut submission, batch);
        let mut taken = 0;
        let mut requests = batch.drain(..count);
        while let Some(request) = requests.as_slice().first() {
            let Some(id) = self.add(&mut submission, request, direct) else { break };
            let Some(slot) = submission.filler.vacant(id) else { break };
            let Some(request) = requests.next() else { break };
            slot.fill(request);
            taken += 1;
        }
        if taken < count {
            // Only a hostile device can cause this.
            let back: Vec<Request> = requests.collect();
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

    /// Submits one request, and leaves an empty one in its place.
    ///
    /// # Errors
    /// As [`Ring::submit`]. The request is unchanged.
    pub(crate) fn submit_one(&self, request: &mut Request) -> Result<(), Error> {
        let mut submission = lock(&self.submission);
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

    /// Returns how many of these requests can be submitted now.
    #[inline]
    fn admit(&self, submission: &mut Submission, requests: &[Request]) -> Admitted {
        let Submission { submitter, limits, indirect, held, dead, .. } = submission;
        let mut admitted = Admitted { count: 0, direct: !*indirect, ended: None };
        if *dead || *held {
            admitted.ended = Some(if *dead { Error::Unplugged } else { Error::Full });
            return admitted;
        }
        // This also takes freed ids back, so the id of each request is known before its use.
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
        // With an indirect table, the device has to read from one more place. So tables are used only when
        // descriptors are scarce.
        admitted.direct |= descriptors + usize::from(self.layout.size()) / 2 <= room;
        admitted
    }

    /// Shows the device the added requests. Drops the lock before the kick.
    #[inline]
    fn publish(&self, mut submission: MutexGuard<'_, Submission>, added: usize) {
        if added == 0 {
            return;
        }
        // There is one writer at a time, under the lock.
        self.submitted.store(self.submitted.load(Ordering::Relaxed) + added as u64, Ordering::Relaxed);
        if !submission.submitter.publish() {
            return;
        }
        self.kicks.store(self.kicks.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        // From here on, the request may complete, the disk may be closed, and the connection may be replaced.
        // This reference keeps the eventfd open.
        let kick = submission.kick.clone();
        drop(submission);
        self.kicker.kick(&kick);
    }

    /// Checks that the device would accept the request. Returns the number of data descriptors that it needs.
    #[inline]
    fn check(&self, limits: &Limits, request: &Request) -> Result<usize, Invalid> {
        match limits.accepted_plain_piece(request) {
            Some(buffer) if buffer.is_of(&self.own_memory) => Ok(1),
            _ => self.check_other(limits, request),
        }
    }

    #[cold]
    fn check_other(&self, limits: &Limits, request: &Request) -> Result<usize, Invalid> {
        let pieces = limits.check(request)?;
        let ours = request.data.pieces().iter().all(|buffer| buffer.is_of(&self.own_memory));
        if ours { Ok(pieces) } else { Err(Invalid::ForeignBuffer) }
    }

    /// Adds an admitted request, without a table if `direct`. Returns its id, or `None` if there is no room.
    ///
    /// The caller must fill the slot of the id before it publishes the request. A completion before that
    /// means a hostile device.
    #[inline(always)]
    fn add(&self, submission: &mut Submission, request: &Request, direct: bool) -> Option<u16> {
        let Submission { submitter, limits, chain, .. } = submission;
        let id = submitter.next_id()?;
        let table = (!direct).then(|| self.blocks.table(id));
        let added = match limits.plain_piece(request) {
            Some(buffer) => submitter.add(&self.blocks.write_plain(id, request, buffer), table),
            None => self.add_other(submitter, chain, (id, request, limits), table),
        };
        added.ok().filter(|added| *added == id)
    }

    /// Adds a request that is not a plain one. It is separate to keep the path of plain ones short.
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

    /// Delivers up to `max` completions for pollers to `each`, and all others to their receivers.
    ///
    /// # Errors
    /// The device broke the rules of the ring.
    #[inline]
    fn drain(&self, end: &mut CompletionEnd, max: usize, mut each: impl FnMut(Completion)) -> Drained {
        let mut for_poller = 0;
        // The id that came back last is the first that was used again.
        self.blocks.prefetch(end.last);
        let mut delivery = Delivery::begin(self);
        let mut ended = Ok(());
        while for_poller < max {
            match end.completer.pop() {
                Ok(Some(done)) => {
                    self.blocks.prefetch_later(&end.completer, delivery.count == 0);
                    let status = self.blocks.status(done.id);
                    let Some(slot) = end.taker.full(done.id) else {
                        ended = Err(Error::Unpublished { queue: self.index, id: done.id });
                        break;
                    };
                    let Request { notify, data, .. } = slot.take();
                    end.last = done.id;
                    // The id may be reused only now.
                    end.completer.give_back(done.id);
                    delivery.count += 1;
                    let result = result(status);
                    match notify {
                        Notify::Poller(token) => {
                            for_poller += 1;
                            each(Completion { token, result, data });
                        }
                        Notify::Waiter(waiter) => waiter.complete((result, data)),
                    }
                }
                Ok(None) => break,
                Err(source) => {
                    ended = Err(Error::InvalidUsed { queue: self.index, source });
                    break;
                }
            }
        }
        drop(delivery);
        self.hint.set(end.completer.position());
        (for_poller, ended)
    }

    /// Delivers completions: at most `max` for pollers, to `each`. Returns their number and the error that
    /// ended the poll.
    ///
    /// Delivers nothing from the ring while another thread does.
    pub(crate) fn poll(&self, max: usize, mut each: impl FnMut(Completion)) -> Drained {
        let mut count = 0;
        while count < max && self.ready_len.load(Ordering::Acquire) > 0 {
            let Some(completion) = self.take_ready() else { break };
            each(completion);
            count += 1;
        }
        if count == max || !self.hint.may_have_completions() || is_delivering() {
            return (count, Ok(()));
        }
        let Some(mut completion) = self.try_completion() else { return (count, Ok(())) };
        let max = self.layout.poll_max(self.in_flight()).min(max - count);
        let (polled, ended) = self.drain(&mut completion.end, max, each);
        if polled > 0 && !self.layout.event_idx() {
            // With an event index, the device calls only once each time it is asked. So calls are turned off
            // only without an event index.
            let CompletionSide { end, sleepers } = &mut *completion;
            sleepers.turn_calls_off(&mut RingEnd { ring: self, end });
        }
        drop(completion);
        (count + polled, ended)
    }

    /// Returns whether to check the connection, after a poll that found nothing.
    #[inline]
    pub(crate) fn is_idle(&self) -> bool {
        // The count is not exact when several threads poll, and need not be.
        let idle = self.idle_polls.load(Ordering::Relaxed).wrapping_add(1);
        self.idle_polls.store(idle, Ordering::Relaxed);
        idle.is_multiple_of(IDLE_POLLS)
    }

    /// Delivers all completions. Keeps those for pollers.
    pub(crate) fn drain_for_all(&self) -> Result<(), Error> {
        if is_delivering() {
            return Ok(());
        }
        self.drain_and_keep(&mut lock(&self.completion))
    }

    fn drain_and_keep(&self, completion: &mut CompletionSide) -> Result<(), Error> {
        let ended = self.drain_and_keep_in(&mut completion.end);
        // This also wakes after an error, because completions may have been kept before it.
        if !matches!(ended, Ok(false)) {
            completion.sleepers.wake_all();
        }
        ended.map(drop)
    }

    /// Delivers all completions. Returns whether some were kept for pollers. Then sleeping pollers must be
    /// woken.
    fn drain_and_keep_in(&self, end: &mut CompletionEnd) -> Result<bool, Error> {
        let (kept, ended) = self.drain(end, usize::MAX, |completion| self.keep(completion));
        ended.map(|()| kept > 0)
    }

    /// Keeps a completion for the next poller. The caller must wake the sleepers under the same lock.
    fn keep(&self, completion: Completion) {
        let mut ready = lock(&self.ready);
        ready.push_back(completion);
        self.ready_len.store(ready.len(), Ordering::Release);
    }

    fn take_ready(&self) -> Option<Completion> {
        let mut ready = lock(&self.ready);
        let completion = ready.pop_front();
        self.ready_len.store(ready.len(), Ordering::Release);
        completion
    }

    /// Returns whether there may be a completion for a poller or any other receiver. Does not wait for a
    /// lock.
    pub(crate) fn is_due(&self) -> bool {
        self.has_ready() || self.is_due_in_ring()
    }

    /// Returns whether there is a completion in the ring. Completions kept for pollers do not count: they do
    /// not end a wait for another request.
    pub(crate) fn is_due_in_ring(&self) -> bool {
        self.hint.may_have_completions()
            && self.try_completion().is_some_and(|completion| completion.end.completer.is_due())
    }

    /// Returns whether there is a completion kept for pollers.
    pub(crate) fn has_ready(&self) -> bool {
        self.ready_len.load(Ordering::Acquire) > 0
    }

    /// Asks for a call before a sleep. Returns `false` if there is a completion already, so that the thread
    /// must not sleep.
    ///
    /// [`Ring::disarm`] must follow in either case.
    pub(crate) fn arm(&self) -> bool {
        let CompletionSide { end, sleepers } = &mut *lock(&self.completion);
        sleepers.arm_thread(&mut RingEnd { ring: self, end })
    }

    /// Ends a sleep. `called`: a call of the device ended it.
    ///
    /// A call that arrives when no thread sleeps ends the next sleep at once. That is rare.
    ///
    /// # Errors
    /// The device broke the rules of the ring.
    pub(crate) fn disarm(&self, called: bool) -> Result<(), Error> {
        let CompletionSide { end, sleepers } = &mut *lock(&self.completion);
        sleepers.disarm_thread(&mut RingEnd { ring: self, end }, called)
    }

    fn take_calls(&self) {
        self.calls.fetch_add(self.call.take(), Ordering::Relaxed);
    }

    /// Asks for a call before a sleep on the descriptor of `event`. Returns `false` if there is something to
    /// poll already.
    ///
    /// # Errors
    /// The device broke the rules of the ring.
    pub(crate) fn arm_events(&self, event: &Arc<SleeperEvent>) -> Result<bool, Error> {
        if is_delivering() {
            return Ok(false);
        }
        let CompletionSide { end, sleepers } = &mut *lock(&self.completion);
        sleepers.arm_events(&mut RingEnd { ring: self, end }, event)
    }

    /// Notifies `waiter` whenever a request completes, from now on.
    pub(crate) fn watch(&self, waiter: &Arc<Waiter>) {
        let mut watchers = lock(&self.watchers);
        watchers.push(waiter.clone());
        self.watching.store(watchers.len(), Ordering::Relaxed);
        // Partner: the fence in `tell_watchers`. Either `tell_watchers` sees the watcher, or the watcher sees
        // the completion, because it polls the ring again after this.
        fence(Ordering::SeqCst);
    }

    /// Stops notifying `waiter`.
    pub(crate) fn unwatch(&self, waiter: &Arc<Waiter>) {
        let mut watchers = lock(&self.watchers);
        watchers.retain(|other| !Arc::ptr_eq(other, waiter));
        self.watching.store(watchers.len(), Ordering::Relaxed);
    }

    #[inline]
    fn tell_watchers(&self) {
        // Partner: the fence in `watch`.
        fence(Ordering::SeqCst);
        if self.watching.load(Ordering::Relaxed) > 0 {
            self.notify_watchers();
        }
    }

    #[inline(never)]
    fn notify_watchers(&self) {
        let watchers = lock(&self.watchers);
        watchers.iter().for_each(|waiter| waiter.notify());
    }

    /// Returns the number of requests in flight.
    pub(crate) fn in_flight(&self) -> u64 {
        let completed = self.completed.load(Ordering::Acquire);
        self.submitted.load(Ordering::Acquire).saturating_sub(completed)
    }

    /// Returns the number of completed requests, as [`Ring::counters`] but without a system call.
    pub(crate) fn completed(&self) -> u64 {
        self.completed.load(Ordering::Relaxed)
    }

    /// Returns the counters. Too slow for the data path.
    pub(crate) fn counters(&self) -> Counters {
        Counters {
            submitted: self.submitted.load(Ordering::Relaxed),
            completed: self.completed.load(Ordering::Relaxed),
            kicks: self.kicks.load(Ordering::Relaxed),
            // The device signals these and can signal any number, so the sum may wrap.
            calls: self.calls.load(Ordering::Relaxed).wrapping_add(self.call.pending()),
        }
    }

    /// Sets the limits of later requests.
    pub(crate) fn set_limits(&self, limits: Limits) {
        lock(&self.submission).limits = limits;
    }

    /// Refuses all later submissions.
    pub(crate) fn shut(&self) {
        lock(&self.submission).dead = true;
    }

    /// Refuses submissions for now, as if the ring were full.
    pub(crate) fn set_held(&self, held: bool) {
        lock(&self.submission).held = held;
        if !held {
            self.tell_watchers();
        }
    }

    /// Restarts the queue for a back-end that does not know it yet. Requests in flight become the first in
    /// the new ring.
    ///
    /// # Errors
    /// The ring cannot be made.
    pub(crate) fn restart(&self, limits: Limits, kick: Arc<Event>) -> Result<(), Error> {
        let mut completion = lock(&self.completion);
        // Completions of the last back-end count. Its errors do not matter any more.
        let _ = self.drain_and_keep(&mut completion);
        let mut submission = lock(&self.submission);
        let mut in_flight: Vec<Request> = Vec::new();
        let taker = &mut completion.end.taker;
        in_flight.extend((0..taker.size()).filter_map(|id| taker.take(id)));
        let (submitter, completer) = self.layout.rings(&self.own_memory.region)?;
        (submission.submitter, submission.limits) = (submitter, limits);
        // If kicks are writes, a thread may be blocked by the last back-end. This releases it.
        std::mem::replace(&mut submission.kick, kick).take();
        completion.end.completer = completer;
        let mut refused = Vec::new();
        let direct = !submission.indirect;
        for request in in_flight {
            // The limits may have changed since it was submitted.
            let allowed = limits.check(&request).is_ok();
            let added = if allowed { self.add(&mut submission, &request, direct) } else { None };
            match added {
                Some(id) => refused.extend(submission.filler.fill(id, request).err()),
                None => refused.push(request),
            }
        }
        // The decision is not needed, because the caller kicks the queue in any case.
        let _ = submission.submitter.publish();
        drop(submission);
        self.fail(refused.into_iter());
        let CompletionSide { end, sleepers } = &mut *completion;
        self.hint.set(end.completer.position());
        // Sleeping threads stay asleep; owners of an Events poll again. Only a hostile device can have
        // completed a request already. The next poll finds that out.
        sleepers.wake_all();
        let _ = sleepers.restore_calls(&mut RingEnd { ring: self, end });
        Ok(())
    }

    /// Ends all requests in flight, because no device will complete them.
    pub(crate) fn kill(&self) {
        self.shut();
        // If kicks are writes, a thread may be blocked by the back-end. This releases it.
        self.kick().take();
        let mut completion = lock(&self.completion);
        // Earlier completions count. An error is most likely the reason why the disk died.
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
                Notify::Waiter(waiter) => waiter.complete((result, data)),
            }
        }
    }
}

/// Returns the result that a status byte means.
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
