//! A device on a real ring, with a driver and a worker's turn, in one thread.
#![allow(dead_code, reason = "each test program uses a part of it")]
#![allow(unreachable_pub, reason = "a test program has no outside")]

use kickless_blk::{Blk, Options};
use kickless_device::{Call, Context, Device, Next, Parts, QueueTask, Update, Vring};
use kickless_disk::{Disk, DiskSpec};
use kickless_io::{CompletionMode, Engine, EngineKind, EngineOptions, Waker};
use kickless_memory::{Area, Gpa, Map, Marks, View};
use kickless_spec::blk::{self, BlkFeatures, CONFIG_WRITEBACK, Header, Segment};
use kickless_spec::features::Features;
use kickless_testing::{GuestRing, guest_memory};
use kickless_virtqueue::device;
use kickless_virtqueue::driver::{Buffer, Completer, Submitter, Table};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::retry_on_intr;
use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Nothing takes so long, on any machine: what sleeps longer sleeps for ever.
const STUCK: Timespec = Timespec { tv_sec: 120, tv_nsec: 0 };

pub const SIZE: u16 = 256;
/// Memory of requests, so much for each.
const PLACES: u64 = GuestRing::BUFFERS;
const PLACE: u64 = 0x1_0000;
pub const MEMORY: u64 = PLACES + SIZE as u64 * PLACE;
/// Most bytes of data of one request.
pub const DATA_MAX: usize = (PLACE - DATA) as usize;
/// Within a place: an indirect table, header, status, data.
const HEADER: u64 = 0x800;
const STATUS: u64 = 0x900;
const DATA: u64 = 0x1000;
/// What a status is before it is written.
pub const UNANSWERED: u8 = 0xff;

/// The two ring formats.
pub const FORMATS: [bool; 2] = [false, true];
pub const ENGINES: [EngineKind; 3] = [EngineKind::Uring, EngineKind::Aio, EngineKind::Threads];

/// Every engine, in each way that it can work.
pub fn ways(depth: u32) -> Vec<EngineOptions> {
    let plain = |kind| EngineOptions::new(kind, depth);
    let by_thread = |kind| EngineOptions { completion: CompletionMode::Thread, ..plain(kind) };
    let mut ways: Vec<_> = ENGINES.into_iter().map(plain).collect();
    ways.extend([EngineKind::Uring, EngineKind::Aio].map(by_thread));
    ways.push(EngineOptions { sqpoll: true, ..plain(EngineKind::Uring) });
    ways.push(EngineOptions { fixed_buffers: true, ..plain(EngineKind::Uring) });
    ways
}

/// A request, well-formed or not.
#[derive(Clone, Debug)]
pub struct Ask {
    pub header: Vec<u8>,
    /// Data that the device reads.
    pub out: Vec<u8>,
    /// Bytes of data that the device writes.
    pub len_in: usize,
    pub status: Status,
    pub data: Data,
    /// Bytes of each buffer at most, whatever is in it.
    pub cut: usize,
    /// There is a gap as long as the buffer after each, so that no two become one piece.
    pub apart: bool,
}

/// Where the status byte is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    There,
    /// Not at all.
    Nowhere,
    /// In a buffer that the device only reads.
    Readable,
    /// Outside of memory.
    Outside,
}

/// Where the data is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    There,
    /// Outside of memory.
    Outside,
    /// Its second half is.
    Straddles,
}

impl Ask {
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

    /// Of ranges: first sector, sectors, flags.
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

/// What came of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub status: u8,
    pub data: Vec<u8>,
    /// Bytes that the device says it wrote.
    pub used: u32,
}

pub struct Rig {
    pub device: Arc<Blk>,
    task: Box<dyn QueueTask>,
    pub engine: Engine,
    waker: Waker,
    pub view: Arc<View>,
    submitter: Submitter,
    completer: Completer,
    tables: Area,
    asked: HashMap<u16, Ask>,
    pub answers: HashMap<u16, Answer>,
    /// It is not to be polled before something changes.
    blocked: bool,
    pub last: Next,
    /// The cost of all looks.
    pub cost: u32,
    size: u16,
}

impl Drop for Rig {
    fn drop(&mut self) {
        if self.asked.is_empty() {
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

/// Whether the driver has been called since this was asked last.
pub fn is_called(calls: &OwnedFd) -> bool {
    rustix::io::read(calls, &mut [0; 8]).is_ok()
}

pub fn blk(disk: Disk) -> Arc<Blk> {
    let options = Options { serial: "rig".to_owned(), queues_max: 4, queue_size_max: SIZE, lock: false };
    let device = Arc::new(Blk::new(disk, options));
    device.reset();
    device
}

impl Rig {
    /// All that the device offers is negotiated, but for `without`.
    pub fn start(
        device: &Arc<Blk>,
        kind: EngineKind,
        depth: u32,
        packed: bool,
        without: BlkFeatures,
    ) -> Self {
        Self::start_with(device, EngineOptions::new(kind, depth), packed, without)
    }

    /// With an engine that has something out of the ordinary.
    pub fn start_with(device: &Arc<Blk>, options: EngineOptions, packed: bool, without: BlkFeatures) -> Self {
        Self::start_sized(device, options, packed, without, SIZE)
    }

    /// The queue with this index.
    pub fn start_queue(device: &Arc<Blk>, index: u16, kind: EngineKind) -> Self {
        Self::start_as(device, index, EngineOptions::new(kind, 8), false, BlkFeatures::empty(), SIZE)
    }

    /// With a ring of this size, [`SIZE`] at most.
    pub fn start_sized(
        device: &Arc<Blk>,
        options: EngineOptions,
        packed: bool,
        without: BlkFeatures,
        size: u16,
    ) -> Self {
        Self::start_as(device, 0, options, packed, without, size)
    }

    fn start_as(
        device: &Arc<Blk>,
        index: u16,
        options: EngineOptions,
        packed: bool,
        without: BlkFeatures,
        size: u16,
    ) -> Self {
        let make = if packed { device::Options::packed } else { device::Options::new };
        let memory = guest_memory(MEMORY, GuestRing::USER);
        let ring = GuestRing::new(memory, make(size, false, true).unwrap());
        let vring = Vring::new(Parts { index, ..ring.parts() }).unwrap();
        let features = device.features() & !Features::from_bits_retain(without.bits());
        let mut task = device.start_queue(vring, features).unwrap();
        let mut engine = Engine::open_with(options).unwrap();
        task.attach(&mut engine).unwrap();
        task.vring().disarm();
        Self {
            device: device.clone(),
            task,
            engine,
            waker: Waker::new().unwrap(),
            tables: ring.buffers(),
            view: ring.view,
            submitter: ring.submitter,
            completer: ring.completer,
            asked: HashMap::new(),
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

    /// Puts a request into the ring. It is known by what this returns.
    pub fn ask(&mut self, ask: Ask) -> u16 {
        let id = self.submitter.next_id().expect("the ring is full");
        let base = PLACES + u64::from(id) * PLACE;
        let write =
            |at: u64, bytes: &[u8]| self.view.write(Gpa(base + at), bytes, &mut Marks::off()).unwrap();
        write(HEADER, &ask.header);
        write(STATUS, &[UNANSWERED]);
        write(DATA, &ask.out);
        if ask.out.is_empty() {
            write(DATA, &vec![0xee; ask.len_in]);
        }
        let data_at = |len: usize| match ask.data {
            Data::There => base + DATA,
            Data::Outside => MEMORY + 4096,
            Data::Straddles => MEMORY - len as u64 / 2,
        };
        let mut buffers = Vec::new();
        let mut add = |addr: u64, len: usize, writable| {
            for start in (0..len).step_by(ask.cut) {
                let len = ask.cut.min(len - start) as u32;
                let at = if ask.apart { 2 * start } else { start };
                buffers.push(Buffer { addr: addr + at as u64, len, writable });
            }
        };
        add(base + HEADER, ask.header.len(), false);
        add(data_at(ask.out.len()), ask.out.len(), false);
        if ask.status == Status::Readable {
            add(base + STATUS, 1, false);
        }
        add(data_at(ask.len_in), ask.len_in, true);
        match ask.status {
            Status::There => add(base + STATUS, 1, true),
            Status::Outside => add(MEMORY, 1, true),
            Status::Nowhere | Status::Readable => {}
        }
        // As many as fit into the place before its header.
        assert!(buffers.len() <= 128, "too many buffers for a table");
        let offset = (base - PLACES) as usize;
        let crowded = buffers.len() > 4.min(self.size.into()) || self.asked.len() >= 32;
        let table = crowded.then_some(Table { area: &self.tables, offset, addr: base });
        assert_eq!(self.submitter.add(&buffers, table), Ok(id));
        let _ = self.submitter.publish();
        self.asked.insert(id, ask);
        id
    }

    pub fn in_flight(&self) -> usize {
        self.asked.len()
    }

    /// Where the driver is called from now on.
    pub fn calls(&mut self) -> OwnedFd {
        let calls = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let call = Call::new(calls.try_clone().unwrap()).unwrap();
        self.task.vring().apply(Update::Call(Some(call)));
        // That there is another is told at once.
        assert!(is_called(&calls));
        calls
    }

    /// The guest's memory is another view of the same from now on.
    pub fn change_memory(&mut self) {
        self.view = Arc::new(View::new(Map::new(self.view.map().slots().to_vec()).unwrap()));
        self.task.vring().apply(Update::Memory(self.view.clone()));
        self.task.memory_changed(&mut self.engine);
    }

    /// Waits for completions, and hands them over. How many answers there are then, and whether the queue has others to go on with.
    pub fn complete(&mut self) -> (usize, bool) {
        let mut completions = Vec::new();
        while completions.is_empty() {
            self.engine.submit().unwrap();
            self.engine.reap(&mut completions);
        }
        let mut context =
            Context { engine: &mut self.engine, task: 5, waker: &self.waker, far_side_due: true };
        let waits = self.task.complete(&mut context, &mut completions);
        self.blocked = false;
        (self.take_answers(), waits)
    }

    /// The queue stops; its engine, which goes on, and the guest's memory.
    pub fn detach(mut self) -> (Engine, Arc<View>) {
        self.task.detach(&mut self.engine);
        let other = Engine::open(EngineKind::Threads, 1).unwrap();
        (std::mem::replace(&mut self.engine, other), self.view.clone())
    }

    /// Requests that failed.
    pub fn errors(&mut self) -> u64 {
        self.task.vring().counters().errors.get()
    }

    /// One look of the worker at the ring; how many requests it took.
    pub fn poll(&mut self) -> u32 {
        self.poll_with(1000)
    }

    /// The same, with another budget.
    pub fn poll_with(&mut self, budget: u32) -> u32 {
        let mut context =
            Context { engine: &mut self.engine, task: 5, waker: &self.waker, far_side_due: true };
        let polled = self.task.poll(&mut context, budget);
        self.last = polled.next;
        self.cost += polled.cost;
        self.blocked = polled.next == Next::Blocked;
        polled.served
    }

    /// Goes on with what can go on, or sleeps until something can. Keeps to what a task may rely on and no more.
    pub fn turn(&mut self) {
        let mut moved = self.waker.clear();
        let served = if self.blocked { 0 } else { self.poll() };
        self.engine.submit().unwrap();
        moved |= self.engine.take_resumed();
        let mut completions = Vec::new();
        self.engine.reap(&mut completions);
        if !completions.is_empty() {
            moved = true;
            let mut context =
                Context { engine: &mut self.engine, task: 5, waker: &self.waker, far_side_due: true };
            self.task.complete(&mut context, &mut completions);
            self.engine.submit().unwrap();
        }
        if moved {
            self.blocked = false;
        }
        let answered = self.take_answers();
        // It goes on without being told.
        moved |= self.last == Next::More;
        if !moved && served == 0 && answered == 0 && !self.engine.needs_turn() && !self.asked.is_empty() {
            let mut fds = [self.engine.event(), self.waker.as_fd()]
                .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            let ready = retry_on_intr(|| poll(&mut fds, Some(&STUCK))).unwrap();
            assert!(ready > 0, "nothing goes on: {:?}", self.asked.keys());
        }
    }

    fn take_answers(&mut self) -> usize {
        let mut count = 0;
        while let Some(done) = self.completer.pop().expect("the device lies") {
            let ask = self.asked.remove(&done.id).expect("a head comes back that is not in flight");
            let base = PLACES + u64::from(done.id) * PLACE;
            let (mut status, mut data) = ([0], vec![0; ask.len_in]);
            self.view.read(Gpa(base + STATUS), &mut status).unwrap();
            if ask.data == Data::There {
                self.view.read(Gpa(base + DATA), &mut data).unwrap();
            }
            let answer = Answer { status: status[0], data, used: done.len };
            self.answers.insert(done.id, answer);
            self.completer.give_back(done.id);
            count += 1;
        }
        count
    }

    /// The status byte of a request as it is now.
    pub fn status_now(&self, id: u16) -> u8 {
        let mut status = [0];
        self.view.read(Gpa(PLACES + u64::from(id) * PLACE + STATUS), &mut status).unwrap();
        status[0]
    }

    /// How many requests have been answered.
    pub fn answered(&mut self) -> usize {
        self.take_answers();
        self.answers.len()
    }

    /// All that is in flight.
    pub fn finish(&mut self) -> HashMap<u16, Answer> {
        while !self.asked.is_empty() {
            self.turn();
        }
        assert_eq!(self.task.in_flight(), 0);
        assert!(!self.task.vring().is_broken());
        std::mem::take(&mut self.answers)
    }

    /// One request from start to end.
    pub fn run(&mut self, ask: Ask) -> Answer {
        let id = self.ask(ask);
        self.finish().remove(&id).unwrap()
    }

    pub fn status(&mut self, ask: Ask) -> u8 {
        self.run(ask).status
    }

    /// What is on the disk.
    pub fn contents(&mut self, sectors: Range<u64>) -> Vec<u8> {
        let mut bytes = Vec::new();
        let step = DATA_MAX as u64 / 512;
        for start in sectors.clone().step_by(step as usize) {
            let len = (sectors.end - start).min(step) * 512;
            let answer = self.run(Ask::read(start, len as usize));
            assert_eq!(answer.status, blk::S_OK);
            bytes.extend(answer.data);
        }
        bytes
    }
}
