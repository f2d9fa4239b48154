//! A test rig: a card on real rings, with its driver and its worker in one thread.
#![allow(dead_code, reason = "each test program uses a part of it")]
#![allow(unreachable_pub, reason = "a test program has no outside")]

pub mod handing;
pub mod lost_memory;
pub mod packets;
pub mod pair;
pub mod running;
pub mod stream;
pub mod switch;

use kickless_device::{
    Areas, Clock, Context, Counters, Device, Driver, Interest, Iommu, IotlbMisses, IovaAddresses, Kick,
    Limiter, Neighbours, Next, Operate, Parcel, Polled, QueueTask, TaskLocation, Update, Vring, VringParts,
};
use kickless_io::{Engine, EngineKind, Waker};
use kickless_memory::{
    Access, Area, Gpa, Inflight, Iotlb, Iova, IovaRange, Map, Marks, Slot, UserAddr, View,
};
use kickless_net::{Net, NullPort, OpenPort, Opening, Options, PortError, PortName};
use kickless_net_port::{StreamPort, Tap, XdpPort};
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
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use zerocopy::FromBytes;

const USER: u64 = GuestRing::USER;
/// Start of the memory of chains.
const CHAINS_AT: u64 = GuestRing::BUFFERS;
/// Bytes of memory for an indirect table, which has up to 1024 descriptors.
const TABLE_BYTES: u64 = 1024 * 16;
/// Bytes of memory for each chain.
const CHAIN_BYTES: u64 = 0x2_0000;
/// Start and number of the pages that [`Guest::translate_pages`] translates.
pub const PAGES_AT: u64 = 1 << 32;
pub const PAGES: u64 = 3000;
/// The longest ring of most tests.
pub const SIZE_MAX: u16 = 128;
/// A ring for more frames than one poll takes.
pub const SIZE_LONG: u16 = 512;
pub const MEMORY: u64 = CHAINS_AT + SIZE_LONG as u64 * CHAIN_BYTES;

/// The features of a ring.
#[derive(Clone, Copy, Debug, Default)]
pub struct Kind {
    pub packed: bool,
    pub event_idx: bool,
    pub in_order: bool,
}

/// Returns every kind of ring.
pub fn kinds() -> impl Iterator<Item = Kind> {
    (0..8).map(|bits| Kind { packed: bits & 1 != 0, event_idx: bits & 2 != 0, in_order: bits & 4 != 0 })
}

pub fn card(pairs_max: u16, port: NullPort) -> Arc<Net> {
    card_on(pairs_max, port)
}

pub fn card_on(pairs_max: u16, port: impl Into<AnyPort>) -> Arc<Net> {
    card_with(Some([2, 0, 0, 0, 0, 7]), pairs_max, port)
}

/// A port that is open, or the name of one that is opened for a card.
pub enum AnyPort {
    Open(OpenPort),
    Named(String),
}

impl From<&str> for AnyPort {
    fn from(name: &str) -> Self {
        Self::Named(name.to_owned())
    }
}

impl From<NullPort> for AnyPort {
    fn from(port: NullPort) -> Self {
        Self::Open(port.into())
    }
}

impl From<Tap> for AnyPort {
    fn from(tap: Tap) -> Self {
        Self::Open(tap.into())
    }
}

impl From<StreamPort> for AnyPort {
    fn from(port: StreamPort) -> Self {
        Self::Open(port.into())
    }
}

impl From<XdpPort> for AnyPort {
    fn from(port: XdpPort) -> Self {
        Self::Open(port.into())
    }
}

/// Opens a port that needs no descriptor.
pub fn try_open(port: &str, pairs: u16, mac: Option<[u8; 6]>) -> Result<OpenPort, PortError> {
    let descriptor = |_: &str| unreachable!("there is no descriptor");
    port.parse::<PortName>()?.open(&Opening {
        pairs,
        mac,
        descriptor: &descriptor,
        handed: Default::default(),
    })
}

pub fn card_with(mac: Option<[u8; 6]>, pairs_max: u16, port: impl Into<AnyPort>) -> Arc<Net> {
    let port = match port.into() {
        AnyPort::Open(port) => port,
        AnyPort::Named(name) => try_open(&name, pairs_max, mac).unwrap(),
    };
    let options = Options {
        mac,
        mtu: None,
        pairs_max,
        queue_size_max: SIZE_MAX,
        offload: true,
        ring_reset: false,
        port,
    };
    let card = Arc::new(Net::new(options));
    card.reset(Driver::Fresh);
    card
}

pub fn without(card: &Net, features: NetFeatures) -> Features {
    card.features() - Features::from_bits_retain(features.bits())
}

/// The driver of one ring, and its memory.
pub struct Guest {
    pub view: Arc<View>,
    options: device::Options,
    /// The memory of chains, for indirect tables.
    tables: Area,
    /// The translations of a vIOMMU, and the misses that the device reports.
    iommu: Option<(Iotlb, Arc<IotlbMisses>)>,
    inflight: Option<Inflight>,
    pub counters: Arc<Counters>,
    submitter: Submitter,
    completer: Completer,
    /// The buffers of each chain that the driver has offered and not got back, by id.
    with_device: HashMap<u16, Vec<Buffer>>,
    /// The ids of these chains, in the order in which the driver made them available.
    order: VecDeque<u16>,
    /// Whether the device wants a kick.
    pub kick_wanted: bool,
}

/// The task of a ring, with its engine and its guest.
pub struct Rig {
    guest: Guest,
    pub task: Box<dyn QueueTask>,
    engine: Engine,
    waker: Waker,
    /// The limits of the card, without any at first.
    pub limiter: Arc<Limiter>,
    pub last: Next,
}

/// Other rings of the same worker, with the numbers of their tasks.
#[derive(Default)]
pub struct Beside<'a>(pub Vec<(u32, &'a mut Rig)>);

impl Neighbours for Beside<'_> {
    fn offer(&mut self, task: u32, parcel: &Parcel<'_>) -> u32 {
        let rig = self.0.iter_mut().find(|(number, _)| *number == task);
        // As the worker, which offers nothing to a task with limits.
        rig.filter(|(_, rig)| !rig.limiter.is_on()).map_or(0, |(_, rig)| rig.task.take_parcel(parcel))
    }

    /// The tests poll each ring.
    fn wake(&mut self, _task: u32) {}
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
    /// Returns a ring with its driver, and the device's end of the ring.
    pub fn new(index: u16, kind: Kind, size: u16, kick: Option<Kick>) -> (Self, Vring) {
        let guest = Self::prepare(kind, size);
        let vring = guest.vring(index, guest.first_avail(), kick);
        (guest, vring)
    }

    /// Returns a ring with its driver.
    pub fn prepare(kind: Kind, size: u16) -> Self {
        let make = if kind.packed { device::Options::packed } else { device::Options::new };
        let options = make(size, kind.event_idx, true).unwrap().with_in_order(kind.in_order);
        Self::with_memory(guest_memory(MEMORY, USER), options)
    }

    /// Returns a new driver with a new ring in the same memory.
    pub fn with_new_driver(self) -> Self {
        let zeroes = vec![0; CHAINS_AT as usize];
        self.view.write(Gpa(0), &zeroes, &mut Marks::off()).unwrap();
        Self::with_memory(self.view, self.options)
    }

    /// Returns a ring with its driver in memory of this file.
    pub fn in_file(kind: Kind, size: u16, file: OwnedFd) -> Self {
        let make = if kind.packed { device::Options::packed } else { device::Options::new };
        let options = make(size, kind.event_idx, true).unwrap().with_in_order(kind.in_order);
        let slot = Slot::map(file, 0, Gpa(0), UserAddr(USER), MEMORY).unwrap();
        Self::with_memory(Arc::new(View::new(Map::new(vec![slot]).unwrap())), options)
    }

    fn with_memory(view: Arc<View>, options: device::Options) -> Self {
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

    /// Puts the device behind a vIOMMU, which has no translations yet.
    pub fn behind_iommu(mut self) -> Self {
        self.iommu = Some((Iotlb::default(), Arc::new(IotlbMisses::new(Waker::new().unwrap()))));
        self
    }

    /// Translates all of memory for the device behind a vIOMMU, each address to itself.
    pub fn translate_all(&mut self) {
        let (iotlb, misses) = self.iommu.as_mut().unwrap();
        iotlb.update(Iova(0), MEMORY, UserAddr(USER), Access::BOTH).unwrap();
        misses.answered(IovaRange::new(Iova(0), MEMORY), Access::BOTH);
    }

    /// Translates the ring for the device behind a vIOMMU, and the pages from [`PAGES_AT`] on. Neighbouring
    /// pages are not neighbours in memory.
    pub fn translate_pages(&mut self) {
        let (iotlb, _) = self.iommu.as_mut().unwrap();
        iotlb.update(Iova(0), CHAINS_AT, UserAddr(USER), Access::BOTH).unwrap();
        for page in 0..PAGES {
            let to = USER + CHAINS_AT + page % 2 * 2 * 4096;
            iotlb.update(Iova(PAGES_AT + page * 4096), 4096, UserAddr(to), Access::BOTH).unwrap();
        }
    }

    /// Removes all translations. Returns the update for the task of the ring, and the channel that closes
    /// when the update is complete.
    pub fn invalidate_all(&mut self) -> (Update, Receiver<Infallible>) {
        let (iotlb, _) = self.iommu.as_mut().unwrap();
        iotlb.invalidate(IovaRange::new(Iova(0), MEMORY));
        let (done, all_done) = channel();
        (Update::Invalidate(iotlb.take_stale().unwrap(), done), all_done)
    }

    /// Adds an in-flight buffer, which survives a kill of the device.
    pub fn with_inflight(mut self) -> Self {
        let len = inflight_region_len(self.options.is_packed(), self.options.size()) as u64;
        self.inflight = Some(Inflight::map(memfd(len), 0, len).unwrap());
        self
    }

    /// Returns the index at which a new ring starts.
    pub fn first_avail(&self) -> u16 {
        if self.options.is_packed() { 1 << 15 } else { 0 }
    }

    /// Returns the device's end of the ring, which starts at `next_avail`.
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
        Vring::new(VringParts {
            index,
            iommu: iommu
                .map(|(iotlb, misses)| Iommu { table: iotlb.table().clone(), misses: misses.clone() }),
            next_avail,
            is_unconfirmed: true,
            inflight: self.inflight.as_ref().map(|buffer| buffer.records(0, len).unwrap()),
            kick,
            counters: self.counters.clone(),
            ..vring_parts(&self.view, self.options, areas)
        })
        .unwrap()
    }

    /// Returns the address of the first buffer of a chain with this id.
    pub fn chain_at(id: u16) -> Gpa {
        Gpa(CHAINS_AT + u64::from(id) * CHAIN_BYTES)
    }

    /// Makes a chain available that has buffers of these lengths.
    pub fn offer(&mut self, lens: &[u32], writable: bool) -> Option<u16> {
        let id = self.submitter.next_id()?;
        let mut addr = CHAINS_AT + u64::from(id) * CHAIN_BYTES;
        let mut buffers = Vec::new();
        for &len in lens {
            buffers.push(Buffer { addr, len, writable });
            // A gap keeps two buffers from being merged.
            addr += u64::from(len) + 64;
        }
        assert!(addr <= CHAINS_AT + (u64::from(id) + 1) * CHAIN_BYTES);
        self.add(id, buffers)
    }

    /// Makes a writable chain in an indirect table available.
    pub fn offer_indirect(&mut self, lens: &[u32]) -> Option<u16> {
        let id = self.submitter.next_id()?;
        // The table is in the first pages of the chain's memory.
        let addr = CHAINS_AT + u64::from(id) * CHAIN_BYTES;
        let starts = lens.iter().scan(addr + TABLE_BYTES, |at, &len| {
            let addr = std::mem::replace(at, *at + u64::from(len) + 64);
            Some(Buffer { addr, len, writable: true })
        });
        let buffers: Vec<Buffer> = starts.collect();
        self.add_indirect(id, addr, buffers)
    }

    /// Makes a frame available in buffers of `cut` bytes each, which an indirect table names.
    pub fn send_indirect(&mut self, frame: &[u8], cut: usize) -> Option<u16> {
        let id = self.submitter.next_id()?;
        let table = CHAINS_AT + u64::from(id) * CHAIN_BYTES;
        let mut addr = table + TABLE_BYTES;
        let mut buffers = Vec::new();
        for chunk in frame.chunks(cut) {
            self.view.write(Gpa(addr), chunk, &mut Marks::off()).unwrap();
            buffers.push(Buffer { addr, len: chunk.len() as u32, writable: false });
            // A gap keeps two buffers from being merged.
            addr += chunk.len() as u64 + 1;
        }
        self.add_indirect(id, table, buffers)
    }

    /// Makes a frame available in buffers of these lengths, the last of which ends with it. An indirect table
    /// may name them.
    pub fn send_pieces(&mut self, frame: &[u8], lens: &[usize], is_indirect: bool) -> Option<u16> {
        let id = self.submitter.next_id()?;
        let table = CHAINS_AT + u64::from(id) * CHAIN_BYTES;
        let (mut addr, mut rest, mut buffers) = (table + TABLE_BYTES, frame, Vec::new());
        for &len in lens.iter().chain(&[usize::MAX]) {
            let (here, more) = rest.split_at(len.min(rest.len()));
            if !here.is_empty() {
                self.view.write(Gpa(addr), here, &mut Marks::off()).unwrap();
                buffers.push(Buffer { addr, len: here.len() as u32, writable: false });
            }
            // A gap keeps two buffers from being merged.
            addr += here.len() as u64 + 1;
            rest = more;
        }
        if is_indirect { self.add_indirect(id, table, buffers) } else { self.add(id, buffers) }
    }

    /// Makes a frame available whose bytes behind its header are in 1200 pieces of memory: buffers of two
    /// bytes that are in two pages each ([`Guest::translate_pages`]). Returns the frame.
    pub fn send_scattered(&mut self, header: &[u8]) -> Vec<u8> {
        let id = self.submitter.next_id().unwrap();
        let head = CHAINS_AT + 4 * CHAIN_BYTES;
        self.view.write(Gpa(head), header, &mut Marks::off()).unwrap();
        let mut buffers = vec![Buffer { addr: head, len: header.len() as u32, writable: false }];
        // The two pages, one after the other in the addresses of the driver.
        for (page, ends) in [[1, 2], [3, 4]].into_iter().enumerate() {
            let at = CHAINS_AT + page as u64 * 2 * 4096;
            self.view.write(Gpa(at), &ends[..1], &mut Marks::off()).unwrap();
            self.view.write(Gpa(at + 4095), &ends[1..], &mut Marks::off()).unwrap();
        }
        let mut frame = header[size_of::<Header>()..].to_vec();
        for page in 1..=600 {
            buffers.push(Buffer { addr: PAGES_AT + page * 4096 - 1, len: 2, writable: false });
            frame.extend(if page % 2 == 1 { [2, 3] } else { [4, 1] });
        }
        self.add_indirect(id, CHAINS_AT + 8 * CHAIN_BYTES, buffers).unwrap();
        frame
    }

    /// Makes a chain of these buffers available, in an indirect table at this address.
    pub fn add_indirect(&mut self, id: u16, addr: u64, buffers: Vec<Buffer>) -> Option<u16> {
        let table = Table { area: &self.tables, offset: (addr - CHAINS_AT) as usize, addr };
        self.submitter.add(&buffers, Some(table)).ok()?;
        Some(self.added(id, buffers))
    }

    /// Returns the id of the next chain, if the ring has room.
    pub fn next_id(&mut self) -> Option<u16> {
        self.submitter.next_id()
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

    /// Makes a writable chain available whose buffer is outside of guest memory.
    pub fn offer_outside(&mut self, len: u32) {
        let id = self.submitter.next_id().unwrap();
        self.add(id, vec![Buffer { addr: MEMORY + 4096, len, writable: true }]).unwrap();
    }

    /// Makes a frame available, in buffers of `cut` bytes each.
    pub fn send(&mut self, frame: &[u8], cut: usize) -> Option<u16> {
        let lens: Vec<u32> = frame.chunks(cut).map(|chunk| chunk.len() as u32).collect();
        let id = self.submitter.next_id()?;
        let mut addr = CHAINS_AT + u64::from(id) * CHAIN_BYTES;
        for chunk in frame.chunks(cut) {
            self.view.write(Gpa(addr), chunk, &mut Marks::off()).unwrap();
            addr += chunk.len() as u64 + 64;
        }
        self.offer(&lens, false)
    }

    /// Makes a command available. The byte for the answer is writable.
    pub fn command(&mut self, bytes: &[u8]) -> u16 {
        let id = self.submitter.next_id().unwrap();
        let addr = CHAINS_AT + u64::from(id) * CHAIN_BYTES;
        self.view.write(Gpa(addr), bytes, &mut Marks::off()).unwrap();
        self.view.write(Gpa(addr + 128), &[0xee], &mut Marks::off()).unwrap();
        let out = Buffer { addr, len: bytes.len() as u32, writable: false };
        let answer = Buffer { addr: addr + 128, len: 1, writable: true };
        self.add(id, vec![out, answer]).unwrap()
    }

    pub fn answer(&self, id: u16) -> u8 {
        let mut answer = [0];
        self.view.read(Gpa(CHAINS_AT + u64::from(id) * CHAIN_BYTES + 128), &mut answer).unwrap();
        answer[0]
    }

    /// Returns the next chain that the device has completed: its id, its buffers and the number of bytes
    /// written. Checks that chains come back in the order in which they were made available.
    pub fn take(&mut self) -> Option<(u16, Vec<Buffer>, u32)> {
        let done = self.completer.pop().expect("the device returns an invalid chain")?;
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

    /// Returns the next frame that the device has delivered: its header and its bytes. Checks that a frame in
    /// several chains appears whole.
    pub fn receive(&mut self, header_len: usize) -> Option<(Header, Vec<u8>)> {
        let (_, buffers, len) = self.take()?;
        let mut frame = self.bytes(&buffers, len);
        let mut head = [0; size_of::<Header>()];
        head[..header_len].copy_from_slice(&frame[..header_len]);
        let header = Header::read_from_bytes(&head).unwrap();
        for _ in 1..header.num_buffers.get() {
            let (_, buffers, len) = self.take().expect("a part of a frame is missing");
            frame.extend(self.bytes(&buffers, len));
        }
        frame.drain(..header_len);
        Some((header, frame))
    }

    pub fn with_device(&self) -> usize {
        self.order.len()
    }

    /// Returns the bytes of each chain that the device has, oldest first.
    pub fn bytes_with_device(&self) -> impl Iterator<Item = u64> {
        self.order.iter().map(|id| self.with_device[id].iter().map(|buffer| u64::from(buffer.len)).sum())
    }

    /// Returns the pages of memory that the driver has offered.
    pub fn pages_with_device(&self) -> BTreeSet<u64> {
        let buffers = self.with_device.values().flatten();
        buffers.flat_map(|b| b.addr / 4096..=(b.addr + u64::from(b.len) - 1) / 4096).collect()
    }
}

impl Rig {
    pub fn start(card: &Arc<Net>, index: u16, kind: Kind, size: u16, features: Features) -> Self {
        let (guest, vring) = Guest::new(index, kind, size, None);
        Self::start_on(card, guest, vring, features)
    }

    /// Starts the task of an existing ring.
    pub fn start_on(card: &Arc<Net>, guest: Guest, vring: Vring, features: Features) -> Self {
        let mut task = card.start_queue(vring, features).unwrap();
        let mut engine = Engine::open(EngineKind::Threads, 1).unwrap();
        task.attach(&mut engine).unwrap();
        task.disarm();
        let (waker, limiter) = (Waker::new().unwrap(), Arc::default());
        Self { guest, task, engine, waker, limiter, last: Next::Idle }
    }

    /// Polls until there is no more work, then arms the ring as a worker does. Polls again if arming finds
    /// work.
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
        self.poll_with(budget, true)
    }

    /// Polls once, with or without the far side due.
    pub fn poll_with(&mut self, budget: u32, far_side_due: bool) -> Polled {
        let mut context = Context::new(&mut self.engine, 5, &self.waker, Clock::start());
        context.far_side_due = far_side_due;
        let polled = self.limiter.poll(&mut *self.task, &mut context, budget);
        self.last = polled.next;
        polled
    }

    /// Tells the task its worker and its number, or that it leaves the worker.
    pub fn set_location(&mut self, location: Option<(u32, u32)>) {
        self.task.set_location(location.map(|(worker_id, task)| TaskLocation { worker_id, task }));
    }

    /// Polls once beside other tasks.
    pub fn poll_among(&mut self, budget: u32, neighbours: &mut dyn Neighbours) -> Polled {
        let mut context = Context::new(&mut self.engine, 5, &self.waker, Clock::start());
        if self.task.offers_parcels() {
            context.neighbours = Some(neighbours);
        }
        let polled = self.limiter.poll(&mut *self.task, &mut context, budget);
        self.last = polled.next;
        polled
    }

    /// Polls once beside other rings, and does for these what the worker does.
    pub fn poll_beside(&mut self, budget: u32, mut beside: Beside<'_>) -> Polled {
        let polled = self.poll_among(budget, &mut beside);
        for (_, rig) in beside.0 {
            rig.task.vring().publish();
        }
        polled
    }

    pub fn interest(&self) -> Option<Interest> {
        self.task.event().map(|event| event.interest)
    }

    /// Stops the task as a worker does. Returns the index for the next task, and the number of chains not
    /// completed.
    pub fn stop(self) -> (u16, usize) {
        let (next_avail, guest) = self.stop_task();
        (next_avail, guest.order.len())
    }

    /// Stops the task as a worker does. Returns the index for the next task, and the guest.
    pub fn stop_task(mut self) -> (u16, Guest) {
        while self.poll_once(0).next == Next::More {}
        assert_eq!(self.last, Next::Idle);
        assert_eq!(self.task.in_flight(), 0, "a stop does not complete");
        self.task.return_credit();
        self.task.detach(&mut self.engine);
        let stopped = self.task.vring().stop();
        assert!(stopped.unpublished.is_empty());
        (stopped.next_avail, self.guest)
    }

    /// Drops the task without stopping it, as when its process is killed.
    pub fn kill(self) -> Guest {
        self.guest
    }

    /// Waits until the far side is readable.
    pub fn wait_readable(&self) {
        let event = self.task.event().unwrap();
        let mut fds = [PollFd::new(&event.fd, PollFlags::IN)];
        let timeout = rustix::event::Timespec { tv_sec: 60, tv_nsec: 0 };
        assert_eq!(rustix::event::poll(&mut fds, Some(&timeout)), Ok(1), "the timer does not expire");
    }

    /// Applies a change as a worker does.
    pub fn apply(&mut self, update: Update) {
        let memory = matches!(update, Update::Memory(_));
        if matches!(update, Update::Memory(_) | Update::Addresses(_) | Update::Invalidate(..)) {
            self.task.return_credit();
        }
        self.task.vring().apply(update);
        if memory {
            self.task.memory_changed();
        }
    }

    /// Gives the task another view of the same memory. Returns the previous view.
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
