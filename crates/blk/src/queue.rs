//! One virtqueue of a disk: the path of a request from the ring to the disk and back.

mod extents;
mod kept;
mod leave;
mod other_work;
mod state;

use crate::device_state::DeviceState;
use crate::failures::is_caused_by_guest;
use crate::metrics::Meter;
use crate::operation::Operation;
use crate::request::{self, Bounds, Kind, Reject, Request, parse};
use crate::slots::{Slot, Slots};
use kickless_device::{Context, Direction, LEAVING_COST, Leave, Next, Polled, QueueTask, Traffic, Vring};
use kickless_disk::{self as disk, Attached, IoContext, LostWritesSeen, Step, TABLE_OP_SLOTS};
use kickless_io::{Completion, Engine};
use kickless_memory::{Iov, Marks, Unmapped, View};
use kickless_spec::blk::{self, BlkFeatures};
use kickless_virtqueue::{Buffer, Chain, ChainId};
use state::{End, Kept, OtherWork, Stop};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use tracing::{debug, warn};

/// The number of bytes of data that cost as much as a request: see [`QueueTask::poll`].
const COST_BYTES: u64 = 4096;
/// The number of descriptors that cost as much as a request. One descriptor takes about 3 nanoseconds.
const COST_DESCRIPTORS: u16 = 64;
/// The number of requests that still wait when they are tried again that cost as much as a request. A try
/// takes about 40 nanoseconds, mostly for a lock.
const COST_TRIES: u32 = 16;

/// The time after which a queue of a paused device looks whether it goes on.
const PAUSE_NS: u64 = 100_000_000;

/// A running queue.
pub(crate) struct Queue {
    vring: Vring,
    shared: Arc<DeviceState>,
    /// The disk of the present guest.
    disk: Arc<disk::Disk>,
    /// The disk in the worker's engine.
    attached: Attached,
    /// The lost writes of the disk that this queue has reported.
    lost_writes: LostWritesSeen,
    /// The bounds of requests. The size is that at the beginning of the present poll.
    bounds: Bounds,
    slots: Slots,
    /// The slot and the request that start next. `None` between polls.
    prepared: Option<(u32, disk::Request)>,
    /// Slots of requests that wait for room or for a resource ([`Step::Busy`]), oldest first.
    waiting: VecDeque<u32>,
    other_work: OtherWork,
    kept: Kept,
    stop: Stop,
    /// The nanoseconds for which the present poll pops no new requests, and the next ones need not look: the
    /// device is paused, or its limits are in debt.
    held_ns: Option<u64>,
    meter: Meter,
    chain: Chain,
    /// A line of the log says that the driver does not send requests.
    has_warned: bool,
}

impl Queue {
    pub(crate) fn new(vring: Vring, shared: Arc<DeviceState>, features: BlkFeatures) -> Self {
        let disk = shared.medium.disk();
        let bounds = Bounds { size: 0, read_only: disk.limits().read_only, features };
        let slots = Slots::new(vring.size(), shared.budget.clone());
        let step_cost = disk.step_bytes().map_or(u32::MAX, |bytes| (bytes / COST_BYTES) as u32);
        let meter = Meter::new(shared.metrics.queue(vring.index()), vring.size());
        Self {
            vring,
            shared,
            disk,
            attached: Attached::default(),
            lost_writes: LostWritesSeen::default(),
            bounds,
            slots,
            prepared: None,
            waiting: VecDeque::new(),
            other_work: OtherWork::new(step_cost),
            kept: Kept::default(),
            stop: Stop::default(),
            held_ns: None,
            meter,
            chain: Chain::default(),
            has_warned: false,
        }
    }

    /// Parses the popped chain and starts its request in the free slot. Returns its cost.
    // A function of its own, so that its variables are in registers, and not those of the loop around it.
    #[inline(never)]
    fn begin(&mut self, context: &mut Context<'_>, slot: u32) -> u32 {
        let id = self.chain.id;
        let cost = 1 + u32::from(self.chain.descriptors() / COST_DESCRIPTORS);
        match parse(&self.chain, self.vring.view(), self.bounds) {
            Ok(request) => {
                self.charge(&request);
                // A chain holds at most 2^32 bytes. A request that runs in steps reports the cost of each
                // step later.
                let blocks = ((request.data_len / COST_BYTES) as u32).min(self.other_work.step_cost);
                self.start(context, slot, request);
                cost + blocks
            }
            // At most once for each growth.
            Err(_) if self.has_grown() => self.begin(context, slot),
            Err(reject) => {
                self.reject(id, reject);
                cost
            }
        }
    }

    /// Charges the limits of the device for a popped request.
    #[inline]
    fn charge(&self, request: &Request) {
        if self.vring.is_limited() {
            let is_read = matches!(request.kind, Kind::Read { .. });
            let direction = if is_read { Direction::Read } else { Direction::Write };
            self.vring.charge_request(direction, request.data_len);
        }
    }

    /// Returns the end of the poll if the ring has requests, none of which may be popped for `wait_ns`.
    #[inline]
    fn hold(&mut self, wait_ns: u64) -> Option<End> {
        self.vring.has_work().then_some(End::Halted { wait_ns })
    }

    /// Reads the size of the disk again. Returns whether it has grown since the beginning of the poll: the
    /// driver may know.
    #[cold]
    fn has_grown(&mut self) -> bool {
        let before = std::mem::replace(&mut self.bounds.size, self.disk.size());
        self.bounds.size > before
    }

    #[inline(always)]
    fn start(&mut self, context: &mut Context<'_>, slot: u32, request: Request) {
        let id = self.chain.id;
        let wanted = match request.kind {
            Kind::Read { offset } => disk::Request::Read { offset },
            Kind::Write { offset } => disk::Request::Write { offset, durable: self.durable() },
            Kind::Flush if self.shared.take_lost_writes() => {
                let why = "the disk lost writes before, when it was stopped";
                return self.reject(id, Reject { status: Some(request.status), code: blk::S_IOERR, why });
            }
            Kind::Flush => disk::Request::Flush,
            Kind::Extents(op) => return self.start_on_extents(context, slot, &request, op),
            Kind::GetId => {
                let serial = self.shared.id;
                return self.answer(id, request, &serial);
            }
        };
        let entry = self.slots.get(slot);
        if let Err(why) = translate(entry.io.buffers_mut(), &self.chain, self.vring.memory(), &request) {
            self.slots.clear_refused(slot, self.vring.memory().1);
            let reject = Reject { status: Some(request.status), code: blk::S_IOERR, why };
            return self.reject(id, reject);
        }
        entry.fill(self.vring.view(), id, request.status, request.kind, request.data_len);
        self.meter.count(entry.operation, request.data_len);
        let is_small = entry.is_small();
        self.slots.take_next();
        if self.shared.on_error.is_on {
            self.keep_copy(slot, wanted);
        }
        if !is_small && !self.slots.reserve(slot) {
            return self.wait_for_budget(slot, wanted);
        }
        // The processor loads the data of this request into its cache, while the request before it runs.
        let now = match self.disk.prepare(wanted) {
            true => self.prepared.replace((slot, wanted)),
            false => Some((slot, wanted)),
        };
        if let Some((slot, wanted)) = now {
            self.start_now(context, slot, wanted);
        }
    }

    /// Starts the prepared request, if there is one.
    #[inline(never)]
    fn start_prepared(&mut self, context: &mut Context<'_>) {
        if let Some((slot, wanted)) = self.prepared.take() {
            self.start_now(context, slot, wanted);
        }
    }

    /// Starts the request in a slot on the disk.
    #[inline(always)]
    fn start_now(&mut self, context: &mut Context<'_>, slot: u32, wanted: disk::Request) {
        match self.on_disk(context, slot, |disk, io_context, io| disk.start(io_context, io, wanted)) {
            Step::Done(Ok(())) => {
                self.meter.answered_at_once();
                self.finish(slot, blk::S_OK);
            }
            step => self.take_first_step(slot, step),
        }
    }

    /// Returns whether a write must be on stable storage when it completes (virtio 1.3, section 5.2.6.2).
    fn durable(&self) -> bool {
        !self.bounds.features.contains(BlkFeatures::FLUSH)
            // A driver without CONFIG_WCE cannot have turned the cache off.
            || (self.bounds.features.contains(BlkFeatures::CONFIG_WCE) && !self.shared.writeback())
    }

    /// Runs a step of the disk for the request in a slot.
    #[inline(always)]
    fn on_disk(
        &mut self,
        context: &mut Context<'_>,
        slot: u32,
        step: impl FnOnce(&disk::Disk, &mut IoContext<'_>, &mut disk::Io) -> Step,
    ) -> Step {
        self.with_disk(context, slot, |disk, io_context, slots| {
            step(disk, io_context, &mut slots.get(slot).io)
        })
    }

    /// Starts operations for the tables of images, if any are due.
    #[inline]
    fn submit_table_ops(&mut self, context: &mut Context<'_>) {
        if self.attached.is_due() {
            self.for_tables(context, disk::Disk::submit_table_ops);
        }
    }

    /// Calls a method of the disk that concerns the tables of images, and no request.
    #[cold]
    fn for_tables(&mut self, context: &mut Context<'_>, call: impl FnOnce(&disk::Disk, &mut IoContext<'_>)) {
        self.with_disk(context, TABLE_OP_SLOTS, |disk, io_context, _| call(disk, io_context));
    }

    /// Calls the disk with the means that the worker and the queue have for it.
    #[inline(always)]
    fn with_disk<T>(
        &mut self,
        context: &mut Context<'_>,
        slot: u32,
        call: impl FnOnce(&disk::Disk, &mut IoContext<'_>, &mut Slots) -> T,
    ) -> T {
        let mut io_context = IoContext {
            engine: context.engine,
            task: context.task,
            slot,
            attached: &mut self.attached,
            waker: context.waker,
            lost_writes: &mut self.lost_writes,
            marks: self.vring.memory().1,
        };
        call(&self.disk, &mut io_context, &mut self.slots)
    }

    /// Handles the result of a request's first step that was no success at once.
    #[inline(never)]
    fn take_first_step(&mut self, slot: u32, step: Step) {
        self.meter.waits(slot);
        self.take_step(slot, step);
    }

    /// Handles the result of a step of a request that has waited: answers the request, or lets it wait again.
    #[inline(always)]
    fn take_step(&mut self, slot: u32, step: Step) {
        match step {
            Step::Done(Ok(())) => {
                self.meter.answered(slot);
                self.finish(slot, blk::S_OK);
            }
            Step::Done(Err(error)) => self.fail(slot, error),
            Step::Pending => self.meter.submitted(slot),
            Step::Busy => self.waiting.push_back(slot),
            Step::More => self.other_work.add_step(slot),
        }
    }

    /// Answers a failed request, unless it is left or kept.
    #[cold]
    fn fail(&mut self, slot: u32, error: disk::IoError) {
        if self.leave_failed(slot, error) || self.keep_failed(slot, error) {
            return;
        }
        self.meter.answered(slot);
        let Slot { id, operation, .. } = *self.slots.get(slot);
        self.meter.count_error(operation);
        if is_caused_by_guest(error) {
            debug!(queue = self.vring.index(), head = id.head(), %error, "request failed");
        } else {
            self.shared.failures.log(self.vring.span(), self.vring.index(), operation, error);
        }
        let unsupported = error == disk::IoError::Unsupported;
        self.finish(slot, if unsupported { blk::S_UNSUPP } else { blk::S_IOERR });
    }

    /// Writes the status of the request in a slot, frees the slot, and pushes the request.
    #[inline(always)]
    fn finish(&mut self, slot: u32, status: u8) {
        let entry = self.slots.get(slot);
        let (id, read_len) = (entry.id, entry.read_len);
        let (view, marks) = self.vring.memory();
        let written = entry.status.write(status, marks);
        entry.unpin_unless((view, marks));
        let reserved = entry.has_reservation();
        self.slots.release(slot, reserved);
        match status {
            blk::S_OK => self.vring.push(id, read_len.saturating_add(written.into())),
            _ => self.push_failed(id, written, read_len),
        }
    }

    fn reject(&mut self, id: ChainId, reject: Reject) {
        debug!(queue = self.vring.index(), head = id.head(), why = reject.why, "request rejected");
        if self.chain.readable_len() == 0 && !std::mem::replace(&mut self.has_warned, true) {
            warn!(
                parent: self.vring.span(),
                queue = self.vring.index(),
                "the driver sends a buffer without a request, as network cards do: if the front-end is that of a card, \
                 connect it to the socket of one"
            );
        }
        self.meter.count(Operation::Other, 0);
        self.meter.count_error(Operation::Other);
        self.meter.answered_at_once();
        let data_len = self.chain.writable_len().saturating_sub(1);
        let (view, marks) = self.vring.memory();
        let written = reject.status.is_some_and(|at| view.write_obj(at, &reject.code, marks).is_ok());
        self.push_failed(id, written, data_len as u32);
    }

    /// Pushes a failed request.
    ///
    /// The pushed length covers a prefix of the writable bytes (virtio 1.3, section 2.7.8.2). It is unknown
    /// how much of the data before the status was written. So the status byte counts only if it is the first
    /// writable byte.
    fn push_failed(&mut self, id: ChainId, status_written: bool, data_len: u32) {
        self.vring.counters().errors.add(1);
        self.vring.push(id, u32::from(status_written && data_len == 0));
    }

    /// Answers at once with `bytes`, cut to the length of the data buffer.
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
        // A longer buffer is not written beyond `bytes`, so the pushed length ends there.
        self.meter.count(Operation::Other, done as u64);
        self.meter.answered_at_once();
        let to_status = request.data_len == done as u64;
        let written = view.write_obj(request.status, &blk::S_OK, marks).is_ok();
        self.vring.push(id, done as u32 + u32::from(to_status && written));
    }

    /// Returns whether the engine has room for an operation of this disk. A disk without a file needs none.
    /// If there is no room, the task is woken when there is.
    fn has_room(&self, context: &mut Context<'_>) -> bool {
        let Some(file) = self.attached.file() else { return true };
        let has_room = context.engine.room(file) > 0;
        if !has_room {
            context.engine.wait_for_room(file, context.task);
        }
        has_room
    }

    /// Continues waiting requests, as far as the engine has room. Returns the cost of those that wait again.
    fn retry(&mut self, context: &mut Context<'_>) -> u32 {
        let mut tries = 0;
        for _ in 0..self.waiting.len() {
            // A cancelled request needs no room.
            if !self.stop.has_cancelled() && !self.has_room(context) {
                break;
            }
            let Some(slot) = self.waiting.pop_front() else { break };
            let step = self.on_disk(context, slot, |disk, io_context, io| disk.retry(io_context, io));
            tries += u32::from(step == Step::Busy);
            self.take_step(slot, step);
        }
        tries / COST_TRIES
    }
}

/// Fills `iov` with the data buffers of a request.
fn translate(
    iov: &mut Iov,
    chain: &Chain,
    (view, marks): (&Arc<View>, &mut Marks),
    request: &Request,
) -> Result<(), &'static str> {
    // A free slot has no buffers. The call to `clear` does not rely on that.
    iov.clear(marks);
    let (buffers, start) = match request.kind {
        Kind::Write { .. } => (chain.readable(), request::HEADER_LEN),
        _ => (chain.writable(), 0),
    };
    let in_one = request::data_in_one(buffers, start, request.data_len);
    let added = match in_one {
        Some((addr, len)) => iov.push(view, addr, len),
        None => translate_pieces(iov, view, buffers, start, request.data_len),
    };
    added.map_err(|_| "data buffer is not in guest memory")
}

/// Fills `iov` with data in several buffers, or in one that also has other bytes.
#[inline(never)]
fn translate_pieces(
    iov: &mut Iov,
    view: &Arc<View>,
    buffers: &[Buffer],
    start: u64,
    len: u64,
) -> Result<(), Unmapped> {
    request::data(buffers, start, len).try_for_each(|(addr, len)| iov.push(view, addr, len))
}

impl Queue {
    /// Starts a request from the ring, or does other work by turns with that. The error is the reason for
    /// which neither is possible.
    #[inline(always)]
    fn turn(&mut self, context: &mut Context<'_>, budget: u32, polled: &mut Polled) -> Result<(), End> {
        if self.other_work.is_due && self.do_other_work(context, budget, &mut polled.cost)? {
            return Ok(());
        }
        // A waiting request may need a buffer or a range that other requests hold. Then new requests can
        // start beside it. But if the engine is full, the waiting request goes before all requests in the
        // ring.
        let slot = match self.slots.next() {
            Some(slot) if self.waiting.is_empty() || self.has_room(context) => slot,
            // The prepared request may be in the only slot.
            _ if self.prepared.is_some() => {
                self.start_prepared(context);
                return Ok(());
            }
            _ => return Err(End::Full),
        };
        // Requests that an earlier process began are finished even when no new ones may start.
        if budget == 0 && self.resubmissions() == 0 {
            return Err(End::Empty);
        }
        if let Some(wait_ns) = self.held_ns
            && let Some(end) = self.hold(wait_ns)
        {
            return Err(end);
        }
        let popped = self.vring.pop(&mut self.chain);
        if self.vring.has_cost() {
            polled.cost = polled.cost.saturating_add(self.vring.take_cost());
        }
        if !popped {
            return Err(if self.vring.take_unfinished() { End::Budget } else { End::Empty });
        }
        polled.served += 1;
        polled.cost = polled.cost.saturating_add(self.begin(context, slot));
        Ok(())
    }

    /// Returns the event to wait for after a poll that has ended so.
    fn next_after(&self, context: &Context<'_>, end: End) -> Next {
        // A poll runs steps, and nothing else does.
        if matches!(end, End::Budget) || !self.other_work.steps.is_empty() {
            return Next::More;
        }
        if let Some(wait_ns) = self.time_to_cancel(context) {
            return Next::Throttled { wait_ns };
        }
        // Nothing wakes the queue when the device goes on, so it looks by itself.
        if !self.kept.slots.is_empty() {
            return Next::Throttled { wait_ns: PAUSE_NS };
        }
        // Operations for tables wait for room in the engine, as requests do.
        let waits = !self.waiting.is_empty() || self.attached.is_due();
        match end {
            End::Empty if waits => Next::Waiting,
            End::Empty => Next::Idle,
            // A completion lets a waiting request go on before the limit does.
            End::Halted { wait_ns } if !waits && self.other_work.over_budget.is_none() => {
                Next::Throttled { wait_ns }
            }
            _ => Next::Blocked,
        }
    }

    /// Ends requests that wait for a remote server within a bounded time.
    fn limit_remote_waits(&self) {
        if self.in_flight() > 0 {
            self.disk.limit_remote_waits();
        }
    }
}

impl QueueTask for Queue {
    fn vring(&mut self) -> &mut Vring {
        &mut self.vring
    }

    fn attach(&mut self, engine: &mut Engine) -> io::Result<()> {
        self.attached = self.disk.attach(engine).map_err(io::Error::other)?;
        // The task of a disk that is handed over is made before the counts arrive.
        self.lost_writes = self.disk.lost_writes_seen(self.vring.index());
        Ok(())
    }

    fn detach(&mut self, engine: &mut Engine) {
        self.disk.detach(engine, std::mem::take(&mut self.attached));
        self.shared.failures.log_suppressed(self.vring.span());
        self.log_left();
    }

    fn poll(&mut self, context: &mut Context<'_>, budget: u32) -> Polled {
        self.bounds.size = self.disk.size();
        self.meter.begin(context.now_ns);
        self.vring.begin_beside(context.served_others);
        self.held_ns = match budget > 0 && self.shared.halt.is_set() {
            true => Some(PAUSE_NS),
            false => self.vring.held_ns(),
        };
        if !self.kept.slots.is_empty() {
            self.continue_kept(context);
        }
        if self.leaves_unfinished() {
            self.cancel_unfinished(context);
        }
        // Charged at the end, so that requests that wait do not keep new ones from the budget.
        let tries = !self.waiting.is_empty() && (budget == 0 || context.tries_waiting());
        let retried = if tries { self.retry(context) } else { 0 };
        let mut polled = Polled { served: 0, cost: 0, next: Next::More };
        let limit = if budget == 0 { LEAVING_COST } else { budget };
        let end = loop {
            if polled.cost >= limit {
                break End::Budget;
            }
            match self.turn(context, budget, &mut polled) {
                Ok(()) => {}
                // Steps go on without requests from the ring.
                Err(End::Empty | End::Full) if budget > 0 && !self.other_work.steps.is_empty() => {}
                Err(end) => break end,
            }
        };
        self.start_prepared(context);
        polled.cost = polled.cost.saturating_add(self.other_work.take_cost()).saturating_add(retried);
        self.submit_table_ops(context);
        polled.next = self.next_after(context, end);
        self.vring.publish();
        self.meter.published(context);
        // A request in several pieces may have started another piece, which this has to limit too.
        if self.stop.leave.is_some() {
            self.limit_remote_waits();
        }
        polled
    }

    fn complete(&mut self, context: &mut Context<'_>, completions: &mut Vec<Completion>) -> bool {
        self.meter.begin(context.now_ns);
        for completion in completions.drain(..) {
            let slot = completion.token.slot;
            if slot >= TABLE_OP_SLOTS {
                self.for_tables(context, |disk, io_context| disk.resume_table_op(io_context, completion));
                continue;
            }
            let step =
                self.on_disk(context, slot, |disk, io_context, io| disk.resume(io_context, io, completion));
            self.take_step(slot, step);
        }
        self.submit_table_ops(context);
        self.vring.publish();
        self.meter.published(context);
        // A request may run in further steps after its operation. Only a poll runs them.
        let has_requests = !self.waiting.is_empty()
            || !self.other_work.steps.is_empty()
            || self.other_work.over_budget.is_some();
        let has_waiting = has_requests || !self.kept.slots.is_empty() || self.attached.is_due();
        // Between two polls, a queue that waits to cancel its requests may have got its last completion.
        has_waiting || self.stop.cancels()
    }

    fn in_flight(&self) -> usize {
        self.slots.in_flight() + self.resubmissions() + self.attached.in_flight()
    }

    fn kept(&self) -> usize {
        self.kept.slots.len()
    }

    fn stopping(&mut self, leave: Leave) {
        self.stop.leave = Some(leave);
        self.limit_remote_waits();
    }

    fn traffic(&self) -> Option<Traffic> {
        Some(Traffic::Requests)
    }

    fn memory_changed(&mut self) {
        let (view, marks) = self.vring.memory();
        self.slots.each_free(|slot| slot.unpin_unless((view, marks)));
    }
}
