//! A card on real rings, with a driver and a worker's turn, in one thread.
#![allow(dead_code, reason = "each test program uses a part of it")]
#![allow(unreachable_pub, reason = "a test program has no outside")]

use kickless_device::{
    Areas, Context, Counters, Device, Interest, Iommu, IovaAddresses, Kick, Misses, Next, Parts, Polled,
    QueueTask, Update, Vring,
};
use kickless_io::{Engine, EngineKind, Waker};
use kickless_memory::{Access, Area, Gpa, Inflight, Iotlb, Iova, IovaRange, Map, Marks, UserAddr, View};
use kickless_net::{Net, Options};
use kickless_net_port::{NullPort, Port};
use kickless_spec::features::Features;
use kickless_spec::net::{Header, NetFeatures};
use kickless_spec::vhost_user::{inflight_entry_len, inflight_head_len, inflight_region_len};
use kickless_testing::{GuestRing, guest_memory, memfd, vring_parts};
use kickless_virtqueue::device;
use kickless_virtqueue::driver::{Buffer, Completer, Submitter, Table};
use rustix::event::{PollFd, PollFlags};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::convert::Infallible;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use zerocopy::FromBytes;

const USER: u64 = GuestRing::USER;
/// Memory of chains, so much for each.
const PLACES: u64 = GuestRing::BUFFERS;
const PLACE: u64 = 0x2_0000;
/// So many pages, from there on: see [`Guest::translate_pages`].
pub const PAGES_AT: u64 = 1 << 32;
pub const PAGES: u64 = 3000;
/// The longest ring.
pub const SIZE_MAX: u16 = 128;
pub const MEMORY: u64 = PLACES + SIZE_MAX as u64 * PLACE;

/// A ring's kind.
#[derive(Clone, Copy, Debug, Default)]
pub struct Kind {
    pub packed: bool,
    pub event_idx: bool,
    pub in_order: bool,
}

/// Every kind of ring.
pub fn kinds() -> impl Iterator<Item = Kind> {
    (0..8).map(|bits| Kind { packed: bits & 1 != 0, event_idx: bits & 2 != 0, in_order: bits & 4 != 0 })
}

pub fn card(pairs_max: u16, port: NullPort) -> Arc<Net> {
    let options = Options {
        mac: Some([2, 0, 0, 0, 0, 7]),
        mtu: None,
        pairs_max,
        queue_size_max: SIZE_MAX,
        port: Port::Null(port),
    };
    let card = Arc::new(Net::new(options));
    card.reset();
    card
}

/// All that a card with these pairs offers.
pub fn all(card: &Net) -> Features {
    card.features()
}

pub fn without(card: &Net, features: NetFeatures) -> Features {
    card.features() - Features::from_bits_retain(features.bits())
}

/// The driver of one ring, and its memory.
pub struct Guest {
    pub view: Arc<View>,
    options: device::Options,
    /// The same memory as that of chains.
    tables: Area,
    /// What the front-end has told of a vIOMMU, and what it is asked.
    iommu: Option<(Iotlb, Arc<Misses>)>,
    inflight: Option<Inflight>,
    pub counters: Arc<Counters>,
    submitter: Submitter,
    completer: Completer,
    /// Chains that are with the device: their buffers.
    with_device: HashMap<u16, Vec<Buffer>>,
    /// Their ids, in the order in which they were made available.
    order: VecDeque<u16>,
    /// The device wants a kick.
    pub kick_wanted: bool,
}

/// A task on a ring.
pub struct Rig {
    guest: Guest,
    pub task: Box<dyn QueueTask>,
    engine: Engine,
    waker: Waker,
    pub last: Next,
}

impl Deref for Rig {
    type Target = Guest;

    fn deref(&self) -> &Guest {
        &self.guest
    }
}

impl DerefMut for Rig {
    fn deref_mut(&mut self) -> &mut Guest {
        &mut self.guest
    }
}

impl Guest {
    /// A ring with its driver, and its device's end.
    pub fn new(index: u16, kind: Kind, size: u16, kick: Option<Kick>) -> (Self, Vring) {
        let guest = Self::prepare(kind, size);
        let vring = guest.vring(index, guest.first(), kick);
        (guest, vring)
    }

    /// A ring with its driver.
    pub fn prepare(kind: Kind, size: u16) -> Self {
        let make = if kind.packed { device::Options::packed } else { device::Options::new };
        let options = make(size, kind.event_idx, true).unwrap().with_in_order(kind.in_order);
        Self::begin(guest_memory(MEMORY, USER), options)
    }

    /// A new driver with a new ring in the same memory.
    pub fn begin_anew(self) -> Self {
        let zeroes = vec![0; PLACES as usize];
        self.view.write(Gpa(0), &zeroes, &mut Marks::off()).unwrap();
        Self::begin(self.view, self.options)
    }

    fn begin(view: Arc<View>, options: device::Options) -> Self {
        let ring = GuestRing::new(view, options);
        Self {
            tables: ring.buffers(),
            view: ring.view,
            options,
            iommu: None,
            inflight: None,
            counters: Arc::default(),
            submitter: ring.submitter,
            completer: ring.completer,
            with_device: HashMap::new(),
            order: VecDeque::new(),
            kick_wanted: false,
        }
    }

    /// Puts the device behind a vIOMMU, which does not know any address yet.
    pub fn behind_iommu(mut self) -> Self {
        self.iommu = Some((Iotlb::default(), Arc::new(Misses::new(Waker::new().unwrap()))));
        self
    }

    /// Lets the device behind a vIOMMU have all of memory, at its own addresses.
    pub fn translate_all(&mut self) {
        let (iotlb, misses) = self.iommu.as_mut().unwrap();
        iotlb.update(Iova(0), MEMORY, UserAddr(USER), Access::BOTH).unwrap();
        misses.answered(IovaRange::new(Iova(0), MEMORY), Access::BOTH);
    }

    /// Lets the device behind a vIOMMU have the ring, and pages from [`PAGES_AT`] on that do not follow one another in
    /// memory.
    pub fn translate_pages(&mut self) {
        let (iotlb, _) = self.iommu.as_mut().unwrap();
        iotlb.update(Iova(0), PLACES, UserAddr(USER), Access::BOTH).unwrap();
        for page in 0..PAGES {
            let to = USER + PLACES + page % 2 * 2 * 4096;
            iotlb.update(Iova(PAGES_AT + page * 4096), 4096, UserAddr(to), Access::BOTH).unwrap();
        }
    }

    /// Takes all translations back. The update for the ring's task, and the channel that closes when it is in force.
    pub fn invalidate_all(&mut self) -> (Update, Receiver<Infallible>) {
        let (iotlb, _) = self.iommu.as_mut().unwrap();
        iotlb.invalidate(IovaRange::new(Iova(0), MEMORY));
        let (done, all_done) = channel();
        (Update::Invalidate(iotlb.take_stale().unwrap(), done), all_done)
    }

    /// Gives the device an in-flight buffer, which outlives it.
    pub fn with_inflight(mut self) -> Self {
        let len = inflight_region_len(self.options.is_packed(), self.options.size()) as u64;
        self.inflight = Some(Inflight::map(memfd(len), 0, len).unwrap());
        self
    }

    /// Where a ring begins.
    pub fn first(&self) -> u16 {
        if self.options.is_packed() { 1 << 15 } else { 0 }
    }

    /// The device's end of the ring, which goes on from there.
    pub fn vring(&self, index: u16, next_avail: u16, kick: Option<Kick>) -> Vring {
        let (packed, size) = (self.options.is_packed(), self.options.size());
        let len = inflight_head_len(packed) + inflight_entry_len(packed) * usize::from(size);
        let iommu = self.iommu.as_ref();
        let areas = match iommu {
            None => GuestRing::addresses(),
            Some(_) => Areas::Iova(IovaAddresses {
                desc: Iova(0),
                avail: Iova(GuestRing::AVAIL),
                used: Iova(GuestRing::USED),
                log: None,
            }),
        };
        Vring::new(Parts {
            index,
            iommu: iommu
                .map(|(iotlb, misses)| Iommu { table: iotlb.table().clone(), misses: misses.clone() }),
            next_avail,
            inflight: self.inflight.as_ref().map(|buffer| buffer.records(0, len).unwrap()),
            kick,
            counters: self.counters.clone(),
            ..vring_parts(&self.view, self.options, areas)
        })
        .unwrap()
    }

    /// Makes a chain available, with buffers of these lengths.
    pub fn offer(&mut self, lens: &[u32], writable: bool) -> Option<u16> {
        let id = self.submitter.next_id()?;
        let mut addr = PLACES + u64::from(id) * PLACE;
        let mut buffers = Vec::new();
        for &len in lens {
            buffers.push(Buffer { addr, len, writable });
            // A gap after each, so that no two become one.
            addr += u64::from(len) + 64;
        }
        assert!(addr <= PLACES + (u64::from(id) + 1) * PLACE);
        self.add(id, buffers)
    }

    /// Makes a chain available that is written, in an indirect table.
    pub fn offer_indirect(&mut self, lens: &[u32]) -> Option<u16> {
        let id = self.submitter.next_id()?;
        // The table lies in the first page of the chain's memory.
        let addr = PLACES + u64::from(id) * PLACE;
        let starts = lens.iter().scan(addr + 4096, |at, &len| {
            let addr = std::mem::replace(at, *at + u64::from(len) + 64);
            Some(Buffer { addr, len, writable: true })
        });
        let buffers: Vec<Buffer> = starts.collect();
        let table = Table { area: &self.tables, offset: (addr - PLACES) as usize, addr };
        self.submitter.add(&buffers, Some(table)).ok()?;
        Some(self.added(id, buffers))
    }

    /// Makes a chain of these buffers available.
    pub fn add(&mut self, id: u16, buffers: Vec<Buffer>) -> Option<u16> {
        self.submitter.add(&buffers, None).ok()?;
        Some(self.added(id, buffers))
    }

    fn added(&mut self, id: u16, buffers: Vec<Buffer>) -> u16 {
        self.kick_wanted |= self.submitter.publish();
        self.with_device.insert(id, buffers);
        self.order.push_back(id);
        id
    }

    /// Makes a chain available that the device writes and that is nowhere in memory.
    pub fn offer_outside(&mut self, len: u32) {
        let id = self.submitter.next_id().unwrap();
        self.add(id, vec![Buffer { addr: MEMORY + 4096, len, writable: true }]).unwrap();
    }

    /// Makes a frame available, cut into buffers of `cut` bytes.
    pub fn send(&mut self, frame: &[u8], cut: usize) -> Option<u16> {
        let lens: Vec<u32> = frame.chunks(cut).map(|chunk| chunk.len() as u32).collect();
        let id = self.submitter.next_id()?;
        let mut addr = PLACES + u64::from(id) * PLACE;
        for chunk in frame.chunks(cut) {
            self.view.write(Gpa(addr), chunk, &mut Marks::off()).unwrap();
            addr += chunk.len() as u64 + 64;
        }
        self.offer(&lens, false)
    }

    /// Makes a command available. The byte for the answer is writable.
    pub fn command(&mut self, bytes: &[u8]) -> u16 {
        let id = self.submitter.next_id().unwrap();
        let addr = PLACES + u64::from(id) * PLACE;
        self.view.write(Gpa(addr), bytes, &mut Marks::off()).unwrap();
        self.view.write(Gpa(addr + 128), &[0xee], &mut Marks::off()).unwrap();
        let out = Buffer { addr, len: bytes.len() as u32, writable: false };
        let answer = Buffer { addr: addr + 128, len: 1, writable: true };
        self.add(id, vec![out, answer]).unwrap()
    }

    pub fn answer(&self, id: u16) -> u8 {
        let mut answer = [0];
        self.view.read(Gpa(PLACES + u64::from(id) * PLACE + 128), &mut answer).unwrap();
        answer[0]
    }

    /// Chains that the driver can still make available.
    pub fn room(&mut self) -> usize {
        self.submitter.room()
    }

    /// The next chain that the device has completed, its buffers and the bytes written. Chains come back in the order in
    /// which they were made available.
    pub fn take(&mut self) -> Option<(u16, Vec<Buffer>, u32)> {
        let done = self.completer.pop().expect("the device lies")?;
        assert_eq!(self.order.pop_front(), Some(done.id), "out of order");
        let buffers = self.with_device.remove(&done.id).expect("a chain that is not with the device");
        self.completer.give_back(done.id);
        Some((done.id, buffers, done.len))
    }

    fn bytes(&self, buffers: &[Buffer], len: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        for buffer in buffers {
            let here = buffer.len.min(len - bytes.len() as u32);
            let start = bytes.len();
            bytes.resize(start + here as usize, 0);
            self.view.read(Gpa(buffer.addr), &mut bytes[start..]).unwrap();
        }
        assert_eq!(bytes.len(), len as usize);
        bytes
    }

    /// The next frame that the device has delivered: its header and its bytes. All of it is there if any of it is.
    pub fn receive(&mut self, header_len: usize) -> Option<(Header, Vec<u8>)> {
        let (_, buffers, len) = self.take()?;
        let mut frame = self.bytes(&buffers, len);
        let mut head = [0; size_of::<Header>()];
        head[..header_len].copy_from_slice(&frame[..header_len]);
        let header = Header::read_from_bytes(&head).unwrap();
        for _ in 1..header.num_buffers.get() {
            let (_, buffers, len) = self.take().expect("a frame of which a part is not there");
            frame.extend(self.bytes(&buffers, len));
        }
        frame.drain(..header_len);
        Some((header, frame))
    }

    pub fn with_device(&self) -> usize {
        self.order.len()
    }

    /// Bytes of the chains that the device has, oldest first.
    pub fn bytes_with_device(&self) -> impl Iterator<Item = u64> {
        self.order.iter().map(|id| self.with_device[id].iter().map(|buffer| u64::from(buffer.len)).sum())
    }

    /// Pages of memory that the driver has offered.
    pub fn pages_with_device(&self) -> BTreeSet<u64> {
        let buffers = self.with_device.values().flatten();
        buffers.flat_map(|b| b.addr / 4096..=(b.addr + u64::from(b.len) - 1) / 4096).collect()
    }
}

impl Rig {
    pub fn start(card: &Arc<Net>, index: u16, kind: Kind, size: u16, features: Features) -> Self {
        let (guest, vring) = Guest::new(index, kind, size, None);
        Self::run(card, guest, vring, features)
    }

    /// Starts a task on a ring.
    pub fn run(card: &Arc<Net>, guest: Guest, vring: Vring, features: Features) -> Self {
        let mut task = card.start_queue(vring, features).unwrap();
        let mut engine = Engine::open(EngineKind::Threads, 1).unwrap();
        task.attach(&mut engine).unwrap();
        task.disarm();
        Self { guest, task, engine, waker: Waker::new().unwrap(), last: Next::Idle }
    }

    /// One look of the worker at the ring, which then arms it as a worker does. Looks again where that finds work.
    pub fn poll(&mut self) -> u32 {
        let mut served = 0;
        loop {
            let polled = self.poll_once(1000);
            served += polled.served;
            match polled.next {
                Next::More => {}
                Next::Idle if self.task.arm() => self.task.disarm(),
                _ => {
                    self.task.disarm();
                    return served;
                }
            }
        }
    }

    pub fn poll_once(&mut self, budget: u32) -> Polled {
        self.poll_part(budget, true)
    }

    /// A poll that looks at the far side, or need not.
    pub fn poll_part(&mut self, budget: u32, far_side_due: bool) -> Polled {
        let mut context = Context { engine: &mut self.engine, task: 5, waker: &self.waker, far_side_due };
        let polled = self.task.poll(&mut context, budget);
        self.last = polled.next;
        polled
    }

    pub fn interest(&self) -> Option<Interest> {
        self.task.event().map(|event| event.interest)
    }

    /// Stops the task as a worker does. Returns the index from which the next one goes on.
    pub fn stop(self) -> (u16, usize) {
        let (next_avail, guest) = self.leave();
        (next_avail, guest.order.len())
    }

    /// Stops the task as a worker does. Returns the ring, and the index from which the next task goes on.
    pub fn leave(mut self) -> (u16, Guest) {
        while self.poll_once(0).next == Next::More {}
        assert_eq!(self.last, Next::Idle);
        assert_eq!(self.task.in_flight(), 0, "a stop waits for something");
        self.task.return_credit();
        self.task.detach(&mut self.engine);
        let stopped = self.task.vring().stop();
        assert!(stopped.held.is_empty());
        (stopped.next_avail, self.guest)
    }

    /// Ends the task as a process that is killed does.
    pub fn kill(self) -> Guest {
        self.guest
    }

    /// Waits until the far side is readable.
    pub fn wait_readable(&self) {
        let event = self.task.event().unwrap();
        let mut fds = [PollFd::new(&event.fd, PollFlags::IN)];
        let patience = rustix::event::Timespec { tv_sec: 60, tv_nsec: 0 };
        assert_eq!(rustix::event::poll(&mut fds, Some(&patience)), Ok(1), "the timer stands still");
    }

    /// Applies a change as a worker does.
    pub fn apply(&mut self, update: Update) {
        let memory = matches!(update, Update::Memory(_));
        if matches!(update, Update::Memory(_) | Update::Addresses(_) | Update::Invalidate(..)) {
            self.task.return_credit();
        }
        self.task.vring().apply(update);
        if memory {
            self.task.memory_changed(&mut self.engine);
        }
    }

    /// Another view of the same memory. Returns the one before.
    pub fn change_memory(&mut self) -> Arc<View> {
        let slots = self.view.map().slots().to_vec();
        let view = Arc::new(View::new(Map::new(slots).unwrap()));
        self.apply(Update::Memory(view.clone()));
        std::mem::replace(&mut self.guest.view, view)
    }
}

pub fn counter(card: &Net, name: &str) -> u64 {
    card.counters().iter().find(|(known, _)| *known == name).unwrap().1
}
