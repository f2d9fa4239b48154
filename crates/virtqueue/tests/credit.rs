//! Tests our driver's end against our device's end in the way of a network card's receive queue.
//!
//! Chains are popped ahead as credit. They go back into the ring, or are used for frames in several buffers,
//! which the driver must see whole. The tests cover every feature, indices that wrap, memory that goes away,
//! devices that stop, and devices that are killed and leave an in-flight buffer.
#![allow(clippy::unwrap_used, reason = "a test may")]

mod model;

use kickless_memory::{Gpa, Inflight, UserAddr, View};
use kickless_spec::ring::{DESC_F_WRITE, PackedDesc, RING_ENTRIES};
use kickless_spec::vhost_user::{inflight_entry_len, inflight_head_len};
use kickless_testing::Random;
use kickless_virtqueue::driver::{self, Buffer, Completer, Submitter, Table};
use kickless_virtqueue::packed::RingPosition;
use kickless_virtqueue::{Chain, ChainId, device};
use model::shape::{Shape, areas};
use model::{ADDRESSES, AVAIL, DESC, SEAM, TABLES, USED, USER, desc, memory_twice};
use proptest::prelude::*;
use std::collections::VecDeque;
use std::sync::Arc;

/// Largest number of buffers of a chain.
const CHAIN: usize = 3;
/// Largest number of chains of a frame.
const FRAME: u64 = 5;

/// A chain as the driver knows it.
type Known = (u16, Vec<Buffer>);

/// A pushed chain of a frame: its id and length, and whether it ends the frame.
type Done = (u16, u32, bool);

/// Both ends of one ring, and its expected contents.
struct Pair {
    view: Arc<View>,
    /// The same memory, with other slots, so that the ring is not contiguous.
    pieces: Arc<View>,
    submitter: Submitter,
    completer: Completer,
    device: device::Queue,
    shape: Shape,
    tables: kickless_memory::Area,
    inflight: Option<Inflight>,
    /// Chains published and not popped, oldest first.
    available: VecDeque<Known>,
    /// Chains popped and not shown, oldest first.
    popped: VecDeque<Known>,
    /// Number of the newest of them, which are credit.
    credit: VecDeque<(ChainId, u16)>,
    /// Frames that are not pushed, with the number of their first chain.
    frames: Vec<(u64, Vec<(ChainId, u16)>)>,
    /// With IN_ORDER, frames that wait for older ones, by the number of their first chain.
    waiting: Vec<(u64, Vec<Done>)>,
    /// Number of chains ever used and, with IN_ORDER, of chains that went to the ring.
    numbers: (u64, u64),
    /// Chains pushed to the ring and not shown, and chains shown.
    pushed: VecDeque<Done>,
    used: VecDeque<Done>,
    /// Whether the driver sleeps until it is called, and the device until it is kicked.
    asleep: (bool, bool),
}

impl Pair {
    fn new(shape: Shape) -> Self {
        // The second boundary is in the middle of a descriptor, or of a used element.
        let (view, pieces) = memory_twice(&[DESC + 8, USED + 8]);
        let (submitter, completer) = driver::queue(shape.options(), areas(&view));
        let inflight = shape.tracked.then(|| {
            let entries = inflight_entry_len(shape.packed) * usize::from(shape.size);
            let len = (inflight_head_len(shape.packed) + entries) as u64;
            let file = rustix::fs::memfd_create("inflight", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&file, len).unwrap();
            Inflight::map(file, 0, len).unwrap()
        });
        let tables = view.map().area(UserAddr(USER + TABLES), (SEAM - TABLES) as usize, 16).unwrap();
        let device = device::Queue::unmapped(shape.options(), shape.base(), &view);
        let mut pair = Self {
            view,
            pieces,
            submitter,
            completer,
            device,
            shape,
            tables,
            inflight,
            available: VecDeque::new(),
            popped: VecDeque::new(),
            credit: VecDeque::new(),
            frames: Vec::new(),
            waiting: Vec::new(),
            numbers: (0, 0),
            pushed: VecDeque::new(),
            used: VecDeque::new(),
            asleep: (false, false),
        };
        pair.start(shape.base(), &[], &mut Random(0));
        pair
    }

    /// Starts a device.
    fn start(&mut self, base: u16, unpublished: &[device::UnpublishedUsed], random: &mut Random) {
        self.device = device::Queue::unmapped(self.shape.options(), base, &self.view);
        if let Some(inflight) = &self.inflight {
            let entries = inflight_entry_len(self.shape.packed) * usize::from(self.shape.size);
            let len = inflight_head_len(self.shape.packed) + entries;
            self.device.track(inflight.records(0, len).unwrap());
        }
        self.device.push_unpublished(unpublished);
        self.remap(random);
    }

    fn remap(&mut self, random: &mut Random) {
        let view = if random.one_in(2) { &self.view } else { &self.pieces };
        self.device.remap(device::Metadata::map(view, &ADDRESSES, &self.shape.options()).unwrap());
        self.device.disarm();
        self.publish();
        self.asleep = (false, false);
    }

    fn submit(&mut self, random: &mut Random, count: usize) {
        let mut added = 0;
        while added < count {
            let Some(id) = self.submitter.next_id() else { break };
            let len = 1 + random.below(CHAIN as u64) as usize;
            let buffer = |_| Buffer {
                addr: random.below(1 << 40),
                len: 1 + random.below(5000) as u32,
                writable: true,
            };
            let buffers: Vec<Buffer> = (0..len).map(buffer).collect();
            let place = usize::from(id) * CHAIN * 16;
            let table = (self.shape.indirect && random.below(3) > 0).then(|| Table {
                area: &self.tables,
                offset: place,
                addr: TABLES + place as u64,
            });
            if self.submitter.add(&buffers, table).is_err() {
                break;
            }
            self.available.push_back((id, buffers));
            added += 1;
        }
        if self.submitter.publish() {
            self.asleep.1 = false;
        }
        assert!(added == 0 || !self.asleep.1, "the device sleeps on a chain that it was not kicked for");
    }

    /// The device pops credit.
    fn pop(&mut self, count: usize) {
        let mut chain = Chain::default();
        for _ in 0..count {
            if !self.device.pop_credit(&self.view, &mut chain).unwrap() {
                assert!(self.available.is_empty() || !self.device.is_mapped());
                return;
            }
            let (id, buffers) = self.available.pop_front().unwrap();
            let seen = chain.writable().iter().map(|b| Buffer { addr: b.addr.0, len: b.len, writable: true });
            assert_eq!(seen.collect::<Vec<_>>(), buffers);
            self.credit.push_back((chain.id, id));
            self.popped.push_back((id, buffers));
        }
    }

    /// The newest chains go back.
    fn unpop(&mut self, count: usize) {
        for _ in 0..count {
            let Some((id, _)) = self.credit.pop_back() else {
                return assert_eq!((self.device.unpop(), self.device.credit()), (None, 0));
            };
            assert_eq!(self.device.unpop(), Some(id.head()));
            self.available.extend(self.popped.pop_back());
            self.available.rotate_right(1);
            // The device must look at the ring.
            self.asleep.1 = false;
        }
    }

    /// A frame arrives and uses the oldest chains.
    fn receive(&mut self, random: &mut Random) {
        let count = (1 + random.below(FRAME)) as usize;
        if count > self.credit.len() {
            return;
        }
        let first = self.numbers.0;
        let mut chains = Vec::new();
        for _ in 0..count {
            let before = self.device.in_flight();
            if !self.device.use_credit() {
                assert!(!self.device.is_mapped());
                break;
            }
            // Chains that an earlier process had in flight are counted all the time.
            assert!((before..=before + 1).contains(&self.device.in_flight()));
            chains.extend(self.credit.pop_front());
            self.numbers.0 += 1;
        }
        if !chains.is_empty() {
            self.frames.push((first, chains));
        }
    }

    /// The device pushes some frames, in any order, and may show them.
    fn push(&mut self, random: &mut Random, count: usize) {
        let mut shown = false;
        for _ in 0..count.min(self.frames.len()) {
            let at = random.below(self.frames.len() as u64) as usize;
            let (first, chains) = self.frames.swap_remove(at);
            let group: Vec<_> = chains
                .iter()
                .map(|&(id, known)| {
                    let (_, buffers) = self.popped.iter().find(|(other, _)| *other == known).unwrap();
                    let room: u32 = buffers.iter().map(|buffer| buffer.len).sum();
                    (id, random.below(u64::from(room) + 1) as u32)
                })
                .collect();
            self.device.push_group(&group);
            let last = group.len() - 1;
            let done = (0..).zip(&group).zip(&chains);
            let done = done.map(|((nth, (_, len)), (_, known))| (*known, *len, nth == last)).collect();
            self.went(first, done);
            if random.one_in(3) {
                self.device.show();
                self.showed();
                shown = true;
                if !self.asleep.0 && random.one_in(2) {
                    self.complete(usize::MAX);
                    self.asleep.0 = random.one_in(2) && !self.completer.enable_calls();
                }
            }
        }
        // A decision must follow the chains that were shown.
        if shown || random.one_in(2) {
            self.publish();
        }
    }

    fn publish(&mut self) {
        if self.device.publish() {
            self.asleep.0 = false;
        }
        self.showed();
        assert!(
            self.used.is_empty() || !self.asleep.0,
            "the driver sleeps on a frame that it was not called for"
        );
    }

    /// Records a pushed frame. Computes which frames the ring has now.
    fn went(&mut self, first: u64, done: Vec<Done>) {
        if !self.shape.in_order {
            return self.pushed.extend(done);
        }
        self.waiting.push((first, done));
        while let Some(at) = self.waiting.iter().position(|(first, _)| *first == self.numbers.1) {
            let (_, done) = self.waiting.swap_remove(at);
            self.numbers.1 += done.len() as u64;
            self.pushed.extend(done);
        }
    }

    fn showed(&mut self) {
        if self.device.is_mapped() {
            for done in self.pushed.drain(..) {
                let at = self.popped.iter().position(|(id, _)| *id == done.0).unwrap();
                self.popped.remove(at);
                self.used.push_back(done);
            }
        }
    }

    /// The driver takes up to `count` chains. If it takes all that it sees, they are whole frames.
    fn complete(&mut self, count: usize) {
        let mut whole = true;
        for _ in 0..count {
            let Some(done) = self.completer.pop().unwrap() else {
                assert!(self.used.is_empty());
                return assert!(whole, "half a frame");
            };
            let (id, len, last) = self.used.pop_front().unwrap();
            assert_eq!((done.id, done.len), (id, len));
            self.completer.give_back(done.id);
            whole = last;
        }
    }

    fn rest(&mut self, random: &mut Random) {
        match random.below(4) {
            0 => self.asleep.0 = !self.completer.enable_calls(),
            1 => {
                self.completer.disable_calls();
                self.asleep.0 = false;
            }
            // A device that slept while the ring was away looks when it is back.
            2 => self.asleep.1 = !self.device.arm() && self.device.is_mapped(),
            _ => {
                self.device.disarm();
                self.asleep.1 = false;
            }
        }
        assert!(!self.asleep.0 || self.used.is_empty());
        assert!(!self.asleep.1 || self.available.is_empty());
    }

    /// The device stops. It waits for chains in flight and not for credit, which the next device finds in the
    /// ring.
    fn stop(&mut self, random: &mut Random) {
        if random.one_in(2) {
            self.device.unmap();
        }
        self.push(random, usize::MAX);
        self.unpop(usize::MAX);
        if self.device.is_mapped() {
            self.publish();
        }
        assert_eq!(self.device.credit(), 0);
        if self.device.is_mapped() {
            assert_eq!(self.device.in_flight(), self.device.resubmissions());
        }
        if self.shape.tracked {
            // The buffer says where the next device begins.
            return self.begin_again(random);
        }
        let (base, unpublished) = (self.device.next_avail(), self.device.take_unpublished());
        self.start(base, &unpublished, random);
    }

    /// The device is killed. The chains that the driver has not seen come again, in their order.
    fn kill(&mut self, random: &mut Random) {
        if self.shape.tracked {
            self.begin_again(random);
        }
    }

    fn begin_again(&mut self, random: &mut Random) {
        for known in self.popped.drain(..).rev() {
            self.available.push_front(known);
        }
        self.credit.clear();
        self.frames.clear();
        self.waiting.clear();
        self.pushed.clear();
        self.numbers = (0, 0);
        self.start(self.shape.base(), &[], random);
        assert_eq!(self.device.in_flight(), self.device.resubmissions());
    }

    fn step(&mut self, random: &mut Random) {
        let count = random.below(u64::from(self.shape.size) + 2) as usize;
        match random.below(75) {
            0..10 => self.submit(random, count),
            10..25 => self.pop(count),
            25..32 => self.unpop(count),
            32..47 => self.receive(random),
            47..57 => self.push(random, count),
            57..65 => self.complete(count),
            65..71 => self.rest(random),
            71 => self.device.unmap(),
            72 => self.remap(random),
            73 => self.stop(random),
            _ => self.kill(random),
        }
        assert_eq!(usize::from(self.device.credit()), self.credit.len());
    }

    fn drain(&mut self, random: &mut Random) {
        self.remap(random);
        self.push(random, usize::MAX);
        self.unpop(usize::MAX);
        self.pop(usize::MAX);
        while !self.credit.is_empty() {
            self.receive(random);
        }
        self.push(random, usize::MAX);
        self.publish();
        self.complete(usize::MAX);
        assert!(self.popped.is_empty() && self.used.is_empty() && self.available.is_empty());
        assert_eq!(self.submitter.room(), usize::from(self.shape.size));
        assert_eq!((self.device.in_flight(), self.device.credit(), self.device.resubmissions()), (0, 0, 0));
    }
}

fn run(shape: Shape, seed: u64, steps: u32) {
    let (mut pair, mut random) = (Pair::new(shape), Random(seed));
    (0..steps).for_each(|_| pair.step(&mut random));
    pair.drain(&mut random);
}

fn shapes() -> impl Strategy<Value = Shape> {
    (1u16..70, any::<[bool; 5]>()).prop_map(|(size, [event_idx, indirect, packed, in_order, tracked])| {
        Shape {
            size: if packed { size } else { size.next_power_of_two() },
            event_idx,
            indirect,
            packed,
            in_order,
            tracked,
        }
    })
}

proptest! {
    #[test]
    fn ends_agree(shape in shapes(), seed: u64) {
        run(shape, seed, 600);
    }
}

/// Every combination of features. The rings are so small that each group and each return crosses the wrap at
/// some time.
#[test]
fn small_rings() {
    for bits in 0..32u16 {
        for size in 1..=8 {
            let bit = |n: u16| bits >> n & 1 == 1;
            let size = if bit(0) { size } else { u16::next_power_of_two(size) };
            let [packed, event_idx, indirect, in_order, tracked] = [0, 1, 2, 3, 4].map(bit);
            run(Shape { size, event_idx, indirect, packed, in_order, tracked }, u64::from(bits), 500);
        }
    }
}

/// A device that polls gets no kick. A device that arms and disarms still gets the kicks it sleeps for,
/// however far the indices go.
#[test]
fn indices_wrap() {
    for packed in [false, true] {
        let shape = Shape { packed, ..Shape::split(64, true, false) };
        let (mut pair, mut random) = (Pair::new(shape), Random(7));
        for round in 0..10_000 {
            pair.submit(&mut random, usize::MAX);
            pair.pop(usize::MAX);
            if round % 5 == 0 {
                pair.unpop(40);
                assert!(pair.device.arm(), "there is something to pop");
                pair.pop(usize::MAX);
                pair.asleep.1 = !pair.device.arm();
            }
            (0..9).for_each(|_| pair.receive(&mut random));
            pair.push(&mut random, usize::MAX);
            pair.publish();
            pair.complete(usize::MAX);
            pair.unpop(usize::MAX);
            pair.device.disarm();
            pair.asleep.1 = false;
        }
        pair.drain(&mut random);
    }
}

/// Disabling kicks after a return leaves the event index where the driver has passed it, also in the largest
/// ring.
#[test]
fn no_kicks_after_a_return() {
    for packed in [false, true] {
        let size = 1 << 15;
        let shape = Shape { packed, ..Shape::split(size, true, false) };
        let mut pair = Pair::new(shape);
        let buffers = [Buffer { addr: 0, len: 1, writable: true }];
        let mut chain = Chain::default();
        let mut added = 0;
        for round in 0..6 {
            while pair.submitter.add(&buffers, None).is_ok() {
                added += 1;
                if added % 64 == 0 {
                    // At first the device may not have disabled kicks yet.
                    assert!(!pair.submitter.publish(), "a kick in round {round}");
                }
            }
            let _ = pair.submitter.publish();
            while pair.device.pop_credit(&pair.view, &mut chain).unwrap() {}
            (0..pair.device.credit()).for_each(|_| assert!(pair.device.unpop().is_some()));
            let _ = pair.device.arm();
            pair.device.disarm();
            let metadata = device::Metadata::map(&pair.view, &ADDRESSES, &shape.options()).unwrap();
            pair.device.remap(metadata);
            for _ in 0..20_000 {
                assert!(pair.device.pop_credit(&pair.view, &mut chain).unwrap() && pair.device.use_credit());
                pair.device.push(chain.id, 0);
            }
            let _ = pair.device.publish();
            while let Some(done) = pair.completer.pop().unwrap() {
                pair.completer.give_back(done.id);
            }
        }
    }
}

/// The driver changes a chain while it is credit. The pop after its return reads the new one.
#[test]
fn another_chain_comes_back() {
    for packed in [false, true] {
        let shape = Shape { packed, in_order: true, ..Shape::split(4, false, false) };
        let mut pair = Pair::new(shape);
        let mut random = Random(1);
        let map = pair.view.map();
        let offer = |index: u16, id: u16, addr: u64| {
            if packed {
                let place = RingPosition { index, wrap: true };
                let flags = place.available() | DESC_F_WRITE;
                let (addr, len) = (addr.into(), 9.into());
                let desc = PackedDesc { addr, len, id: id.into(), flags: flags.into() };
                map.write_obj(Gpa(DESC + place.at() as u64), &desc).unwrap();
            } else {
                map.write_obj(Gpa(DESC + 16 * u64::from(id)), &desc(addr, 9, DESC_F_WRITE, 0)).unwrap();
                map.write_obj(Gpa(AVAIL + (RING_ENTRIES as u64) + 2 * u64::from(index)), &id).unwrap();
                map.write_obj(Gpa(AVAIL + 2), &3u16).unwrap();
            }
        };
        for index in 0..3 {
            offer(index, index, 100 + u64::from(index));
        }
        let mut chain = Chain::default();
        let mut pop = |device: &mut device::Queue| {
            assert!(device.pop_credit(&pair.view, &mut chain).unwrap());
            (chain.id, chain.writable()[0].addr.0)
        };
        let first: Vec<_> = (0..3).map(|_| pop(&mut pair.device)).collect();
        assert!(pair.device.use_credit());
        // The ids are exchanged, and one of them is replaced.
        offer(1, 2, 201);
        offer(2, 3, 202);
        assert_eq!([pair.device.unpop(), pair.device.unpop(), pair.device.unpop()], [Some(2), Some(1), None]);
        let second: Vec<_> = (0..2).map(|_| pop(&mut pair.device)).collect();
        assert_eq!(
            second.iter().map(|(id, addr)| (id.head(), *addr)).collect::<Vec<_>>(),
            [(2, 201), (3, 202)]
        );
        assert!(pair.device.use_credit() && pair.device.use_credit() && !pair.device.use_credit());
        assert_eq!(pair.device.in_flight(), 3);
        // A group from the middle waits for the first.
        pair.device.push_group(&[(second[0].0, 1), (second[1].0, 2)]);
        assert_eq!(pair.device.in_flight(), 3);
        pair.device.push(first[0].0, 0);
        assert_eq!(pair.device.in_flight(), 0);
        let _ = (pair.device.publish(), random.next());
    }
}
