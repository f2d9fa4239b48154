//! One virtqueue of a disk: a request's way from the ring to the disk and back.

use crate::failures::is_guests;
use crate::request::{self, Bounds, Kind, Purpose, Reject, Request, parse};
use crate::shared::Shared;
use crate::slots::Slots;
use kickless_device::{Context, Next, Polled, QueueTask, Vring};
use kickless_disk::{self as disk, Lane, LostWritesSeen, Step};
use kickless_io::{Completion, Engine, FileId};
use kickless_memory::{Iov, Marks, View};
use kickless_spec::blk::{self, BlkFeatures};
use kickless_virtqueue::{Chain, ChainId};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use tracing::debug;
use zerocopy::IntoBytes;

/// So many bytes of data cost as much as a request does: see [`QueueTask::poll`].
const COST_BYTES: u64 = 4096;
/// So many descriptors cost as much as a request does. One takes some 3 nanoseconds.
const COST_DESCRIPTORS: u16 = 64;

/// A running queue.
pub(crate) struct Queue {
    vring: Vring,
    shared: Arc<Shared>,
    /// The disk's file in the worker's engine.
    file: Option<FileId>,
    /// What that engine holds of guest memory.
    held: Option<Arc<View>>,
    /// What was negotiated. Without FLUSH every write is durable when it completes.
    features: BlkFeatures,
    read_only: bool,
    slots: Slots,
    /// The lost writes of the disk that this queue has been told of.
    lost_writes: LostWritesSeen,
    /// A slot whose request is to be started, and what it is: not from one poll to the next.
    prepared: Option<(u32, disk::Request)>,
    /// Slots whose request the disk had no room for, oldest first.
    waiting: VecDeque<u32>,
    /// A slot whose request waits for room in the device's budget, and what it is.
    unpaid: Option<(u32, disk::Request)>,
    /// Slots whose request goes on in its turn, the next one first.
    steps: VecDeque<u32>,
    /// The last turn was that of a step.
    stepped: bool,
    /// The cost of a step.
    step_cost: u32,
    /// The cost of steps and extents that is not told yet.
    owed_cost: u32,
    /// One of the four above may be something: all that is asked for each request.
    has_others: bool,
    /// The task stops for good: no request may wait for a remote server without end.
    waits_limited: bool,
    chain: Chain,
}

impl Queue {
    pub(crate) fn new(vring: Vring, shared: Arc<Shared>, features: BlkFeatures) -> Self {
        let read_only = shared.disk.limits().read_only;
        let slots = Slots::new(vring.size(), shared.budget.clone());
        let step_cost = shared.disk.step_bytes().map_or(u32::MAX, |bytes| (bytes / COST_BYTES) as u32);
        let lost_writes = shared.disk.lost_writes_seen(vring.index());
        Self {
            vring,
            shared,
            file: None,
            held: None,
            features,
            read_only,
            slots,
            lost_writes,
            prepared: None,
            waiting: VecDeque::new(),
            unpaid: None,
            steps: VecDeque::new(),
            stepped: false,
            step_cost,
            owed_cost: 0,
            has_others: false,
            waits_limited: false,
            chain: Chain::default(),
        }
    }

    /// Understands the popped chain and starts it in the free slot. What it costs.
    fn begin(&mut self, context: &mut Context<'_>, slot: u32) -> u32 {
        let id = self.chain.id;
        let Self { features, read_only, .. } = *self;
        let bounds = Bounds { size: self.shared.disk.size(), read_only, features };
        let cost = 1 + u32::from(self.chain.descriptors() / COST_DESCRIPTORS);
        match parse(&self.chain, self.vring.view(), bounds) {
            Ok(request) => {
                // A chain holds at most 2^32 bytes. What is done in steps costs with each of them.
                let blocks = ((request.data_len / COST_BYTES) as u32).min(self.step_cost);
                self.start(context, slot, request);
                cost + blocks
            }
            Err(reject) => {
                self.reject(id, reject);
                cost
            }
        }
    }

    fn start(&mut self, context: &mut Context<'_>, slot: u32, request: Request) {
        let id = self.chain.id;
        let wanted = match request.kind {
            Kind::Read { offset } => disk::Request::Read { offset },
            Kind::Write { offset } => disk::Request::Write { offset, durable: self.durable() },
            Kind::Flush => disk::Request::Flush,
            Kind::Extents(purpose) => return self.start_on_extents(context, slot, &request, purpose),
            Kind::GetId => {
                let serial = self.shared.id;
                return self.answer(id, request, &serial);
            }
            Kind::GetLifetime => {
                let lifetime = lifetime(self.shared.disk.limits());
                return self.answer(id, request, lifetime.as_bytes());
            }
        };
        let entry = self.slots.get(slot);
        if let Err(why) = translate(entry.io.buffers_mut(), &self.chain, self.vring.memory(), &request) {
            self.slots.refuse(slot, self.vring.memory().1);
            let reject = Reject { status: Some(request.status), code: blk::S_IOERR, why };
            return self.reject(id, reject);
        }
        entry.fill(self.vring.view(), id, request.status, request.kind, request.data_len);
        let is_small = entry.is_small();
        self.slots.take();
        if !is_small && !self.slots.account(slot) {
            return self.wait_for_room(slot, wanted);
        }
        // While its data is on the way into the cache, the one before is done.
        let now = match self.shared.disk.prepare(wanted) {
            true => self.prepared.replace((slot, wanted)),
            false => Some((slot, wanted)),
        };
        self.go(context, now);
    }

    /// Starts a request on extents.
    #[cold]
    fn start_on_extents(
        &mut self,
        context: &mut Context<'_>,
        slot: u32,
        request: &Request,
        purpose: Purpose,
    ) {
        let id = self.chain.id;
        let wanted = match self.take_extents(slot, request, purpose) {
            Ok(wanted) => wanted,
            Err(reject) => {
                self.slots.refuse(slot, self.vring.memory().1);
                return self.reject(id, reject);
            }
        };
        let entry = self.slots.get(slot);
        entry.fill(self.vring.view(), id, request.status, request.kind, request.data_len);
        // Each is an operation.
        let cost = entry.io.extents_len() as u32;
        self.slots.take();
        self.owe(cost);
        if self.slots.account(slot) {
            self.go(context, Some((slot, wanted)));
        } else {
            self.wait_for_room(slot, wanted);
        }
    }

    #[cold]
    fn wait_for_room(&mut self, slot: u32, wanted: disk::Request) {
        self.unpaid = Some((slot, wanted));
        self.has_others = true;
    }

    /// Starts a request that is in its slot, if there is one.
    fn go(&mut self, context: &mut Context<'_>, request: Option<(u32, disk::Request)>) {
        let Some((slot, wanted)) = request else { return };
        let step = self.on_disk(context, slot, |disk, lane, io| disk.start(lane, io, wanted));
        self.after(slot, step);
    }

    /// Whether a write is to be on stable storage when it completes (virtio 1.3, section 5.2.6.2).
    fn durable(&self) -> bool {
        !self.features.contains(BlkFeatures::FLUSH)
            // A driver that cannot turn the cache off has not done so.
            || (self.features.contains(BlkFeatures::CONFIG_WCE) && !self.shared.writeback())
    }

    /// Puts the segments of a request into its slot; what is to be done to them.
    fn take_extents(
        &mut self,
        slot: u32,
        request: &Request,
        purpose: Purpose,
    ) -> Result<disk::Request, Reject> {
        let (disk, durable) = (&self.shared.disk, self.durable());
        let (limits, wanted) = match purpose {
            Purpose::Discard => (disk.limits().discard, disk::Request::Discard { durable }),
            Purpose::WriteZeroes => (disk.limits().write_zeroes, disk::Request::WriteZeroes { durable }),
            Purpose::SecureErase => (disk.limits().secure_erase, disk::Request::SecureErase),
        };
        let Some(limits) = limits else {
            let why = "request type that the disk does not have";
            return Err(Reject { status: Some(request.status), code: blk::S_UNSUPP, why });
        };
        let io = &mut self.slots.get(slot).io;
        let (view, marks) = self.vring.memory();
        io.buffers_mut().clear(marks);
        let into = io.extents_mut();
        into.clear();
        request::extents(&self.chain, view, request, purpose, (disk.size(), &limits), into)?;
        Ok(wanted)
    }

    /// Runs a step of the disk for the request in a slot.
    fn on_disk(
        &mut self,
        context: &mut Context<'_>,
        slot: u32,
        step: impl FnOnce(&disk::Disk, &mut Lane<'_>, &mut disk::Io) -> Step,
    ) -> Step {
        let mut lane = Lane {
            engine: context.engine,
            source: context.task,
            slot,
            file: self.file,
            waker: context.waker,
            lost_writes: &mut self.lost_writes,
            marks: self.vring.memory().1,
        };
        step(&self.shared.disk, &mut lane, &mut self.slots.get(slot).io)
    }

    /// What follows a step: the answer, or waiting.
    fn after(&mut self, slot: u32, step: Step) {
        match step {
            Step::Done(result) => self.finish(slot, result),
            Step::Pending => {}
            Step::Busy => self.waiting.push_back(slot),
            Step::More => {
                self.owe(self.step_cost);
                self.steps.push_back(slot);
            }
        }
    }

    /// Answers the request in a slot and frees it.
    fn finish(&mut self, slot: u32, result: Result<(), disk::IoError>) {
        let entry = self.slots.get(slot);
        let (id, status, read_len, operation) = (entry.id, entry.status, entry.read_len, entry.operation);
        let code = match result {
            Ok(()) => blk::S_OK,
            Err(disk::IoError::Unsupported) => blk::S_UNSUPP,
            Err(_) => blk::S_IOERR,
        };
        let (view, marks) = self.vring.memory();
        let written = entry.view.as_ref().is_some_and(|view| view.write_obj(status, &code, marks).is_ok());
        entry.unpin_unless((view, marks));
        let took = entry.took();
        self.slots.release(slot, took);
        match result {
            Ok(()) => self.vring.push(id, read_len.saturating_add(written.into())),
            Err(error) => {
                if is_guests(error) {
                    debug!(queue = self.vring.index(), head = id.head, %error, "request failed");
                } else {
                    let Self { shared, vring, .. } = self;
                    shared.failures.note(vring.span(), vring.index(), operation, error);
                }
                self.push_failed(id, written, read_len);
            }
        }
    }

    fn reject(&mut self, id: ChainId, reject: Reject) {
        debug!(queue = self.vring.index(), head = id.head, why = reject.why, "request rejected");
        let data_len = self.chain.writable_len().saturating_sub(1);
        let (view, marks) = self.vring.memory();
        let written = reject.status.is_some_and(|at| view.write_obj(at, &reject.code, marks).is_ok());
        self.push_failed(id, written, data_len as u32);
    }

    /// Pushes a failed request. Only a status byte that is the first writable byte counts as written: the length that is
    /// pushed covers a prefix (virtio 1.3, section 2.7.8.2), and nothing says what came of the data before it.
    fn push_failed(&mut self, id: ChainId, status_written: bool, data_len: u32) {
        self.vring.counters().errors.add(1);
        self.vring.push(id, u32::from(status_written && data_len == 0));
    }

    /// Answers at once, with as much of these bytes as there is room for.
    fn answer(&mut self, id: ChainId, request: Request, bytes: &[u8]) {
        let (view, marks) = self.vring.memory();
        let mut done = 0;
        let written = request::data(self.chain.writable(), 0, request.data_len.min(bytes.len() as u64))
            .try_for_each(|(addr, len)| {
                let start = done;
                done += len as usize;
                view.write(addr, &bytes[start..done], marks)
            });
        if written.is_err() {
            let why = "data buffer is not in guest memory";
            return self.reject(id, Reject { status: Some(request.status), code: blk::S_IOERR, why });
        }
        // A longer buffer stays as it was past the bytes, so what is pushed ends there.
        let to_status = request.data_len == done as u64;
        let written = view.write_obj(request.status, &blk::S_OK, marks).is_ok();
        self.vring.push(id, done as u32 + u32::from(to_status && written));
    }

    /// Returns whether the engine takes an operation of this disk now. A disk without a file has none.
    fn has_room(&self, context: &Context<'_>) -> bool {
        self.file.is_none_or(|file| context.engine.room(file) > 0)
    }

    /// Goes on with requests that had to wait, as far as the engine has room.
    fn retry(&mut self, context: &mut Context<'_>) {
        for _ in 0..self.waiting.len() {
            if !self.has_room(context) {
                return;
            }
            let Some(slot) = self.waiting.pop_front() else { return };
            let step = self.on_disk(context, slot, |disk, lane, io| disk.retry(lane, io));
            self.after(slot, step);
        }
    }
}

/// The side that goes on next.
enum Turn {
    /// Of the requests in the ring.
    Ring,
    /// Another one has had its turn.
    Other,
    /// Nobody's, in this poll.
    Over(Next),
}

impl Queue {
    /// Accounts for work beside what a request costs at its beginning.
    #[cold]
    fn owe(&mut self, cost: u32) {
        self.owed_cost = self.owed_cost.saturating_add(cost);
        self.has_others = true;
    }

    /// Goes on with what has been popped and does not wait for the disk.
    #[cold]
    fn other_turn(&mut self, context: &mut Context<'_>, budget: u32, cost: &mut u32) -> Turn {
        *cost = cost.saturating_add(std::mem::take(&mut self.owed_cost));
        if *cost >= budget && budget > 0 {
            return Turn::Over(Next::More);
        }
        if self.step(context) {
            return if budget == 0 { Turn::Over(Next::More) } else { Turn::Other };
        }
        if !self.start_unpaid(context) {
            let goes_on = !self.steps.is_empty() && budget > 0;
            return if goes_on { Turn::Other } else { Turn::Over(Next::Blocked) };
        }
        self.has_others = self.owed_cost > 0 || !self.steps.is_empty();
        Turn::Ring
    }

    /// Goes on with the request whose turn it is, if there is one and the last turn was not that of another. Requests that go on and
    /// those in the ring take turns.
    fn step(&mut self, context: &mut Context<'_>) -> bool {
        if std::mem::replace(&mut self.stepped, false) {
            return false;
        }
        let Some(slot) = self.steps.pop_front() else { return false };
        self.stepped = true;
        let step = self.on_disk(context, slot, |disk, lane, io| disk.retry(lane, io));
        self.after(slot, step);
        true
    }

    /// Starts the request that waits for room in the budget, if there is one and there is room. `false`: it waits on.
    fn start_unpaid(&mut self, context: &mut Context<'_>) -> bool {
        if self.unpaid.is_none() {
            return true;
        }
        // It may be what the other waits for.
        let prepared = self.prepared.take();
        self.go(context, prepared);
        let unpaid = self.unpaid.take_if(|(slot, _)| self.slots.account(*slot));
        self.go(context, unpaid);
        self.unpaid.is_none()
    }

    /// Has the engine hold guest memory as it is now, instead of what it held.
    fn hold_memory(&mut self, engine: &mut Engine) {
        // A disk without a file has no operations.
        let now = self.file.map(|_| self.vring.view().clone());
        if let Some(now) = &now {
            engine.hold_memory(now);
        }
        // After the new one is held: what both have in common stays.
        if let Some(before) = std::mem::replace(&mut self.held, now) {
            engine.release_memory(&before);
        }
    }
}

/// Of a disk that has one: the feature was negotiated.
fn lifetime(limits: &disk::Limits) -> blk::Lifetime {
    limits.lifetime.map_or_else(blk::Lifetime::default, |of| blk::Lifetime {
        pre_eol_info: of.pre_eol_info.into(),
        device_lifetime_est_typ_a: of.type_a.into(),
        device_lifetime_est_typ_b: of.type_b.into(),
    })
}

/// Fills `iov` with the data buffers of a request.
fn translate(
    iov: &mut Iov,
    chain: &Chain,
    (view, marks): (&Arc<View>, &mut Marks),
    request: &Request,
) -> Result<(), &'static str> {
    // A slot that is free has none, and this does not rely on it.
    iov.clear(marks);
    let buffers = match request.kind {
        Kind::Write { .. } => chain.readable(),
        _ => chain.writable(),
    };
    for (addr, len) in request::data(buffers, request::data_start(request.kind), request.data_len) {
        iov.push(view, addr, len).map_err(|_| "data buffer is not in guest memory")?;
    }
    Ok(())
}

impl QueueTask for Queue {
    fn vring(&mut self) -> &mut Vring {
        &mut self.vring
    }

    fn attach(&mut self, engine: &mut Engine) -> io::Result<()> {
        self.file = self.shared.disk.attach(engine).map_err(io::Error::other)?;
        self.hold_memory(engine);
        Ok(())
    }

    fn detach(&mut self, engine: &mut Engine) {
        if let Some(held) = self.held.take() {
            engine.release_memory(&held);
        }
        self.shared.disk.detach(engine, self.file.take());
        self.shared.failures.tell_rest(self.vring.span());
    }

    fn poll(&mut self, context: &mut Context<'_>, budget: u32) -> Polled {
        self.retry(context);
        let (mut served, mut cost) = (0, 0u32);
        let next = loop {
            if cost >= budget && budget > 0 {
                break Next::More;
            }
            if self.has_others {
                match self.other_turn(context, budget, &mut cost) {
                    Turn::Ring => {}
                    Turn::Other => continue,
                    Turn::Over(next) => break next,
                }
            }
            // A request can wait for a buffer or a range that others hold, and more can be begun beside it. Where it is the
            // engine that is full, it comes before all that are still in the ring.
            let waits = !self.waiting.is_empty();
            let slot = match self.slots.next() {
                Some(slot) if !waits || self.has_room(context) => slot,
                // It may be in the only slot.
                _ if self.prepared.is_some() => {
                    let prepared = self.prepared.take();
                    self.go(context, prepared);
                    continue;
                }
                _ if !self.steps.is_empty() && budget > 0 => continue,
                _ => break Next::Blocked,
            };
            // What an earlier process has begun is done also where nothing new is.
            if budget == 0 && self.vring.again() == 0 {
                break if waits { Next::Waiting } else { Next::Idle };
            }
            let popped = self.vring.pop(&mut self.chain);
            if self.vring.has_cost() {
                cost = cost.saturating_add(self.vring.take_cost());
            }
            if !popped {
                break match self.vring.take_unfinished() {
                    true => Next::More,
                    false if !self.steps.is_empty() && budget > 0 => continue,
                    false if waits => Next::Waiting,
                    false => Next::Idle,
                };
            }
            served += 1;
            cost = cost.saturating_add(self.begin(context, slot));
        };
        let prepared = self.prepared.take();
        self.go(context, prepared);
        cost = cost.saturating_add(std::mem::take(&mut self.owed_cost));
        // Whatever else there is to wait for.
        let next = if self.steps.is_empty() { next } else { Next::More };
        self.vring.publish();
        // A request in several pieces may have begun another.
        if self.waits_limited {
            self.limit_remote_waits();
        }
        Polled { served, cost, next }
    }

    fn complete(&mut self, context: &mut Context<'_>, completions: &mut Vec<Completion>) -> bool {
        for completion in completions.drain(..) {
            let slot = completion.token.slot;
            let step = self.on_disk(context, slot, |disk, lane, io| disk.resume(lane, io, completion));
            self.after(slot, step);
        }
        self.vring.publish();
        !self.waiting.is_empty() || self.unpaid.is_some()
    }

    fn in_flight(&self) -> usize {
        self.slots.in_flight() + usize::from(self.vring.again())
    }

    fn limit_remote_waits(&mut self) {
        self.waits_limited = true;
        if self.in_flight() > 0 {
            self.shared.disk.hurry();
        }
    }

    fn memory_changed(&mut self, engine: &mut Engine) {
        self.hold_memory(engine);
        let (view, marks) = self.vring.memory();
        self.slots.each_free(|slot| slot.unpin_unless((view, marks)));
    }
}
