//! Tests the device's end against a small driver: each chain arrives once, as it was written, in any size and
//! order.
#![allow(clippy::unwrap_used, reason = "tests")]

mod model;

use kickless_memory::Gpa;
use kickless_testing::Random;
use kickless_virtqueue::device::{Metadata, Options, Queue};
use kickless_virtqueue::{Buffer, Chain, ChainId, INDIRECT_CHAIN_MAX};
use model::{ADDRESSES, Buf, Driver, memory};
use proptest::prelude::*;
use std::collections::{HashMap, VecDeque};

/// Generates a chain of up to `max` buffers anywhere in the address space. Readable ones come first, and some
/// are empty.
fn random_bufs(random: &mut Random, max: u64) -> Vec<Buf> {
    let n = 1 + random.below(max);
    let readable = random.below(n + 1);
    (0..n)
        .map(|i| Buf {
            addr: random.next(),
            len: if random.one_in(8) { 0 } else { random.next() as u32 >> 12 },
            writable: i >= readable,
        })
        .collect()
}

fn expected(bufs: &[Buf], writable: bool) -> Vec<Buffer> {
    bufs.iter()
        .filter(|b| b.writable == writable && b.len != 0)
        .map(|b| Buffer { addr: Gpa(b.addr), len: b.len })
        .collect()
}

struct Rig {
    random: Random,
    driver: Driver,
    queue: Queue,
    chain: Chain,
    /// Chains that are published and not popped.
    waiting: VecDeque<(u16, Vec<Buf>)>,
    /// Chains that are added and not published.
    unpublished: Vec<(u16, Vec<Buf>)>,
    /// Chains that are popped and not pushed.
    held: Vec<ChainId>,
    /// Chains that are pushed and not taken back by the driver, with lengths.
    pushed: HashMap<u16, u32>,
    /// Whether the device sleeps until it is kicked.
    asleep: bool,
    /// Whether the driver has asked for a call and not got it.
    wants_call: bool,
}

impl Rig {
    fn add(&mut self) {
        let size = u64::from(self.driver.options.size());
        for _ in 0..=self.random.below(size.min(64)) {
            let bufs = random_bufs(&mut self.random, size.min(12));
            let direct = match self.random.below(3) {
                _ if !self.driver.options.indirect() => bufs.len(),
                0 => 0,
                1 => self.random.below(bufs.len() as u64) as usize,
                _ => bufs.len(),
            };
            let Some(head) = self.driver.add(&bufs, direct) else { break };
            self.unpublished.push((head, bufs));
        }
        if self.random.one_in(2) {
            self.publish_avail();
        }
    }

    fn publish_avail(&mut self) {
        let more = !self.unpublished.is_empty();
        self.waiting.extend(self.unpublished.drain(..));
        let kick = self.driver.publish();
        if self.asleep && more {
            assert!(kick, "the device sleeps and is not kicked");
            self.asleep = false;
        }
    }

    fn pop(&mut self) {
        self.asleep = false;
        for _ in 0..=self.random.below(u64::from(self.driver.options.size())) {
            let popped = self.queue.pop(&self.driver.view, &mut self.chain).unwrap();
            assert_eq!(popped, self.queue.is_mapped() && !self.waiting.is_empty());
            if !popped {
                break;
            }
            let (head, bufs) = self.waiting.pop_front().unwrap();
            assert_eq!(self.chain.id.head(), head);
            assert_eq!(self.chain.readable(), expected(&bufs, false));
            assert_eq!(self.chain.writable(), expected(&bufs, true));
            let bytes = |writable| expected(&bufs, writable).iter().map(|b| u64::from(b.len)).sum::<u64>();
            assert_eq!((self.chain.readable_len(), self.chain.writable_len()), (bytes(false), bytes(true)));
            self.held.push(self.chain.id);
        }
        assert_eq!(usize::from(self.queue.in_flight()), self.held.len());
    }

    fn push(&mut self) {
        for _ in 0..self.random.below(1 + self.held.len() as u64) {
            let at = self.random.below(self.held.len() as u64) as usize;
            let (id, len) = (self.held.swap_remove(at), self.random.next() as u32);
            self.queue.push(id, len);
            assert_eq!(self.pushed.insert(id.head(), len), None);
        }
        if self.random.one_in(2) {
            self.publish_used();
        }
    }

    fn publish_used(&mut self) {
        self.take();
        // The driver cannot see the others yet.
        let new = !self.pushed.is_empty();
        let call = self.queue.publish();
        if self.wants_call && new && self.queue.is_mapped() {
            assert!(call, "the driver waits and is not called");
        }
        self.wants_call &= !call;
    }

    fn take(&mut self) {
        while let Some((head, len)) = self.driver.take() {
            assert_eq!(self.pushed.remove(&head), Some(len));
        }
    }

    fn sleep(&mut self) {
        let work = self.queue.arm();
        if self.queue.is_mapped() {
            assert_eq!(work, !self.waiting.is_empty());
            assert_eq!(self.queue.has_work(), work);
            self.asleep = !work;
        }
    }

    fn driver_sleeps(&mut self) {
        self.take();
        assert!(!self.driver.enable_calls());
        self.wants_call = true;
    }

    fn step(&mut self) {
        match self.random.below(16) {
            0..4 => self.add(),
            4 => self.publish_avail(),
            5..8 => self.pop(),
            8..11 => self.push(),
            11 => self.publish_used(),
            12 => self.take(),
            13 => self.sleep(),
            14 => self.driver_sleeps(),
            _ => {
                self.asleep = false;
                match self.random.below(6) {
                    0 => self.queue.unmap(),
                    1 => self.queue.remap(self.driver.metadata()),
                    _ => self.queue.disarm(),
                }
            }
        }
    }

    fn finish(&mut self) {
        self.queue.remap(self.driver.metadata());
        self.publish_avail();
        while !self.waiting.is_empty() {
            self.pop();
        }
        assert!(!self.queue.pop(&self.driver.view, &mut self.chain).unwrap());
        while !self.held.is_empty() {
            self.push();
        }
        self.publish_used();
        self.take();
        assert!(self.pushed.is_empty());
        assert_eq!(self.driver.free(), usize::from(self.driver.options.size()));
        assert_eq!(self.queue.in_flight(), 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn each_chain_once(
        seed: u64, log_size in 0u32..16, event_idx: bool, indirect: bool, start: u16, steps in 1usize..400,
    ) {
        let options = Options::new(1 << log_size, event_idx, indirect).unwrap();
        let driver = Driver::new(options, start);
        let queue = driver.device();
        let mut rig = Rig {
            random: Random(seed),
            driver,
            queue,
            chain: Chain::default(),
            waiting: VecDeque::new(),
            unpublished: Vec::new(),
            held: Vec::new(),
            pushed: HashMap::new(),
            asleep: false,
            wants_call: false,
        };
        for _ in 0..steps {
            rig.step();
        }
        rig.finish();
    }
}

#[test]
fn sizes() {
    for size in 0..=u16::MAX {
        assert_eq!(Options::new(size, false, false).is_ok(), size.count_ones() == 1, "{size}");
    }
}

#[test]
fn alignment_and_bounds_of_areas() {
    let view = memory();
    let options = Options::new(256, true, true).unwrap();
    let at = |desc, avail, used| {
        let mut addresses = ADDRESSES;
        addresses.desc.0 = addresses.desc.0.wrapping_add(desc);
        addresses.avail.0 += avail;
        addresses.used.0 += used;
        Metadata::map(&view, &addresses, &options).is_ok()
    };
    assert!(at(0, 0, 0));
    assert!(at(16, 2, 4));
    assert!(!at(8, 0, 0));
    assert!(!at(0, 1, 0));
    assert!(!at(0, 0, 2));
    // A table that crosses from slot to slot is accessed in pieces.
    assert!(at(model::SEAM - 16, 0, 0));
    assert!(!at(model::SEAM - 8, 0, 0));
    // Past the end of memory, and past the end of all addresses.
    assert!(!at(model::MEMORY - 16, 0, 0));
    assert!(!at(model::MEMORY, 0, 0));
    assert!(!at(u64::MAX - model::USER - 15, 0, 0));
}

/// Each size, from a start just before the indices wrap. The ring wraps more than once.
#[test]
fn indices_wrap() {
    for log_size in 0..16 {
        for event_idx in [false, true] {
            let options = Options::new(1 << log_size, event_idx, false).unwrap();
            let mut driver = Driver::new(options, 65_533u16.wrapping_sub(options.size()));
            let (mut queue, mut chain) = (driver.device(), Chain::default());
            for round in 0..4 {
                let heads: Vec<u16> = (0..options.size())
                    .map(|i| driver.add(&[Buf { addr: u64::from(i), len: 1, writable: true }], 1).unwrap())
                    .collect();
                assert_eq!(driver.add(&[Buf { addr: 0, len: 1, writable: true }], 1), None);
                driver.publish();
                assert_eq!(queue.pending(), options.size());
                let mut ids = Vec::new();
                for &head in &heads {
                    assert!(queue.pop(&driver.view, &mut chain).unwrap());
                    assert_eq!(chain.id.head(), head);
                    ids.push(chain.id);
                }
                assert!(!queue.pop(&driver.view, &mut chain).unwrap());
                for id in ids.into_iter().rev() {
                    queue.push(id, round + u32::from(id.head()));
                }
                assert_eq!(driver.take(), None, "invisible until published");
                let _ = queue.publish();
                for &head in heads.iter().rev() {
                    assert_eq!(driver.take(), Some((head, round + u32::from(head))));
                }
            }
        }
    }
}

/// A device that polls never gets a kick, however often the indices wrap, with either kind of suppression.
/// When it arms once more, it gets exactly one.
#[test]
fn a_polling_device_gets_no_kick() {
    for (log_size, event_idx) in [(0, true), (0, false), (8, true), (8, false), (14, true), (15, true)] {
        let options = Options::new(1 << log_size, event_idx, false).unwrap();
        for armed_before in [false, true] {
            let mut driver = Driver::new(options, 3);
            let (mut queue, mut chain) = (driver.device(), Chain::default());
            let mut random = Random(log_size);
            let mut round = |queue: &mut Queue, most: u64| {
                let n = 1 + random.below(most);
                for _ in 0..n {
                    driver.add(&[Buf { addr: 0, len: 1, writable: true }], 1).unwrap();
                }
                let kick = driver.publish();
                while queue.pop(&driver.view, &mut chain).unwrap() {
                    queue.push(chain.id, 0);
                }
                let _ = queue.publish();
                while driver.take().is_some() {}
                (kick, n)
            };
            if armed_before {
                assert!(!queue.arm());
                assert!(round(&mut queue, 1).0);
            }
            queue.disarm();
            let (mut kicks, mut requests) = (0, 0);
            while requests < 400_000 {
                let (kick, n) = round(&mut queue, u64::from(options.size()));
                kicks += u32::from(kick);
                requests += n;
            }
            assert_eq!(kicks, 0, "size {} event_idx {event_idx}", options.size());
            assert!(!queue.arm());
            assert!(round(&mut queue, 1).0);
            if event_idx {
                assert!(!round(&mut queue, 1).0, "asked for once, told once");
            }
        }
    }
}

#[test]
fn the_decision_to_call_covers_all_published_elements() {
    for (asked_at, called_in) in [(0, Some(0)), (1, Some(0)), (2, Some(1)), (4, Some(2)), (5, None)] {
        let options = Options::new(8, true, false).unwrap();
        let mut driver = Driver::new(options, 65_534);
        let (mut queue, mut chain) = (driver.device(), Chain::default());
        let round = |driver: &mut Driver, queue: &mut Queue, chain: &mut Chain, n| {
            for _ in 0..n {
                driver.add(&[Buf { addr: 0, len: 1, writable: true }], 1).unwrap();
            }
            driver.publish();
            while queue.pop(&driver.view, chain).unwrap() {
                queue.push(chain.id, 0);
            }
            queue.publish()
        };
        assert!(round(&mut driver, &mut queue, &mut chain, 1), "the first time in doubt");
        driver.take().unwrap();
        // used_event is this far past index 65535.
        let event = 65_535u16.wrapping_add(asked_at);
        driver.view.map().write_obj(Gpa(model::AVAIL + 4 + 16), &event).unwrap();
        let calls: Vec<bool> = [2, 2, 1].map(|n| round(&mut driver, &mut queue, &mut chain, n)).into();
        assert_eq!(calls.iter().position(|&c| c), called_in, "asked at {asked_at}: {calls:?}");
        assert!(calls.iter().filter(|&&c| c).count() <= 1);
        assert!(!queue.publish(), "nothing new");
    }
}

#[test]
fn chains_pushed_while_unmapped_are_published_later() {
    let options = Options::new(4, true, false).unwrap();
    let mut driver = Driver::new(options, 65_535);
    let (mut queue, mut chain) = (driver.device(), Chain::default());
    for _ in 0..4 {
        driver.add(&[Buf { addr: 0, len: 1, writable: true }], 1).unwrap();
    }
    driver.publish();
    let mut ids = Vec::new();
    while queue.pop(&driver.view, &mut chain).unwrap() {
        ids.push(chain.id);
    }
    queue.push(ids[0], 10);
    assert!(queue.publish());
    queue.push(ids[1], 11);
    queue.unmap();
    assert!(!queue.is_mapped() && !queue.has_work() && !queue.arm());
    queue.push(ids[2], 12);
    assert!(!queue.publish());
    assert!(!queue.pop(&driver.view, &mut chain).unwrap());
    assert_eq!(driver.take(), Some((ids[0].head(), 10)));
    assert_eq!(driver.take(), None, "neither what was pushed before the areas went, nor after");
    assert!(!driver.enable_calls());
    queue.unmap();
    // Their descriptors were overwritten in the meantime.
    driver.view.map().write_obj(Gpa(model::USED + 4), &[0xffu8; 8]).unwrap();
    queue.remap(driver.metadata());
    queue.push(ids[3], 13);
    assert!(queue.publish(), "asked for before");
    for (id, len) in ids.iter().zip(10..).skip(1) {
        assert_eq!(driver.take(), Some((id.head(), len)));
    }
}

/// Linux' driver makes chains as long as the config space allows, in a queue of any size.
#[test]
fn indirect_chains_longer_than_the_queue() {
    let options = Options::new(2, false, true).unwrap();
    let mut driver = Driver::new(options, 0);
    let (mut queue, mut chain) = (driver.device(), Chain::default());
    let bufs: Vec<Buf> = (0..INDIRECT_CHAIN_MAX)
        .map(|i| Buf { addr: u64::from(i), len: u32::from(i) + 1, writable: i >= 500 })
        .collect();
    driver.add(&bufs, 0).unwrap();
    driver.publish();
    assert!(queue.pop(&driver.view, &mut chain).unwrap());
    assert_eq!((chain.readable().len(), chain.writable().len()), (500, 524));
    assert_eq!(chain.writable()[0], Buffer { addr: Gpa(500), len: 501 });
    assert_eq!((chain.descriptors(), chain.ring_descriptors()), (INDIRECT_CHAIN_MAX, 1));
    chain.clear(32);
    assert!(chain.writable().is_empty() && chain.readable().is_empty() && chain.capacity() <= 32);
    assert_eq!((chain.readable_len(), chain.writable_len(), chain.ring_descriptors()), (0, 0, 0));
}

#[test]
fn an_indirect_table_in_two_slots() {
    let options = Options::new(2, false, true).unwrap();
    let mut driver = Driver::new(options, 0);
    let (mut queue, mut chain) = (driver.device(), Chain::default());
    // The second descriptor itself crosses from slot to slot.
    let table = model::SEAM - 24;
    for i in 0..3u16 {
        let flags = if i < 2 { 1 } else { 2 };
        let desc = model::desc(u64::from(i), 10, flags, i + 1);
        driver.view.map().write_obj(Gpa(table + 16 * u64::from(i)), &desc).unwrap();
    }
    driver.write_desc(1, table, 48, 4, 0);
    driver.offer(1);
    driver.publish();
    assert!(queue.pop(&driver.view, &mut chain).unwrap());
    assert_eq!(chain.readable(), [0, 1].map(|i| Buffer { addr: Gpa(i), len: 10 }));
    assert_eq!(chain.writable(), [Buffer { addr: Gpa(2), len: 10 }]);
}

/// An index that was shown is not stored again, because the driver may be polling it. Publishing then only
/// decides about the call.
#[test]
fn published_elements_are_not_stored_again() {
    const USED_IDX: Gpa = Gpa(model::USED + 2);
    for event_idx in [false, true] {
        let mut driver = Driver::new(Options::new(8, event_idx, false).unwrap(), 0);
        let head = driver.add(&[Buf { addr: 0, len: 1, writable: true }], 1).unwrap();
        let _ = driver.publish();
        let mut queue = driver.device();
        let mut chain = Chain::default();
        assert_eq!(queue.pop(&driver.view, &mut chain), Ok(true));
        assert_eq!(chain.id.head(), head);
        queue.push(chain.id, 1);
        queue.show();
        assert_eq!(driver.view.read_obj::<[u8; 2]>(USED_IDX).unwrap(), [1, 0]);
        driver.view.map().write_obj(USED_IDX, &[7u8, 7]).unwrap();
        assert!(queue.publish(), "it was not decided about before");
        assert!(!queue.publish(), "it was");
        assert_eq!(driver.view.read_obj::<[u8; 2]>(USED_IDX).unwrap(), [7, 7]);
    }
}
