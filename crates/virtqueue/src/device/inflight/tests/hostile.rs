//! Tests a front-end that writes anything into the region.

use super::device::Device;
use super::memory::World;
use super::{Model, Op, Random, perform, script};
use crate::RingError;
use crate::packed::RingPosition;
use kickless_spec::ring::{DESC_F_INDIRECT, DESC_F_NEXT, RING_IDX};

/// Pops and pushes all chains; at most as many as the ring has.
fn drain(world: &World) {
    world.revive(u64::MAX);
    let mut device = Device::start(world, if world.options.is_packed() { 0x8000 } else { 0 });
    let size = world.options.size();
    assert!(device.resubmissions() <= size && device.in_flight() <= size);
    let mut tags = Vec::new();
    while let Ok(Some(tag)) = device.pop() {
        tags.push(tag);
        assert!(tags.len() <= usize::from(size), "more chains than the ring has");
    }
    for tag in tags {
        device.push(tag);
    }
    device.publish();
}

#[test]
fn rubbish() {
    for (packed, size) in [(false, 4), (true, 5)] {
        for seed in 0..4000 {
            let mut random = Random(seed);
            let world = World::new(packed, size, 0);
            for offset in (0..super::super::at(packed, size)).step_by(2) {
                let value = match random.below(4) {
                    0 => random.next() as u16,
                    1 => random.below(2) as u16,
                    _ => random.below(usize::from(size) + 2) as u16,
                };
                world.region.set(offset, &value);
            }
            // Most regions look used.
            if random.below(8) > 0 {
                world.region.set(8, &[1, size]);
            }
            drain(&world);
        }
    }
}

#[test]
fn nearly_right() {
    for (packed, size) in [(false, 8), (true, 7)] {
        for seed in 0..4000 {
            let mut random = Random(seed << 1);
            let start = if packed { 0x8000 } else { 0 };
            let world = World::new(packed, size, start);
            let mut model = Model::new(&world, start);
            world.revive(u64::MAX);
            let mut device = Device::start(&world, start);
            for op in script(&mut random, 30) {
                if !matches!(op, Op::Unmap) {
                    perform(op, &world, &mut model, &mut device, &mut random);
                }
            }
            for _ in 0..1 + random.below(3) {
                let at = random.below(super::super::at(packed, size) / 2) * 2;
                let value = random.below(usize::from(size) + 2) as u16;
                world.region.set(at, &value);
            }
            drain(&world);
        }
    }
}

/// Lists that lead in a circle, out of the region, or into one another.
#[test]
fn lists() {
    let packed = World::new(true, 4, 0x8000);
    let fresh = || {
        let mut model = Model::new(&packed, 0x8000);
        let mut device = Device::start(&packed, 0x8000);
        model.offer(&mut Random(2));
        assert!(device.pop().unwrap().is_some());
    };
    fresh();
    let entry = |entry: u16, field: usize| super::super::at(true, entry) + field;
    let good: Vec<u16> = (0..160 / 2).map(|at| packed.region.get(2 * at)).collect();
    for (at, value) in [
        (entry(0, 6), 0u16),
        (entry(0, 6), 5),
        (entry(0, 6), u16::MAX),
        (entry(0, 4), 3),
        (entry(0, 2), 0),
        (entry(3, 2), 0),
        (12, 0),
        (14, 0),
        (14, 4),
        (16, 4),
        (18, u16::MAX),
        (8, 2),
        (10, 3),
        (10, 5),
        (entry(0, 18), 0xffff),
    ] {
        let before: u16 = packed.region.get(at);
        packed.region.set(at, &value);
        drain(&packed);
        good.iter().enumerate().for_each(|(at, word)| packed.region.set(2 * at, word));
        assert_eq!(packed.region.get::<u16>(at), before);
    }
    // The inconsistent region is not overwritten.
    packed.region.set(entry(0, 4), &3u16);
    let device = Device::start(&packed, 0x8000);
    assert_eq!(device.resubmissions(), 0);
    packed.region.set(entry(0, 4), &good[entry(0, 4) / 2]);
    assert_eq!(Device::start(&packed, 0x8000).resubmissions(), 1);
}

/// Returns a region of six entries for a ring of four, in which three descriptors are in flight: two chains
/// of a split ring, or one chain of two and one of one. These words are then written to it.
fn with_in_flight(packed: bool, words: &[(usize, u16)]) -> World {
    let start = if packed { 0x8000 } else { 0 };
    let world = World::with_entries(packed, 4, 6, start);
    let mut model = Model::new(&world, start);
    let mut device = Device::start(&world, start);
    for descriptors in [2, 1] {
        model.driver.offer(descriptors).unwrap();
        device.pop().unwrap().unwrap();
    }
    words.iter().for_each(|(at, word)| world.region.set(*at, word));
    world
}

#[test]
fn each_invalid_word_is_named() {
    let split = |entry: u16, field: usize| super::super::at(false, entry) + field;
    let entry = |entry: u16, field: usize| super::super::at(true, entry) + field;
    // No entry is free, and the second chain has four.
    let four_more = [
        (12, 6),
        (14, 6),
        (entry(2, 6), 4),
        (entry(2, 4), 5),
        (entry(2, 18), DESC_F_NEXT),
        (entry(3, 18), DESC_F_NEXT),
        (entry(4, 18), DESC_F_NEXT),
        (entry(5, 16), 77),
    ];
    let invalid = [
        (false, vec![(8, 2)], "version", 2),
        (false, vec![(10, 3)], "number of entries", 3),
        (false, vec![(10, 7)], "number of entries", 7),
        // Five more than the region says were used in a ring of four, or fewer.
        (false, vec![(14, 0xfffb)], "used index", 0xfffb),
        (false, vec![(14, 1)], "used index", 1),
        (false, vec![(14, 0xffff), (12, 6)], "head in the last batch", 6),
        (false, vec![(split(4, 0), 1)], "head in flight", 4),
        (true, vec![(16, 4)], "used index", 4),
        (true, vec![(18, 4)], "used index", 4),
        (true, vec![(entry(0, 6), 0)], "last entry of a chain", 1),
        (true, vec![(entry(2, 6), 0)], "last entry of a chain", 2),
        (true, vec![(entry(0, 4), 0)], "last entry of a chain", 0),
        (true, vec![(entry(0, 18), 0)], "flags of a descriptor", 0),
        (true, vec![(entry(1, 18), DESC_F_NEXT)], "flags of a descriptor", DESC_F_NEXT),
        // A chain that leads back, out of the region, to a free entry, and into another.
        (true, vec![(entry(0, 2), 0)], "entry of a chain", 0),
        (true, vec![(entry(0, 2), 6)], "entry of a chain", 6),
        (true, vec![(entry(0, 2), 3), (entry(0, 4), 3)], "entry of a chain", 3),
        (true, vec![(entry(0, 2), 2), (entry(0, 4), 2)], "entry of a chain", 2),
        (true, vec![(entry(2, 16), 1)], "id in flight twice", 1),
        (true, vec![(entry(2, 0), 0)], "lost entry", 2),
        (true, four_more.to_vec(), "number of descriptors in flight", 6),
    ];
    for (packed, words, field, value) in invalid {
        let world = with_in_flight(packed, &words);
        let bytes =
            || (0..super::super::at(packed, 6)).map(|at| world.region.get::<u8>(at)).collect::<Vec<_>>();
        let before = bytes();
        let mut device = Device::start(&world, if packed { 0x8000 } else { 0 });
        assert_eq!(device.pop(), Err(RingError::Inflight { field, value }), "{words:x?}");
        assert_eq!((device.resubmissions(), device.in_flight()), (0, 0));
        // Another device may be able to use it.
        assert_eq!(world.region.all(), before, "{words:x?}");
    }
    for packed in [false, true] {
        let world = World::with_entries(packed, 4, 3, 0);
        let field = "number of entries that it has room for";
        assert_eq!(Device::start(&world, 0).pop(), Err(RingError::Inflight { field, value: 3 }));
    }
    // At any index, if nothing was in flight.
    let world = World::with_entries(false, 4, 6, 7);
    world.region.set(8, &[1u16, 6, 0, 1]);
    assert_eq!(Device::start(&world, 7).pop(), Ok(None));
}

/// The earlier device recorded fewer entries than the region has room for.
#[test]
fn entries_that_nobody_wrote_down_are_none() {
    for packed in [false, true] {
        let start = if packed { 0x8000 } else { 0 };
        let beyond = super::super::at(packed, 5);
        // The free list ends before it.
        let world = with_in_flight(packed, &[(10, 5), (beyond, 1)]);
        let mut device = Device::start(&world, start);
        assert_eq!(device.resubmissions(), 2);
        while let Some(tag) = device.pop().unwrap() {
            device.push(tag);
        }
        device.publish();
        assert_eq!([10, beyond].map(|at| world.region.get::<u16>(at)), [5, 1]);
        assert_eq!(Device::start(&world, start).resubmissions(), 0);
    }
}

/// A chain that cannot be walked when it is resubmitted breaks its ring, and stays in flight.
#[test]
fn what_was_in_flight_is_spoilt() {
    for packed in [false, true] {
        let world = with_in_flight(packed, &[]);
        let flags = DESC_F_INDIRECT | DESC_F_NEXT;
        match packed {
            true => world.region.set(super::super::at(true, 0) + 18, &flags),
            false => world.areas[0].set(12, &flags),
        }
        let mut device = Device::start(&world, 0);
        assert_eq!(device.resubmissions(), 2);
        let error = device.pop();
        assert!(
            matches!(error, Err(RingError::IndirectNext { .. } | RingError::IndirectNotNegotiated { .. })),
            "{error:?}"
        );
        assert_eq!((device.pop(), device.resubmissions(), device.work()), (error, 0, (false, false, 0)));
        assert_eq!(world.region.get::<u8>(super::super::at(packed, 0)), 1);
    }
}

/// Any number of chains to resubmit, and any number that the driver claims to have made available.
#[test]
fn no_more_is_pending_than_there_is_room_for() {
    let world = with_in_flight(false, &[]);
    world.areas[1].set(RING_IDX, &0x7000u16);
    assert_eq!(Device::start(&world, 0).work().2, 4);
    let world = with_in_flight(true, &[]);
    let second = RingPosition::FIRST.after(4, 4);
    world.areas[0].set(RingPosition::FIRST.after(3, 4).flags_at(), &RingPosition::FIRST.available());
    (0..3).for_each(|nth| world.areas[0].set(second.after(nth, 4).flags_at(), &second.available()));
    assert_eq!(Device::start(&world, 0).work().2, 4);
}
