//! Tests of hostile drivers: each error by name, and random contents.
#![allow(clippy::unwrap_used, reason = "tests")]

mod model;

use kickless_memory::{Gpa, View};
use kickless_testing::Random;
use kickless_virtqueue::device::{Direction, Metadata, Options, Queue, SingleChain};
use kickless_virtqueue::{Chain, INDIRECT_CHAIN_MAX, RingError};
use model::Driver;
use proptest::prelude::*;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// Returns a ring of 8 whose entry 0 is head 0, with these descriptors from 0 on.
fn ring(indirect: bool, descs: &[(u64, u32, u16, u16)]) -> (Driver, Queue) {
    let mut driver = Driver::new(Options::new(8, false, indirect).unwrap(), 0);
    for (i, &(addr, len, flags, next)) in descs.iter().enumerate() {
        driver.write_desc(i as u16, addr, len, flags, next);
    }
    driver.offer(0);
    driver.publish();
    let queue = driver.device();
    (driver, queue)
}

/// Returns the error of the first pop, which must be the error of every later one.
fn error(driver: &Driver, queue: &mut Queue) -> RingError {
    let mut chain = Chain::default();
    let next = queue.next_avail();
    let error = queue.pop(&driver.view, &mut chain).unwrap_err();
    queue.prefetch(&driver.view);
    assert_eq!(queue.pop(&driver.view, &mut chain), Err(error));
    assert_eq!((queue.broken(), queue.next_avail(), queue.in_flight()), (Some(error), next, 0));
    assert!(!queue.has_work() && !queue.arm());
    queue.remap(driver.metadata());
    assert_eq!(queue.pop(&driver.view, &mut chain), Err(error), "a new mapping heals nothing");
    error
}

fn direct(descs: &[(u64, u32, u16, u16)]) -> RingError {
    let (driver, mut queue) = ring(true, descs);
    error(&driver, &mut queue)
}

/// Makes descriptor 0 an indirect table at `addr` of `len` bytes, with `table` at 0x10_0000.
fn indirect(addr: u64, len: u32, table: &[(u64, u32, u16, u16)]) -> RingError {
    let (driver, mut queue) = ring(true, &[(addr, len, INDIRECT, 0)]);
    for (i, &(addr, len, flags, next)) in table.iter().enumerate() {
        let at = Gpa(model::TABLES + 16 * i as u64);
        driver.view.map().write_obj(at, &model::desc(addr, len, flags, next)).unwrap();
    }
    error(&driver, &mut queue)
}

#[test]
fn avail_index_too_far() {
    let (driver, mut queue) = ring(false, &[]);
    driver.publish_as(9);
    assert_eq!(error(&driver, &mut queue), RingError::AvailIndex { idx: 9, next: 0, room: 8 });
}

#[test]
fn avail_index_behind() {
    let (driver, mut queue) = ring(false, &[]);
    driver.publish_as(u16::MAX);
    assert_eq!(error(&driver, &mut queue), RingError::AvailIndex { idx: 65_535, next: 0, room: 8 });
}

/// Refuses more chains at once than there are descriptors. Chains that the device holds count, and so do
/// pushed ones that are not published: new chains would overwrite their elements in the used ring.
#[test]
fn more_in_flight_than_descriptors() {
    for (published, pushed) in [(0, 0), (0, 3), (0, 8), (1, 0), (3, 2), (8, 0)] {
        for ends in [false, true] {
            let (driver, mut queue) = ring(false, &[(0, 1, 0, 0)]);
            let mut chain = Chain::default();
            driver.publish_as(8);
            let mut ids = Vec::new();
            for _ in 0..8 {
                assert_eq!(queue.pop(&driver.view, &mut chain), Ok(true));
                ids.push(chain.id);
            }
            let mut ids = ids.into_iter();
            ids.by_ref().take(published.into()).for_each(|id| queue.push(id, 0));
            let _ = queue.publish();
            ids.by_ref().take(pushed.into()).for_each(|id| queue.push(id, 0));
            let idx = 8 + published + 1;
            driver.publish_as(idx);
            let error = RingError::AvailIndex { idx, next: 8, room: published };
            assert_eq!(queue.pop(&driver.view, &mut chain), Err(error));
            let left = 8 - published - pushed;
            assert_eq!(queue.in_flight(), left);
            if ends {
                assert_eq!(queue.take_unpublished().len(), usize::from(pushed));
            } else {
                // The popped chains can still be given back.
                ids.for_each(|id| queue.push(id, 0));
                let _ = queue.publish();
                assert_eq!(driver.view.read_obj::<[u8; 2]>(Gpa(model::USED + 2)).unwrap(), [8, 0]);
            }
        }
    }
}

#[test]
fn head_out_of_range() {
    let mut driver = Driver::new(Options::new(8, false, false).unwrap(), 0);
    driver.offer(8);
    driver.publish();
    let mut queue = driver.device();
    assert_eq!(error(&driver, &mut queue), RingError::Head { head: 8, size: 8 });
}

#[test]
fn next_out_of_range() {
    assert_eq!(direct(&[(0, 1, NEXT, 8)]), RingError::Next { head: 0, next: 8, entries: 8 });
    let next = indirect(model::TABLES, 32, &[(0, 1, NEXT, 2)]);
    assert_eq!(next, RingError::Next { head: 0, next: 2, entries: 2 });
}

#[test]
fn loops() {
    assert_eq!(direct(&[(0, 1, NEXT, 0)]), RingError::TooLong { head: 0, max: 8 });
    assert_eq!(direct(&[(0, 1, NEXT, 1), (0, 0, NEXT, 0)]), RingError::TooLong { head: 0, max: 8 });
    let looped = indirect(model::TABLES, 32, &[(0, 1, NEXT, 1), (0, 1, NEXT, 0)]);
    assert_eq!(looped, RingError::TooLong { head: 0, max: INDIRECT_CHAIN_MAX });
}

#[test]
fn longest_chain_is_legal() {
    let descs: Vec<_> = (0..8).map(|i| (0, 1, if i < 7 { NEXT } else { 0 }, i + 1)).collect();
    let (driver, mut queue) = ring(false, &descs);
    let mut chain = Chain::default();
    assert_eq!(queue.pop(&driver.view, &mut chain), Ok(true));
    assert_eq!(chain.readable().len(), 8);
}

#[test]
fn more_than_4_gib() {
    let most = [(0, u32::MAX, NEXT, 1), (0, 1, WRITE, 0)];
    let (driver, mut queue) = ring(false, &most);
    let mut chain = Chain::default();
    assert_eq!(queue.pop(&driver.view, &mut chain), Ok(true), "2^32 bytes are legal");
    assert_eq!(chain.readable_len() + chain.writable_len(), 1 << 32);
    let more = direct(&[(0, u32::MAX, NEXT, 1), (0, 2, WRITE, 0)]);
    assert_eq!(more, RingError::TooManyBytes { head: 0, len: (1 << 32) + 1 });
}

#[test]
fn readable_after_writable() {
    assert_eq!(direct(&[(0, 1, NEXT | WRITE, 1), (0, 1, 0, 0)]), RingError::Order { head: 0 });
    assert_eq!(direct(&[(0, 0, NEXT | WRITE, 1), (0, 0, 0, 0)]), RingError::Order { head: 0 });
    let (driver, mut queue) = ring(true, &[(0, 1, NEXT | WRITE, 1), (model::TABLES, 16, INDIRECT, 0)]);
    assert_eq!(error(&driver, &mut queue), RingError::Order { head: 0 }, "the rule crosses into the table");
}

#[test]
fn indirect_not_negotiated() {
    let (driver, mut queue) = ring(false, &[(model::TABLES, 16, INDIRECT, 0)]);
    assert_eq!(error(&driver, &mut queue), RingError::IndirectNotNegotiated { head: 0 });
}

#[test]
fn indirect_in_indirect() {
    let nested = indirect(model::TABLES, 32, &[(0, 1, NEXT, 1), (model::TABLES, 16, INDIRECT, 0)]);
    assert_eq!(nested, RingError::IndirectNested { head: 0 });
}

#[test]
fn indirect_with_next() {
    let both = direct(&[(model::TABLES, 16, INDIRECT | NEXT, 3)]);
    assert_eq!(both, RingError::IndirectNext { head: 0, next: 3 });
}

#[test]
fn indirect_table_length() {
    for len in [0, 1, 8, 15, 17, u32::MAX] {
        assert_eq!(indirect(model::TABLES, len, &[]), RingError::IndirectLen { head: 0, len });
    }
}

#[test]
fn indirect_table_outside_memory() {
    for (addr, len) in [(model::MEMORY, 16), (u64::MAX - 15, 16), (u64::MAX, 16), (model::MEMORY - 8, 16)] {
        assert_eq!(indirect(addr, len, &[]), RingError::IndirectUnmapped { head: 0, addr, len });
    }
    // The first descriptor is in memory. The second is not, or lies past the end of all addresses.
    let (driver, mut queue) = ring(true, &[(model::MEMORY - 16, 32, INDIRECT, 0)]);
    let at = Gpa(model::MEMORY - 16);
    driver.view.map().write_obj(at, &model::desc(0, 1, NEXT, 1)).unwrap();
    let unmapped = RingError::IndirectUnmapped { head: 0, addr: model::MEMORY - 16, len: 32 };
    assert_eq!(error(&driver, &mut queue), unmapped);
}

/// The device ignores WRITE on the descriptor of a table. A table may follow direct descriptors. Empty
/// buffers are left out.
#[test]
fn unusual_but_legal() {
    let (driver, mut queue) = ring(true, &[(0x1000, 16, NEXT, 1), (model::TABLES, 48, INDIRECT | WRITE, 0)]);
    for (i, (len, flags)) in [(512, NEXT), (0, NEXT | WRITE), (1, WRITE)].into_iter().enumerate() {
        let desc = model::desc(0x2000, len, flags, i as u16 + 1);
        driver.view.map().write_obj(Gpa(model::TABLES + 16 * i as u64), &desc).unwrap();
    }
    let mut chain = Chain::default();
    assert_eq!(queue.pop(&driver.view, &mut chain), Ok(true));
    let lens = |buffers: &[kickless_virtqueue::Buffer]| buffers.iter().map(|b| b.len).collect::<Vec<_>>();
    assert_eq!((lens(chain.readable()), lens(chain.writable())), (vec![16, 512], vec![1]));
}

/// Fills memory with bytes, half of them random, half of them almost valid.
fn scribble(random: &mut Random, driver: &Driver) {
    let size = u64::from(driver.options.size());
    for _ in 0..random.below(64) {
        let bytes = random.next();
        let at = match random.below(4) {
            0 => model::DESC + random.below(16 * size),
            1 => model::AVAIL + random.below(6 + 2 * size),
            2 => model::USED + random.below(6 + 8 * size),
            _ => model::TABLES + random.below(4096),
        };
        driver.view.map().write_obj(Gpa(at), &bytes.to_le_bytes()).unwrap();
    }
    for _ in 0..random.below(64) {
        let near = [0, model::TABLES, model::SEAM - 24, model::MEMORY - 16][random.below(4) as usize];
        let (len, flags) = (16 * random.below(5) as u32, random.below(8) as u16);
        let desc = model::desc(near + random.below(3), len, flags, random.below(size + 1) as u16);
        let at =
            if random.one_in(2) { model::TABLES + 16 * random.below(8) } else { 16 * random.below(size) };
        driver.view.map().write_obj(Gpa(at), &desc).unwrap();
    }
}

/// With IN_ORDER, chains with one head go back in the order of their pops, each with its own length.
#[test]
fn the_same_head_twice_in_order() {
    let options = Options::new(4, false, false).unwrap().with_in_order(true);
    let driver = Driver::new(options, 0);
    let (mut queue, mut chain, mut ids) = (driver.device(), Chain::default(), Vec::new());
    // All entries of the avail ring name descriptor 0.
    driver.publish_as(4);
    while queue.pop(&driver.view, &mut chain).unwrap() {
        assert_eq!(chain.id.head(), 0);
        ids.push(chain.id);
    }
    assert_eq!(ids.len(), 4);
    let used = |at: u64| driver.view.read_obj::<[u32; 2]>(Gpa(model::USED + 4 + 8 * at)).unwrap();
    for nth in [3, 1, 2] {
        queue.push(ids[nth], 10 + nth as u32);
        let _ = queue.publish();
        assert_eq!(driver.view.read_obj::<u16>(Gpa(model::USED + 2)).unwrap(), 0);
    }
    queue.push(ids[0], 10);
    let _ = queue.publish();
    assert_eq!(driver.view.read_obj::<u16>(Gpa(model::USED + 2)).unwrap(), 4);
    assert_eq!([0, 1, 2, 3].map(used), [[0, 10], [0, 11], [0, 12], [0, 13]]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn rubbish(seed: u64, log_size in 0u32..16, event_idx: bool, indirect: bool, start: u16) {
        let options = Options::new(1 << log_size, event_idx, indirect).unwrap();
        let mut random = Random(seed);
        let mut driver = Driver::new(options, start);
        let mut chain = Chain::default();
        for _ in 0..4 {
            let mut queue = driver.device();
            if random.one_in(4) {
                let _ = queue.continue_from_used();
            }
            let mut held = Vec::new();
            for _ in 0..random.below(64) {
                match random.below(8) {
                    0 => scribble(&mut random, &driver),
                    1 => driver.publish_as(queue.next_avail().wrapping_add(random.below(4) as u16)),
                    2 => {
                        driver.offer(random.below(u64::from(options.size()) + 1) as u16);
                        driver.publish();
                    }
                    3 => { let _ = queue.arm(); }
                    4 => queue.disarm(),
                    5 => { let _ = queue.publish(); }
                    6 => match random.below(3) {
                        0 => queue.unmap(),
                        1 => queue.remap(driver.metadata()),
                        _ => {
                            if let Some(head) = held.pop() { queue.push(head, 1) }
                        }
                    },
                    _ => while let Ok(true) = queue.pop(&driver.view, &mut chain) {
                        queue.prefetch(&driver.view);
                        let max = usize::from(options.size().max(INDIRECT_CHAIN_MAX));
                        prop_assert!(chain.id.head() < options.size());
                        prop_assert!(chain.readable().len() + chain.writable().len() <= max);
                        prop_assert!(chain.readable_len() + chain.writable_len() <= 1 << 32);
                        held.push(chain.id);
                        prop_assert_eq!(held.len(), usize::from(queue.in_flight()));
                        prop_assert!(held.len() <= usize::from(options.size()));
                    },
                }
            }
        }
    }
}

/// Returns a packed ring of four with these descriptors from 0 on: ids and flags.
fn packed(descs: &[(u16, u16)], base: u16) -> (std::sync::Arc<View>, Queue) {
    packed_of(4, descs, base)
}

fn packed_of(size: u16, descs: &[(u16, u16)], base: u16) -> (std::sync::Arc<View>, Queue) {
    let view = model::memory();
    for (at, &(id, flags)) in descs.iter().enumerate() {
        set_packed(&view, at as u64, id, flags);
    }
    let options = Options::packed(size, true, true).unwrap();
    let metadata = Metadata::map(&view, &model::ADDRESSES, &options).unwrap();
    let queue = Queue::new(options, metadata, base);
    (view, queue)
}

fn set_packed(view: &View, at: u64, id: u16, flags: u16) {
    view.map().write_obj(Gpa(model::DESC + 16 * at), &0x1000u64.to_le_bytes()).unwrap();
    view.map().write_obj(Gpa(model::DESC + 16 * at + 8), &16u32.to_le_bytes()).unwrap();
    view.map().write_obj(Gpa(model::DESC + 16 * at + 12), &id.to_le_bytes()).unwrap();
    view.map().write_obj(Gpa(model::DESC + 16 * at + 14), &flags.to_le_bytes()).unwrap();
}

const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;

/// Counting the pending chains takes no longer in a large ring than in one of 256.
#[test]
fn pending_chains_of_a_packed_ring() {
    assert_eq!(packed_of(1024, &[], 0x8000).1.pending(), 0);
    let descs = [(0, AVAIL | NEXT), (0, AVAIL), (1, AVAIL), (2, 0)];
    assert_eq!(packed_of(1024, &descs, 0x8000).1.pending(), 2);
    assert_eq!(packed(&[(0, AVAIL); 4], 0x8000).1.pending(), 4);
    assert_eq!(packed_of(1024, &[(0, AVAIL); 1024], 0x8000).1.pending(), 256);
    // One chain, whose end is far away.
    assert_eq!(packed_of(1024, &[(0, AVAIL | NEXT); 1000], 0x8000).1.pending(), 1);
}

/// A driver that makes more descriptors available than its packed ring has breaks the ring. Without this
/// error, the queue would always report work, but never pop it.
#[test]
fn more_than_a_packed_ring_has() {
    let descs = [(0, AVAIL | 1), (0, AVAIL | 1), (0, AVAIL | 1), (0, AVAIL)];
    let (view, mut queue) = packed(&descs, 0x8000);
    let mut chain = Chain::default();
    assert_eq!(queue.pop(&view, &mut chain), Ok(true));
    let id = chain.id;
    assert_eq!(queue.pop(&view, &mut chain), Ok(false));
    set_packed(&view, 0, 1, USED);
    assert_eq!(queue.pop(&view, &mut chain), Err(RingError::Full));
    assert!(!queue.arm() && !queue.has_work());
    // The held chains must still go back.
    queue.push(id, 0);
    let _ = queue.publish();
    assert_eq!(queue.in_flight(), 0);
}

#[test]
fn ids_of_a_packed_ring_are_the_drivers() {
    let (view, mut queue) = packed(&[(4, AVAIL), (u16::MAX, AVAIL), (4, AVAIL)], 0x8000);
    let mut chain = Chain::default();
    for id in [4, u16::MAX] {
        assert_eq!(queue.pop(&view, &mut chain), Ok(true));
        assert_eq!(chain.id.head(), id);
    }
    assert_eq!(queue.pop(&view, &mut chain), Err(RingError::DuplicateId { id: 4 }));
}

#[test]
fn a_packed_ring_that_was_served_beyond_its_base() {
    let mut chain = Chain::default();
    for (descs, base) in [
        (vec![(0, AVAIL | USED)], 0x8000),
        (vec![(0, AVAIL), (1, AVAIL | USED)], 0x8000),
        (vec![(0, USED), (1, USED), (2, AVAIL | USED)], 0x8002),
    ] {
        let (view, mut queue) = packed(&descs, base);
        assert!(!queue.may_be_beyond_base());
        assert_eq!(queue.pop(&view, &mut chain), Err(RingError::Base { base }), "{descs:?}");
        assert!(!queue.arm() && !queue.has_work());
    }
    for (descs, base, may_be_beyond) in [
        (vec![], 0x8000, false),
        (vec![(0, AVAIL), (1, AVAIL)], 0x8000, false),
        // Used in the previous round, inside a chain of that round. No other ring begins there.
        (vec![(0, AVAIL | USED), (1, 0), (2, USED), (3, 0)], 0x8001, true),
        (vec![(0, 0), (1, AVAIL | USED)], 1, true),
        // Full rings whose device was lost in the first round and in the second. Or, in the second, a
        // chain of two has completed after the other ones, and two of one are in its place.
        (vec![(0, USED), (1, AVAIL), (2, AVAIL), (3, AVAIL)], 0x8000, true),
        (vec![(0, AVAIL), (1, AVAIL), (2, USED), (3, USED)], 0x8000, true),
        (vec![(0, USED), (1, USED), (2, USED), (3, USED)], 0x8000, true),
        // Used in the previous round, which ends with a chain of two.
        (vec![(0, 0), (1, 0), (2, 0), (3, USED)], 0x8000, true),
    ] {
        let (view, mut queue) = packed(&descs, base);
        assert_eq!(queue.may_be_beyond_base(), may_be_beyond, "{descs:?}");
        assert!(queue.pop(&view, &mut chain).is_ok(), "{descs:?}");
    }
}

/// A used descriptor has WRITE if the device has written bytes (virtio 1.3, section 2.8.3).
#[test]
fn the_flags_of_used_descriptors() {
    const BUFFERS: [(u16, u16); 4] =
        [(0, AVAIL | WRITE), (1, AVAIL | WRITE), (2, AVAIL | WRITE), (3, AVAIL | WRITE)];
    for lens in [[16, 0, 5, 0], [0, 3, 0, 7]] {
        let expected = lens.map(|len| AVAIL | USED | if len > 0 { WRITE } else { 0 });
        for peeks in [false, true] {
            let (view, mut queue) = packed(&BUFFERS, 0x8000);
            if peeks {
                let mut chains = [SingleChain::default(); 4];
                assert_eq!(queue.peek(&view, Direction::Writable, &mut chains), 4);
                chains.iter_mut().zip(lens).for_each(|(chain, len)| chain.written = len);
                queue.complete_peeked(&chains);
            } else {
                let mut chain = Chain::default();
                for len in lens {
                    assert_eq!(queue.pop(&view, &mut chain), Ok(true));
                    queue.push(chain.id, len);
                }
            }
            let _ = queue.publish();
            let flags = |at: u64| view.read_obj::<u16>(Gpa(model::DESC + 16 * at + 14)).unwrap();
            assert_eq!([0, 1, 2, 3].map(flags), expected, "peeks: {peeks}");
        }
    }
}
