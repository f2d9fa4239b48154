//! A front-end that writes into the region what it likes.

use super::device::Device;
use super::memory::World;
use super::{Model, Op, Random, perform, script};

/// Everything that can be popped is pushed; no more than the ring has.
fn drain(world: &World) {
    world.revive(u64::MAX);
    let mut device = Device::start(world, if world.options.is_packed() { 0x8000 } else { 0 });
    let size = world.options.size();
    assert!(device.again() <= size && device.in_flight() <= size);
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
            // Mostly as if somebody had begun.
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
    // And what was taken for wrong is not overwritten.
    packed.region.set(entry(0, 4), &3u16);
    let device = Device::start(&packed, 0x8000);
    assert_eq!(device.again(), 0);
    packed.region.set(entry(0, 4), &good[entry(0, 4) / 2]);
    assert_eq!(Device::start(&packed, 0x8000).again(), 1);
}
