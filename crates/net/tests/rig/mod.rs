//! A card on real rings, with a driver and a worker's turn, in one thread.
#![allow(dead_code, reason = "each test program uses a part of it")]
#![allow(unreachable_pub, reason = "a test program has no outside")]

use kickless_device::{
    Areas, Context, Counters, Device, Interest, Kick, Next, Parts, Polled, QueueTask, Update, Vring,
};
use kickless_io::{Engine, EngineKind, Waker};
use kickless_memory::{Gpa, Map, Marks, Slot, UserAddr, View};
use kickless_net::{Net, Options};
use kickless_net_port::{NullPort, Port};
use kickless_spec::features::Features;
use kickless_spec::net::{Header, NetFeatures};
use kickless_virtqueue::device::{self, Addresses};
use kickless_virtqueue::driver::{self, Buffer, Completer, Submitter};
use std::collections::{HashMap, VecDeque};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use zerocopy::FromBytes;

const USER: u64 = 0x7f00_0000_0000;
const AVAIL: u64 = 0x4000;
const USED: u64 = 0x6000;
/// Memory of chains, so much for each.
const PLACES: u64 = 0x1_0000;
const PLACE: u64 = 0x2_0000;
/// The longest ring.
pub const SIZE_MAX: u16 = 128;
pub const MEMORY: u64 = PLACES + SIZE_MAX as u64 * PLACE;

/// A ring's kind.
#[derive(Clone, Copy, Debug)]
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
        let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, MEMORY).unwrap();
        let slot = Slot::map(&file, 0, Gpa(0), UserAddr(USER), MEMORY).unwrap();
        let view = Arc::new(View::new(Map::new(vec![slot]).unwrap()));
        let make = if kind.packed { device::Options::packed } else { device::Options::new };
        let options = make(size, kind.event_idx, true).unwrap().with_in_order(kind.in_order);
        let area = |at: u64, len: u64| view.map().area(UserAddr(USER + at), len as usize, 16).unwrap();
        let areas = driver::Areas {
            desc: area(0, AVAIL),
            driver: area(AVAIL, USED - AVAIL),
            device: area(USED, PLACES - USED),
        };
        let (submitter, completer) = driver::queue(options, areas);
        let vring = Vring::new(Parts {
            index,
            options,
            areas: Areas::User(addresses()),
            iommu: None,
            next_avail: if kind.packed { 1 << 15 } else { 0 },
            held: Vec::new(),
            inflight: None,
            view: view.clone(),
            kick,
            call: None,
            err: None,
            logged: None,
            counters: Arc::new(Counters::default()),
        })
        .unwrap();
        let guest = Self {
            view,
            submitter,
            completer,
            with_device: HashMap::new(),
            order: VecDeque::new(),
            kick_wanted: false,
        };
        (guest, vring)
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

    fn add(&mut self, id: u16, buffers: Vec<Buffer>) -> Option<u16> {
        self.submitter.add(&buffers, None).ok()?;
        self.kick_wanted |= self.submitter.publish();
        self.with_device.insert(id, buffers);
        self.order.push_back(id);
        Some(id)
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
}

impl Rig {
    pub fn start(card: &Arc<Net>, index: u16, kind: Kind, size: u16, features: Features) -> Self {
        let (guest, vring) = Guest::new(index, kind, size, None);
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
        let mut context =
            Context { engine: &mut self.engine, task: 5, waker: &self.waker, far_side_due: true };
        let polled = self.task.poll(&mut context, budget);
        self.last = polled.next;
        polled
    }

    pub fn interest(&self) -> Option<Interest> {
        self.task.event().map(|event| event.interest)
    }

    /// Stops the task as a worker does. Returns the index from which the next one goes on.
    pub fn stop(mut self) -> (u16, usize) {
        assert_eq!(self.poll_once(0).next, Next::Idle);
        assert_eq!(self.task.in_flight(), 0, "a stop waits for something");
        self.task.return_credit();
        self.task.detach(&mut self.engine);
        let stopped = self.task.vring().stop();
        assert!(stopped.held.is_empty());
        (stopped.next_avail, self.order.len())
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

pub fn addresses() -> Addresses {
    Addresses { desc: UserAddr(USER), avail: UserAddr(USER + AVAIL), used: UserAddr(USER + USED), log: None }
}

pub fn counter(card: &Net, name: &str) -> u64 {
    card.counters().iter().find(|(known, _)| *known == name).unwrap().1
}
