//! Tests our driver's end against our device's end, in one thread: every feature, sizes from 1 to 32768,
//! batches of any length, indices that wrap, and a device that makes false statements.
#![allow(clippy::unwrap_used, reason = "a test may")]

mod model;

use kickless_memory::{Gpa, UserAddr, View};
use kickless_spec::ring::{EVENT_LEN, RING_ENTRIES, RING_IDX, UsedElem, avail_len, desc_len, used_len};
use kickless_testing::Random;
use kickless_virtqueue::device::{Direction, SingleChain};
use kickless_virtqueue::driver::{self, Buffer, Completer, Submitter, Table, UsedError};
use kickless_virtqueue::{Chain, ChainId, device};
use model::shape::{Shape, areas};
use model::{ADDRESSES, AVAIL, DESC, SEAM, TABLES, USED, USER, memory_twice};
use proptest::prelude::*;
use std::collections::VecDeque;
use std::sync::Arc;

/// Largest number of buffers of a chain.
const CHAIN: usize = 4;

/// Both ends of one ring, and its expected contents.
struct Pair {
    view: Arc<View>,
    /// The same memory, with other slots, so that the ring is not contiguous.
    pieces: Arc<View>,
    submitter: Submitter,
    completer: Completer,
    device: device::Queue,
    /// Whether each area of the device's ring is in one slot.
    contiguous: bool,
    shape: Shape,
    tables: kickless_memory::Area,
    /// Chains published and not popped by the device: ids and buffers, oldest first.
    available: VecDeque<(u16, Vec<Buffer>)>,
    /// Chains popped by the device: head, the driver's id, writable bytes.
    held: Vec<(ChainId, u16, u32)>,
    /// With IN_ORDER: chains popped by the device, oldest first, and the length once it is pushed.
    order: VecDeque<(u16, Option<u32>)>,
    /// Chains pushed by the device: id and length, oldest first.
    used: VecDeque<(u16, u32)>,
    /// Whether the driver sleeps until it is called, and the device until it is kicked.
    asleep: (bool, bool),
}

impl Pair {
    fn new(shape: Shape) -> Self {
        Self::over(shape, &[])
    }

    /// Makes a rig. The device's ring crosses slots at these offsets at first and from time to time. The
    /// driver's ring is contiguous.
    fn over(shape: Shape, seams: &[u64]) -> Self {
        let (view, pieces) = memory_twice(seams);
        let (submitter, completer) = driver::queue(shape.options(), areas(&view));
        let metadata = device::Metadata::map(&pieces, &ADDRESSES, &shape.options()).unwrap();
        assert_eq!(metadata.is_mapped(), seams.is_empty());
        let contiguous = metadata.is_mapped();
        let mut device = device::Queue::new(shape.options(), metadata, shape.base());
        device.disarm();
        let tables = view.map().area(UserAddr(USER + TABLES), (SEAM - TABLES) as usize, 16).unwrap();
        Self {
            view,
            pieces,
            submitter,
            completer,
            device,
            contiguous,
            shape,
            tables,
            available: VecDeque::new(),
            held: Vec::new(),
            order: VecDeque::new(),
            used: VecDeque::new(),
            asleep: (false, false),
        }
    }

    /// Adds up to `count` chains, and publishes them. Returns how many there was room for.
    fn submit(&mut self, random: &mut Random, count: usize) -> usize {
        let mut added = 0;
        // Half of the calls add single buffers of one direction, which the device can peek together.
        let kind = random.below(4);
        while added < count {
            let Some(id) = self.submitter.next_id() else { break };
            let (len, readable) = if kind < 2 {
                (1, kind as usize)
            } else {
                let len = 1 + random.below(CHAIN as u64);
                (len as usize, random.below(len + 1) as usize)
            };
            let buffers: Vec<Buffer> = (0..len)
                .map(|at| Buffer {
                    addr: random.below(1 << 40),
                    len: 1 + random.below(5000) as u32,
                    writable: at >= readable,
                })
                .collect();
            // Tables for the first ids only, because the memory of this test is small.
            let place = usize::from(id) * CHAIN * 16;
            let table =
                (self.shape.indirect && place + CHAIN * 16 <= self.tables.len() && random.below(3) > 0)
                    .then(|| Table { area: &self.tables, offset: place, addr: TABLES + place as u64 });
            match self.submitter.add(&buffers, table) {
                Ok(given) => assert_eq!(given, id),
                Err(driver::NoRoom) => break,
            }
            self.available.push_back((id, buffers));
            added += 1;
        }
        let kick = self.submitter.publish();
        if kick {
            self.asleep.1 = false;
        }
        assert!(added == 0 || !self.asleep.1, "the device sleeps on a chain that it was not kicked for");
        added
    }

    /// The device pops up to `count` chains.
    fn pop(&mut self, count: usize) {
        let mut chain = Chain::default();
        for _ in 0..count {
            if !self.device.pop(&self.view, &mut chain).unwrap() {
                assert!(self.available.is_empty());
                return;
            }
            let (id, buffers) = self.available.pop_front().unwrap();
            let seen: Vec<Buffer> = chain
                .readable()
                .iter()
                .map(|b| (b, false))
                .chain(chain.writable().iter().map(|b| (b, true)))
                .map(|(b, writable)| Buffer { addr: b.addr.0, len: b.len, writable })
                .collect();
            assert_eq!(seen, buffers);
            let room = buffers.iter().filter(|b| b.writable).map(|b| b.len).sum();
            self.held.push((chain.id, id, room));
            self.order.push_back((id, None));
        }
    }

    /// The device pushes `count` of its chains, in any order, and publishes.
    fn push(&mut self, random: &mut Random, count: usize) {
        for _ in 0..count.min(self.held.len()) {
            let at = random.below(self.held.len() as u64) as usize;
            let (head, id, room) = self.held.swap_remove(at);
            let len = random.below(u64::from(room) + 1) as u32;
            self.device.push(head, len);
            self.pushed(id, len);
            if random.one_in(4) {
                self.device.show();
                if !self.asleep.0 && random.one_in(2) {
                    self.complete(random.below(4) as usize);
                    if random.one_in(2) {
                        self.asleep.0 = !self.completer.enable_calls();
                    }
                }
            }
        }
        if self.device.publish() {
            self.asleep.0 = false;
        }
        assert!(
            self.used.is_empty() || !self.asleep.0,
            "the driver sleeps on a completion that it was not called for"
        );
    }

    /// The device completes chains of a single buffer together, and publishes.
    fn serve_singles(&mut self, random: &mut Random, count: usize) {
        let writable = match self.available.front().map(|(_, buffers)| &buffers[..]) {
            Some([buffer]) if !random.one_in(4) => buffer.writable,
            _ => random.one_in(2),
        };
        let direction = if writable { Direction::Writable } else { Direction::Readable };
        let mut chains = vec![SingleChain::default(); 1 + count];
        let found = self.device.peek(&self.view, direction, &mut chains);
        let singles = self.available.iter().map_while(|(_, buffers)| match buffers[..] {
            [buffer] if buffer.writable == writable => Some(buffer),
            _ => None,
        });
        let singles: Vec<Buffer> = singles.take(chains.len()).collect();
        let is_scattered = !self.contiguous;
        let expected = if is_scattered || !self.held.is_empty() { 0 } else { singles.len() };
        assert_eq!(found, expected);
        let done = random.below(found as u64 + 1) as usize;
        for (chain, single) in chains[..done].iter_mut().zip(singles) {
            assert_eq!((chain.buffer.addr.0, chain.buffer.len), (single.addr, single.len));
            chain.written = if writable { random.below(u64::from(single.len) + 1) as u32 } else { 0 };
            let (id, _) = self.available.pop_front().unwrap();
            self.order.push_back((id, None));
            self.pushed(id, chain.written);
        }
        // In two calls, with a show in between, as a receive ring does.
        let first = random.below(done as u64 + 1) as usize;
        self.device.complete_peeked(&chains[..first]);
        if random.one_in(3) {
            self.device.show();
        }
        self.device.complete_peeked(&chains[first..done]);
        if random.one_in(4) {
            self.device.unmap();
            self.map_again(random);
        }
        self.push(random, 0);
    }

    /// Records what the driver sees of a pushed chain, and when.
    fn pushed(&mut self, id: u16, len: u32) {
        if !self.shape.in_order {
            return self.used.push_back((id, len));
        }
        let done = self.order.iter_mut().find(|(other, done)| *other == id && done.is_none()).unwrap();
        done.1 = Some(len);
        while let Some(&(id, Some(len))) = self.order.front() {
            self.order.pop_front();
            self.used.push_back((id, len));
        }
    }

    /// The memory goes away and comes back. Its contents stay. The device holds chains that it has pushed and
    /// not shown.
    fn remap(&mut self, random: &mut Random) {
        for _ in 0..random.below(3) {
            let Some((head, id, room)) = self.held.pop() else { break };
            self.device.push(head, room);
            self.pushed(id, room);
        }
        if random.one_in(2) {
            self.device.unmap();
        }
        self.map_again(random);
    }

    /// The device gets areas again, and looks at the ring as if kicked.
    fn map_again(&mut self, random: &mut Random) {
        let metadata = self.metadata(random);
        self.contiguous = metadata.is_mapped();
        self.device.remap(metadata);
        let _ = self.device.publish();
        self.asleep = (false, false);
        self.device.disarm();
    }

    /// Returns the ring, contiguous or not.
    fn metadata(&self, random: &mut Random) -> device::Metadata {
        let view = if random.one_in(2) { &self.view } else { &self.pieces };
        device::Metadata::map(view, &ADDRESSES, &self.shape.options()).unwrap()
    }

    /// Another device continues, with the chains that were held while the memory was away.
    fn replace_device(&mut self, random: &mut Random) {
        self.pop(usize::MAX);
        self.push(random, 3);
        if random.one_in(2) {
            self.device.unmap();
        }
        while let Some((head, id, room)) = self.held.pop() {
            self.device.push(head, room);
            self.pushed(id, room);
        }
        if self.device.is_mapped() && random.one_in(2) {
            let _ = self.device.publish();
        }
        let (base, unpublished) = (self.device.next_avail(), self.device.take_unpublished());
        let metadata = self.metadata(random);
        self.contiguous = metadata.is_mapped();
        self.device = device::Queue::new(self.shape.options(), metadata, base);
        self.device.push_unpublished(&unpublished);
        let _ = self.device.publish();
        self.device.disarm();
        self.asleep = (false, false);
    }

    /// The driver takes up to `count` chains back.
    fn complete(&mut self, count: usize) {
        for _ in 0..count {
            match self.completer.pop().unwrap() {
                Some(done) => {
                    assert_eq!(self.used.pop_front(), Some((done.id, done.len)));
                    self.completer.give_back(done.id);
                }
                None => {
                    assert!(self.used.is_empty());
                    return;
                }
            }
        }
    }

    /// Either end goes to sleep, or begins to poll.
    fn rest(&mut self, random: &mut Random) {
        match random.below(4) {
            0 => self.asleep.0 = !self.completer.enable_calls(),
            1 => {
                self.completer.disable_calls();
                self.asleep.0 = false;
            }
            2 => self.asleep.1 = !self.device.arm(),
            _ => {
                self.device.disarm();
                self.asleep.1 = false;
            }
        }
        assert!(!self.asleep.0 || self.used.is_empty());
        assert!(!self.asleep.1 || self.available.is_empty());
    }

    fn drain(&mut self, random: &mut Random) {
        self.pop(usize::MAX);
        self.push(random, usize::MAX);
        self.complete(usize::MAX);
        assert!(self.held.is_empty() && self.used.is_empty() && self.available.is_empty());
    }
}

fn run(shape: Shape, seed: u64, steps: u32) {
    run_pair(Pair::new(shape), seed, steps);
}

fn run_pair(mut pair: Pair, seed: u64, steps: u32) {
    let (mut random, shape) = (Random(seed), pair.shape);
    let most = u64::from(shape.size) + 2;
    for _ in 0..steps {
        let count = random.below(most) as usize;
        match random.below(62) / 10 {
            6 if random.one_in(2) => pair.remap(&mut random),
            6 => pair.replace_device(&mut random),
            5 => pair.serve_singles(&mut random, count),
            0 => {
                pair.submit(&mut random, count);
            }
            1 => pair.pop(count),
            2 => pair.push(&mut random, count),
            3 => pair.complete(count),
            _ => pair.rest(&mut random),
        }
    }
    pair.drain(&mut random);
    // Everything is free again.
    assert_eq!(pair.submitter.room(), usize::from(shape.size));
}

fn shapes() -> impl Strategy<Value = Shape> {
    (1u16..130, any::<[bool; 4]>()).prop_map(|(size, [event_idx, indirect, packed, in_order])| Shape {
        size: if packed { size } else { size.next_power_of_two() },
        event_idx,
        indirect,
        packed,
        in_order,
        tracked: false,
    })
}

proptest! {
    #[test]
    fn ends_agree(shape in shapes(), seed: u64) {
        run(shape, seed, 400);
    }
}

/// Rings that cross from one slot to the next: at each offset where they can be split, and at all of these at
/// once. A ring whose 16-bit field would be split is refused.
#[test]
fn rings_in_pieces() {
    const SIZE: u16 = 4;
    for shape in
        [Shape::split(SIZE, true, true), Shape::split(SIZE, false, false), Shape::packed(SIZE, true, true)]
    {
        let (avail, used) = match shape.packed {
            true => (EVENT_LEN, EVENT_LEN),
            false => (avail_len(SIZE, shape.event_idx), used_len(SIZE, shape.event_idx)),
        };
        let mut all = Vec::new();
        for (area, len) in [(DESC, desc_len(SIZE)), (AVAIL, avail), (USED, used)] {
            for seam in (area..area + len as u64).filter(|seam| *seam > DESC) {
                if seam % 2 == 0 {
                    all.push(seam);
                    // At the first byte of an area, no field is split.
                    if seam != area {
                        run_pair(Pair::over(shape, &[seam]), seam, 60);
                    }
                    continue;
                }
                let (_, pieces) = memory_twice(&[seam]);
                assert!(device::Metadata::map(&pieces, &ADDRESSES, &shape.options()).is_err(), "{seam:#x}");
            }
        }
        for seed in 0..20 {
            run_pair(Pair::over(shape, &all), seed, 400);
        }
    }
}

#[test]
fn every_size() {
    for log in 0..=15 {
        let shape = Shape::split(1 << log, log % 2 == 0, log % 3 == 0);
        run(shape, log, 40);
        run(Shape { packed: true, ..shape }, log, 40);
        run(Shape { packed: true, size: shape.size / 4 * 3 + 1, ..shape }, log, 40);
    }
}

/// Both indices wrap more than once, in steps that are unrelated to the size.
#[test]
fn indices_wrap() {
    let shapes = [false, true]
        .map(|event_idx| [Shape::split(64, event_idx, false), Shape::packed(64, event_idx, false)]);
    for shape in shapes.into_iter().flatten() {
        let (mut pair, mut random) = (Pair::new(shape), Random(7));
        let mut done = 0;
        while done < 200_000 {
            done += pair.submit(&mut random, 13);
            pair.rest(&mut random);
            pair.pop(17);
            pair.push(&mut random, 11);
            pair.complete(19);
        }
        pair.drain(&mut random);
    }
}

/// A driver that never asks for calls never gets one, and a device that never asks for kicks never gets one,
/// however often the indices wrap.
#[test]
fn silence() {
    let shapes = [false, true]
        .map(|event_idx| [Shape::split(256, event_idx, false), Shape::packed(256, event_idx, false)]);
    for shape in shapes.into_iter().flatten() {
        let (mut pair, mut random) = (Pair::new(shape), Random(3));
        pair.completer.disable_calls();
        // The first publication of a device may call, because it does not know earlier requests.
        pair.submit(&mut random, 1);
        pair.drain(&mut random);
        for round in 0..3000 {
            pair.submit_silently(&mut random, 64, round);
        }
    }
}

impl Pair {
    fn submit_silently(&mut self, random: &mut Random, count: usize, round: u32) {
        for _ in 0..count {
            let buffers = [Buffer { addr: 0, len: 1, writable: true }];
            let id = self.submitter.add(&buffers, None).unwrap();
            self.available.push_back((id, buffers.to_vec()));
        }
        assert!(!self.submitter.publish(), "a kick in round {round}");
        self.pop(usize::MAX);
        while let Some((head, id, _)) = self.held.pop() {
            self.device.push(head, 0);
            self.used.push_back((id, 0));
        }
        assert!(!self.device.publish(), "a call in round {round}");
        self.complete(usize::MAX);
        let _ = random;
    }
}

/// A device is killed, and its front-end says that the ring is at its first position. For chains of one
/// descriptor, this is found out, whether the driver keeps the ring full or not.
#[test]
fn a_lost_position_of_a_packed_ring_is_noticed() {
    const SIZE: u16 = 16;
    for (most, served) in
        [1, 3, SIZE].into_iter().flat_map(|most| (0..6 * SIZE).map(move |served| (most, served)))
    {
        let shape = Shape::packed(SIZE, true, false);
        let (mut pair, mut chain) = (Pair::new(shape), Chain::default());
        for step in 0..=served {
            while usize::from(SIZE) - pair.submitter.room() < most.into() {
                pair.submitter.add(&[Buffer { addr: 0, len: 1530, writable: true }], None).unwrap();
            }
            let _ = pair.submitter.publish();
            if step < served {
                assert!(pair.device.pop(&pair.view, &mut chain).unwrap());
                pair.device.push(chain.id, 60);
                let _ = pair.device.publish();
                let done = pair.completer.pop().unwrap().unwrap();
                pair.completer.give_back(done.id);
            }
        }
        let metadata = pair.metadata(&mut Random(served.into()));
        let mut next = device::Queue::new(shape.options(), metadata, shape.base());
        let is_noticed = next.may_be_beyond_base() || next.pop(&pair.view, &mut chain).is_err();
        assert_eq!(is_noticed, !served.is_multiple_of(2 * SIZE), "{most} {served}");
    }
}

/// Chains that were peeked stay in a ring whose areas have gone.
#[test]
fn nothing_is_completed_without_areas() {
    for shape in [Shape::split(4, false, false), Shape::packed(4, false, false)] {
        let mut pair = Pair::new(shape);
        for len in 1..4 {
            pair.submitter.add(&[Buffer { addr: 0, len, writable: true }], None).unwrap();
        }
        let _ = pair.submitter.publish();
        let mut chains = [SingleChain::default(); 4];
        assert_eq!(pair.device.peek(&pair.view, Direction::Writable, &mut chains), 3);
        pair.device.unmap();
        pair.device.complete_peeked(&chains[..3]);
        assert!(pair.device.take_unpublished().is_empty());
        pair.map_again(&mut Random(1));
        assert_eq!(pair.completer.pop(), Ok(None));
        let mut chain = Chain::default();
        for len in 1..4 {
            assert_eq!(pair.device.pop(&pair.view, &mut chain), Ok(true), "{shape:?}");
            assert_eq!(chain.writable_len(), len);
        }
    }
}

#[test]
fn no_room_changes_nothing() {
    for shape in [Shape::split(4, false, false), Shape::packed(4, false, false)] {
        no_room(shape);
    }
}

fn no_room(shape: Shape) {
    let mut pair = Pair::new(shape);
    let three = [Buffer { addr: 1, len: 1, writable: false }; 3];
    assert_eq!(pair.submitter.add(&[], None), Err(driver::NoRoom));
    let id = pair.submitter.add(&three, None).unwrap();
    let next = pair.submitter.next_id();
    assert_eq!(pair.submitter.add(&three, None), Err(driver::NoRoom));
    assert_eq!(pair.submitter.add(&[three[0]; 5], None), Err(driver::NoRoom));
    assert_eq!((pair.submitter.next_id(), pair.submitter.room()), (next, 1));
    let _ = pair.submitter.publish();
    let mut chain = Chain::default();
    assert!(pair.device.pop(&pair.view, &mut chain).unwrap());
    assert_eq!((chain.id.head(), chain.readable().len()), (id, 3));
    assert!(!pair.device.pop(&pair.view, &mut chain).unwrap());
}

/// Pops this used ring, in a queue of 8 with two chains in flight.
fn pop_used(index: u16, elements: &[(u32, u32)]) -> (Pair, Result<Vec<u16>, UsedError>) {
    pop_used_of(false, 2, index, elements)
}

/// Pops this used ring, in a queue of 8 with this number of chains in flight.
fn pop_used_of(
    in_order: bool,
    chains: u16,
    index: u16,
    elements: &[(u32, u32)],
) -> (Pair, Result<Vec<u16>, UsedError>) {
    let shape = Shape::split(8, false, false);
    let mut pair = Pair::new(shape);
    let options = shape.options().with_in_order(in_order);
    (pair.submitter, pair.completer) = driver::queue(options, areas(&pair.view));
    for _ in 0..chains {
        pair.submitter.add(&[Buffer { addr: 0, len: 10, writable: true }], None).unwrap();
    }
    let _ = pair.submitter.publish();
    for (at, (id, len)) in elements.iter().enumerate() {
        let element = UsedElem { id: (*id).into(), len: (*len).into() };
        pair.view.map().write_obj(Gpa(USED + (RING_ENTRIES + 8 * at) as u64), &element).unwrap();
    }
    pair.view.map().write_obj(Gpa(USED + RING_IDX as u64), &index.to_le_bytes()).unwrap();
    let mut ids = Vec::new();
    let popped = loop {
        match pair.completer.pop() {
            Ok(Some(done)) => {
                ids.push(done.id);
                pair.completer.give_back(done.id);
            }
            Ok(None) => break Ok(ids),
            Err(error) => {
                // The error is latched.
                assert_eq!(pair.completer.pop(), Err(error));
                break Err(error);
            }
        }
    };
    (pair, popped)
}

#[test]
fn impossible_used_elements_are_errors() {
    assert_eq!(pop_used(2, &[(1, 10), (0, 0)]).1, Ok(vec![1, 0]));
    assert_eq!(pop_used(9, &[]).1, Err(UsedError::Index { from: 0, to: 9, size: 8 }));
    assert_eq!(pop_used(1, &[(8, 0)]).1, Err(UsedError::Id { id: 8 }));
    assert_eq!(pop_used(1, &[(u32::MAX, 0)]).1, Err(UsedError::Id { id: u32::MAX }));
    assert_eq!(pop_used(1, &[(5, 0)]).1, Err(UsedError::Id { id: 5 }));
    assert_eq!(pop_used(2, &[(1, 0), (1, 0)]).1, Err(UsedError::Id { id: 1 }));
    assert_eq!(pop_used(1, &[(0, 11)]).1, Err(UsedError::Length { id: 0, len: 11, room: 10 }));
}

#[test]
fn one_element_stands_for_a_batch() {
    // Ids are used from 0 on.
    assert_eq!(pop_used_of(true, 5, 3, &[(2, 0)]).1, Ok(vec![0, 1, 2]));
    assert_eq!(pop_used_of(true, 5, 5, &[(2, 0), (9, 9), (9, 9), (3, 0), (4, 0)]).1, Ok(vec![0, 1, 2, 3, 4]));
    // The batch is longer, or shorter, than the index says.
    assert_eq!(pop_used_of(true, 5, 2, &[(2, 0)]).1, Err(UsedError::Id { id: 2 }));
    assert!(pop_used_of(true, 5, 3, &[(1, 0)]).1.is_err());
    assert!(pop_used_of(true, 2, 3, &[(1, 0), (0, 0), (0, 0)]).1.is_err());
}

proptest! {
    /// Each id comes back at most once and the loop ends, for any bytes that the device writes.
    #[test]
    fn no_used_ring_does_harm(index: u16, elements in proptest::collection::vec((0u32..10, 0u32..12), 8)) {
        let (mut pair, popped) = pop_used(index, &elements);
        if let Ok(ids) = popped {
            prop_assert!(ids.len() <= 2);
        }
        prop_assert!(pair.submitter.room() <= 8);
    }
}
