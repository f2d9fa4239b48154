//! Runs a device on a real ring: the driver, the queue and the worker's loop, all in one thread.
#![allow(dead_code, reason = "each test program uses a part of it")]
#![allow(unreachable_pub, reason = "a test program has no outside")]

use kickless_blk::{Blk, Options};
use kickless_device::{
    Call, Clock, Context, Device, Driver, Leave, Next, Position, QueueTask, Update, Vring, VringParts,
};
use kickless_disk::{Disk, DiskSpec};
use kickless_io::{Engine, EngineKind, Waker};
use kickless_memory::{Area, Gpa, Inflight, Map, Marks, View};
use kickless_spec::blk::{self, BlkFeatures, CONFIG_WRITEBACK, Header, Segment};
use kickless_spec::features::Features;
use kickless_spec::vhost_user::inflight_region_len;
use kickless_testing::{GuestRing, guest_memory, memfd, vring_parts};
use kickless_virtqueue::driver::{Buffer, Completer, Submitter, Table};
use kickless_virtqueue::{Chain, device};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::retry_on_intr;
use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use zerocopy::IntoBytes;

/// The longest sleep. A longer one means that nothing will ever happen.
const STUCK: Timespec = Timespec { tv_sec: 120, tv_nsec: 0 };

pub const SIZE: u16 = 256;
/// The memory of the requests: this many bytes for each.
const REQUEST_AREA: u64 = GuestRing::BUFFERS;
const REQUEST_BYTES: u64 = 0x1_0000;
pub const MEMORY: u64 = REQUEST_AREA + SIZE as u64 * REQUEST_BYTES;
/// The largest data of a request in bytes.
pub const DATA_MAX: usize = (REQUEST_BYTES - DATA) as usize;
/// The offsets in the memory of a request: an indirect table, header, status, data.
const HEADER: u64 = 0x800;
const STATUS: u64 = 0x900;
const DATA: u64 = 0x1000;
/// The value of a status byte before it is written.
pub const UNANSWERED: u8 = 0xff;

/// The two ring formats.
pub const FORMATS: [bool; 2] = [false, true];
pub const ENGINES: [EngineKind; 3] = [EngineKind::Uring, EngineKind::Aio, EngineKind::Threads];

/// A request to send, well-formed or not.
#[derive(Clone, Debug)]
pub struct TestRequest {
    pub header: Vec<u8>,
    /// The data that the device reads.
    pub out: Vec<u8>,
    /// The number of bytes of data that the device writes.
    pub len_in: usize,
    pub status: Status,
    pub data: Data,
    /// The largest size of a buffer in bytes. Longer ones are split.
    pub cut: usize,
    /// Leaves a gap after each buffer, as long as the buffer, so that no two buffers become one piece.
    pub apart: bool,
}

/// The place of the status byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    There,
    /// There is no status byte.
    Missing,
    /// In a buffer that the device may only read.
    Readable,
    Outside,
}

/// The place of the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    There,
    Outside,
    /// The second half is outside of memory.
    Straddles,
}

impl TestRequest {
    pub fn new(kind: u32, sector: u64, out: &[u8], len_in: usize) -> Self {
        let header = Header { kind: kind.into(), reserved: 0.into(), sector: sector.into() };
        let header = header.as_bytes().to_vec();
        Self {
            header,
            out: out.to_vec(),
            len_in,
            status: Status::There,
            data: Data::There,
            cut: usize::MAX,
            apart: false,
        }
    }

    pub fn read(sector: u64, len: usize) -> Self {
        Self::new(blk::T_IN, sector, &[], len)
    }

    pub fn write(sector: u64, bytes: &[u8]) -> Self {
        Self::new(blk::T_OUT, sector, bytes, 0)
    }

    pub fn flush() -> Self {
        Self::new(blk::T_FLUSH, 0, &[], 0)
    }

    /// Makes a request on ranges: first sector, number of sectors, flags.
    pub fn on_ranges(kind: u32, ranges: &[(u64, u32, u32)]) -> Self {
        let segments: Vec<Segment> = ranges
            .iter()
            .map(|&(sector, num_sectors, flags)| Segment {
                sector: sector.into(),
                num_sectors: num_sectors.into(),
                flags: flags.into(),
            })
            .collect();
        Self::new(kind, 0, segments.as_bytes(), 0)
    }
}

/// The result of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub status: u8,
    pub data: Vec<u8>,
    /// The number of bytes that the device says it wrote.
    pub used: u32,
}

pub struct Rig {
    pub device: Arc<Blk>,
    task: Box<dyn QueueTask>,
    pub engine: Engine,
    waker: Waker,
    pub clock: Clock,
    /// The time when a request was sent last.
    now_ns: u64,
    pub view: Arc<View>,
    submitter: Submitter,
    completer: Completer,
    tables: Area,
    sent: HashMap<u16, TestRequest>,
    pub answers: HashMap<u16, Answer>,
    /// The queue must not be polled before something changes.
    blocked: bool,
    pub last: Next,
    /// The cost of all polls.
    pub cost: u32,
    size: u16,
}

impl Drop for Rig {
    fn drop(&mut self) {
        if self.sent.is_empty() {
            self.finish_operations();
            self.task.detach(&mut self.engine);
        }
    }
}

pub fn open(spec: &DiskSpec) -> Disk {
    Disk::open(spec, &kickless_disk::Options::default()).unwrap()
}

pub fn faulty(rules: &str, under: DiskSpec) -> Disk {
    open(&DiskSpec::Fault(rules.parse().unwrap(), Box::new(under)))
}

/// Returns whether the driver was called since the last check.
pub fn is_called(calls: &OwnedFd) -> bool {
    rustix::io::read(calls, &mut [0; 8]).is_ok()
}

pub fn blk(disk: Disk) -> Arc<Blk> {
    let options = Options { serial: "rig".to_owned(), queues_max: 4, queue_size_max: SIZE, lock: false };
    let device = Arc::new(Blk::new(disk, options));
    device.reset(Driver::Fresh);
    device
}

/// The number of the task.
const TASK: u32 = 5;

/// Returns the context of a call of the task, at the time of the last change of the ring.
fn context<'a>(engine: &'a mut Engine, waker: &'a Waker, (clock, now_ns): (Clock, u64)) -> Context<'a> {
    Context {
        engine,
        task: TASK,
        waker,
        far_side_due: true,
        clock,
        now_ns,
        served_others: 0,
        neighbours: None,
    }
}

impl Rig {
    /// Starts a queue with all features of the device except `without`.
    pub fn start(
        device: &Arc<Blk>,
        kind: EngineKind,
        depth: u32,
        packed: bool,
        without: BlkFeatures,
    ) -> Self {
        Self::start_as(device, 0, (kind, depth), packed, without, SIZE)
    }

    /// Starts the queue with this index.
    pub fn start_queue(device: &Arc<Blk>, index: u16, kind: EngineKind) -> Self {
        Self::start_as(device, index, (kind, 8), false, BlkFeatures::empty(), SIZE)
    }

    /// Starts the queue with this index, with a ring of this size, at most [`SIZE`].
    pub fn start_as(
        device: &Arc<Blk>,
        index: u16,
        (kind, depth): (EngineKind, u32),
        packed: bool,
        without: BlkFeatures,
        size: u16,
    ) -> Self {
        let make = if packed { device::Options::packed } else { device::Options::new };
        let memory = guest_memory(MEMORY, GuestRing::USER);
        let ring = GuestRing::new(memory, make(size, false, true).unwrap());
        let vring = Vring::new(VringParts { index, ..ring.parts() }).unwrap();
        let features = device.features() & !Features::from_bits_retain(without.bits());
        let mut task = device.start_queue(vring, features).unwrap();
        let mut engine = Engine::open(kind, depth).unwrap();
        task.attach(&mut engine).unwrap();
        task.vring().disarm();
        Self {
            device: device.clone(),
            task,
            engine,
            waker: Waker::of_worker().unwrap().of_task(TASK),
            clock: Clock::start(),
            now_ns: 0,
            tables: ring.buffers(),
            view: ring.view,
            submitter: ring.submitter,
            completer: ring.completer,
            sent: HashMap::new(),
            answers: HashMap::new(),
            blocked: false,
            last: Next::Idle,
            cost: 0,
            size,
        }
    }

    pub fn set_writeback(&self, on: bool) {
        self.device.write_config(CONFIG_WRITEBACK, &[on.into()]).unwrap();
    }

    /// Puts a request into the ring and returns its id.
    pub fn send(&mut self, request: TestRequest) -> u16 {
        let id = self.submitter.next_id().expect("the ring is full");
        let base = REQUEST_AREA + u64::from(id) * REQUEST_BYTES;
        let write =
            |at: u64, bytes: &[u8]| self.view.write(Gpa(base + at), bytes, &mut Marks::off()).unwrap();
        write(HEADER, &request.header);
        write(STATUS, &[UNANSWERED]);
        write(DATA, &request.out);
        if request.out.is_empty() {
            write(DATA, &vec![0xee; request.len_in]);
        }
        let data_at = |len: usize| match request.data {
            Data::There => base + DATA,
            Data::Outside => MEMORY + 4096,
            Data::Straddles => MEMORY - len as u64 / 2,
        };
        let mut buffers = Vec::new();
        let mut add = |addr: u64, len: usize, writable| {
            for start in (0..len).step_by(request.cut) {
                let len = request.cut.min(len - start) as u32;
                let at = if request.apart { 2 * start } else { start };
                buffers.push(Buffer { addr: addr + at as u64, len, writable });
            }
        };
        add(base + HEADER, request.header.len(), false);
        add(data_at(request.out.len()), request.out.len(), false);
        if request.status == Status::Readable {
            add(base + STATUS, 1, false);
        }
        add(data_at(request.len_in), request.len_in, true);
        match request.status {
            Status::There => add(base + STATUS, 1, true),
            Status::Outside => add(MEMORY, 1, true),
            Status::Missing | Status::Readable => {}
        }
        // The table must fit before the header.
        assert!(buffers.len() <= 128, "too many buffers for a table");
        let offset = (base - REQUEST_AREA) as usize;
        let crowded = buffers.len() > 4.min(self.size.into()) || self.sent.len() >= 32;
        let table = crowded.then_some(Table { area: &self.tables, offset, addr: base });
        assert_eq!(self.submitter.add(&buffers, table), Ok(id));
        let _ = self.submitter.publish();
        self.now_ns = self.clock.now();
        self.sent.insert(id, request);
        id
    }

    pub fn in_flight(&self) -> usize {
        self.sent.len()
    }

    /// Starts the queue again with an in-flight buffer, which this returns. Nothing may have been sent.
    pub fn track(&mut self, packed: bool) -> Inflight {
        let region = inflight_region_len(packed, self.size);
        let buffer = Inflight::map(memfd(region as u64), 0, region as u64).unwrap();
        self.restart_with(&buffer, packed);
        buffer
    }

    /// Starts the queue again, as another process does that gets this buffer. The queue must have stopped.
    pub fn restart_with(&mut self, buffer: &Inflight, packed: bool) {
        let region = inflight_region_len(packed, self.size);
        let make = if packed { device::Options::packed } else { device::Options::new };
        let options = make(self.size, false, true).unwrap();
        let parts = vring_parts(&self.view, options, GuestRing::addresses());
        self.task.detach(&mut self.engine);
        // The index that the front-end passes on.
        let next_avail = self.task.vring().stop().next_avail;
        let vring =
            Vring::new(VringParts { inflight: buffer.records(0, region), next_avail, ..parts }).unwrap();
        self.task = self.device.start_queue(vring, self.device.features()).unwrap();
        self.task.attach(&mut self.engine).unwrap();
        self.task.vring().disarm();
    }

    /// Parks the queue, whose requests in flight are all kept.
    pub fn park(&mut self) -> Position {
        self.poll_with(0);
        assert_eq!(self.task.in_flight(), self.task.kept());
        self.task.return_credit();
        let position = self.task.vring().position();
        self.task.detach(&mut self.engine);
        position
    }

    /// Lets a parked queue go on.
    pub fn unpark(&mut self) {
        self.task.attach(&mut self.engine).unwrap();
        self.task.vring().disarm();
    }

    /// Makes the task of a device that takes the parked queue over.
    pub fn task_of(&self, device: &Arc<Blk>, position: &Position, packed: bool) -> Box<dyn QueueTask> {
        let make = if packed { device::Options::packed } else { device::Options::new };
        let options = make(self.size, false, true).unwrap();
        let parts = vring_parts(&self.view, options, GuestRing::addresses());
        let vring = Vring::new(VringParts { next_avail: position.next_avail, ..parts }).unwrap();
        device.start_queue(vring, device.features()).unwrap()
    }

    /// Goes on with this task, which takes the parked queue over.
    pub fn go_on_with(&mut self, device: &Arc<Blk>, task: Box<dyn QueueTask>) {
        (self.device, self.task) = (device.clone(), task);
        self.unpark();
    }

    /// Stops the queue, which leaves what it does not finish in this time. Returns the number of requests
    /// that it has left.
    pub fn stop_and_leave(&mut self, after: std::time::Duration) -> u16 {
        self.task.stopping(Leave::Unfinished);
        self.poll_with(0);
        self.pass(after);
        while self.task.in_flight() > 0 {
            self.poll_with(0);
            self.engine.submit().unwrap();
            if self.operations() > 0 {
                self.complete();
            }
        }
        self.take_answers();
        self.task.vring().stop().left
    }

    /// Starts the queue of a split ring again, after an earlier process popped all requests and was killed.
    pub fn restart_after_kill(&mut self) {
        let region = inflight_region_len(false, self.size);
        let buffer = Inflight::map(memfd(region as u64), 0, region as u64).unwrap();
        let options = device::Options::new(self.size, false, true).unwrap();
        let vring = || {
            let inflight = buffer.records(0, region);
            let parts = vring_parts(&self.view, options, GuestRing::addresses());
            Vring::new(VringParts { inflight, ..parts }).unwrap()
        };
        let (mut killed, mut chain) = (vring(), Chain::default());
        while killed.pop(&mut chain) {}
        drop(killed);
        let mut task = self.device.start_queue(vring(), self.device.features()).unwrap();
        self.task.detach(&mut self.engine);
        task.attach(&mut self.engine).unwrap();
        task.vring().disarm();
        assert_eq!(task.in_flight(), self.sent.len());
        self.task = task;
    }

    /// Returns a new descriptor on which the driver is called from now on.
    pub fn calls(&mut self) -> OwnedFd {
        let calls = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let call = Call::new(calls.try_clone().unwrap()).unwrap();
        self.task.vring().apply(Update::Call(Some(call)));
        // The driver is called at once when the descriptor changes.
        assert!(is_called(&calls));
        calls
    }

    /// Replaces the guest's memory by another view of the same memory.
    pub fn change_memory(&mut self) {
        self.view = Arc::new(View::new(Map::new(self.view.map().slots().to_vec()).unwrap()));
        self.task.vring().apply(Update::Memory(self.view.clone()));
        self.task.memory_changed();
    }

    /// Waits for completions and passes them to the queue. Returns the number of answers, and whether the
    /// queue has other requests to continue.
    pub fn complete(&mut self) -> (usize, bool) {
        let mut completions = Vec::new();
        while completions.is_empty() {
            self.engine.submit().unwrap();
            self.engine.reap(&mut completions);
        }
        let mut context = context(&mut self.engine, &self.waker, (self.clock, self.now_ns));
        let waits = self.task.complete(&mut context, &mut completions);
        self.blocked = false;
        (self.take_answers(), waits)
    }

    /// Lets this time pass on the clock of the queue.
    pub fn pass(&mut self, time: std::time::Duration) {
        self.now_ns += time.as_nanos() as u64;
    }

    /// Lets the queue limit the waits of its requests, as a worker does that stops it.
    pub fn limit_waits(&mut self) {
        self.task.stopping(Leave::Nothing);
    }

    /// Returns the number of requests that the queue has.
    pub fn queue_in_flight(&self) -> usize {
        self.task.in_flight()
    }

    /// Returns the number of operations that the engine has.
    pub fn operations(&self) -> usize {
        self.engine.in_flight()
    }

    /// Waits for the operations that the disk has of its own, as a worker does before it detaches a task.
    fn finish_operations(&mut self) {
        while self.sent.is_empty() && self.task.in_flight() > 0 {
            self.run_once();
        }
    }

    /// Stops the queue. Returns its engine, which goes on, and the guest's memory.
    pub fn detach(mut self) -> (Engine, Arc<View>) {
        self.finish_operations();
        self.task.detach(&mut self.engine);
        let other = Engine::open(EngineKind::Threads, 1).unwrap();
        (std::mem::replace(&mut self.engine, other), self.view.clone())
    }

    /// Returns the number of failed requests.
    pub fn errors(&mut self) -> u64 {
        self.task.vring().counters().errors.get()
    }

    /// Polls the queue once. Returns the number of requests that it took.
    pub fn poll(&mut self) -> u32 {
        self.poll_with(1000)
    }

    /// Polls the queue once with this budget.
    pub fn poll_with(&mut self, budget: u32) -> u32 {
        self.poll_as(budget, true)
    }

    /// Polls the queue once, as a worker does that spins and has seen no event of it.
    pub fn poll_spinning(&mut self) -> u32 {
        self.poll_as(1000, false)
    }

    fn poll_as(&mut self, budget: u32, far_side_due: bool) -> u32 {
        let mut context = context(&mut self.engine, &self.waker, (self.clock, self.now_ns));
        context.far_side_due = far_side_due;
        let polled = self.task.poll(&mut context, budget);
        self.last = polled.next;
        self.cost += polled.cost;
        self.blocked = polled.next == Next::Blocked;
        polled.served
    }

    /// Waits until something wakes the task.
    pub fn wait_woken(&self) {
        let mut fds = [PollFd::from_borrowed_fd(self.waker.as_fd(), PollFlags::IN)];
        assert_eq!(retry_on_intr(|| poll(&mut fds, Some(&STUCK))), Ok(1), "nothing wakes the task");
    }

    /// Takes the wakes of the task, as its worker does.
    pub fn take_wakes(&self) {
        assert!(self.waker.clear());
        self.waker.take_woken(TASK as usize + 1, |task| assert_eq!(task, TASK));
    }

    /// Runs the worker's loop once. Sleeps if nothing can go on. Does no more than the contract of a task
    /// requires.
    pub fn run_once(&mut self) {
        let mut moved = self.waker.clear();
        let served = if self.blocked { 0 } else { self.poll() };
        self.engine.submit().unwrap();
        let (mut with_room, mut completions) = (Vec::new(), Vec::new());
        self.engine.reap(&mut completions);
        self.engine.take_sources_with_room(&mut with_room);
        moved |= !with_room.is_empty();
        if !completions.is_empty() {
            moved = true;
            let mut context = context(&mut self.engine, &self.waker, (self.clock, self.now_ns));
            self.task.complete(&mut context, &mut completions);
            self.engine.submit().unwrap();
        }
        if moved {
            self.blocked = false;
        }
        let answered = self.take_answers();
        // The queue asks for another poll, so nothing will wake the loop.
        moved |= self.last == Next::More;
        if !moved && served == 0 && answered == 0 && !self.engine.needs_turn() && self.task.in_flight() > 0 {
            let mut fds = [self.engine.event(), self.waker.as_fd()]
                .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            let ready = retry_on_intr(|| poll(&mut fds, Some(&STUCK))).unwrap();
            assert!(ready > 0, "nothing completes: {:?}", self.sent.keys());
        }
    }

    pub fn take_answers(&mut self) -> usize {
        let mut count = 0;
        while let Some(done) = self.completer.pop().expect("the device broke the ring") {
            let request = self.sent.remove(&done.id).expect("a head came back that is not in flight");
            let base = REQUEST_AREA + u64::from(done.id) * REQUEST_BYTES;
            let (mut status, mut data) = ([0], vec![0; request.len_in]);
            self.view.read(Gpa(base + STATUS), &mut status).unwrap();
            if request.data == Data::There {
                self.view.read(Gpa(base + DATA), &mut data).unwrap();
            }
            let answer = Answer { status: status[0], data, used: done.len };
            self.answers.insert(done.id, answer);
            self.completer.give_back(done.id);
            count += 1;
        }
        count
    }

    /// Returns the current status byte of a request.
    pub fn status_now(&self, id: u16) -> u8 {
        let mut status = [0];
        self.view.read(Gpa(REQUEST_AREA + u64::from(id) * REQUEST_BYTES + STATUS), &mut status).unwrap();
        status[0]
    }

    /// Returns the number of requests that have been answered.
    pub fn answered(&mut self) -> usize {
        self.take_answers();
        self.answers.len()
    }

    /// Runs the loop until nothing is in flight. Returns the answers.
    pub fn finish(&mut self) -> HashMap<u16, Answer> {
        while !self.sent.is_empty() {
            self.run_once();
        }
        self.finish_operations();
        assert_eq!(self.task.in_flight(), 0);
        assert!(!self.task.vring().is_broken());
        std::mem::take(&mut self.answers)
    }

    /// Runs one request and returns its answer.
    pub fn run(&mut self, request: TestRequest) -> Answer {
        let id = self.send(request);
        self.finish().remove(&id).unwrap()
    }

    pub fn status(&mut self, request: TestRequest) -> u8 {
        self.run(request).status
    }

    /// Reads these sectors.
    pub fn contents(&mut self, sectors: Range<u64>) -> Vec<u8> {
        let mut bytes = Vec::new();
        let step = DATA_MAX as u64 / 512;
        for start in sectors.clone().step_by(step as usize) {
            let len = (sectors.end - start).min(step) * 512;
            let answer = self.run(TestRequest::read(start, len as usize));
            assert_eq!(answer.status, blk::S_OK);
            bytes.extend(answer.data);
        }
        bytes
    }
}
