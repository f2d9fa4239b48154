//! Tests the start of a device with the state that it finds.

use super::device::Device;
use super::driver::{Driver, Tag};
use super::memory::World;
use super::{Model, Random, finish};
use crate::device::PopOutcome;

/// Chains that are held when a queue stops are still in flight in the region. The next queue resubmits them,
/// and does not push the held ones as well.
#[test]
fn what_is_held_is_in_the_region_that_was_begun() {
    for (packed, size) in [(false, 8), (true, 7)] {
        let start = if packed { 0x8000 } else { 0xfffe };
        let world = World::new(packed, size, start);
        let mut model = Model::new(&world, start);
        let mut device = Device::start(&world, start);
        (0..3).for_each(|_| model.offer(&mut Random(1)));
        while let Some(tag) = device.pop().unwrap() {
            model.came(Some(tag));
        }
        device.unmap();
        model.popped.iter().for_each(|tag| device.push(*tag));
        let (next, unpublished) = device.stop();
        assert_eq!(unpublished.len(), model.popped.len());
        model.killed();
        let mut device = Device::with_unpublished(&world, next, &unpublished);
        assert_eq!(
            (usize::from(device.resubmissions()), device.in_flight()),
            (unpublished.len(), device.resubmissions())
        );
        device.publish();
        // No chain is used.
        model.take();
        finish(&world, &mut model, next);
    }
}

/// Chains that a queue leaves in the region when it stops do not count as taken in its index. Devices that
/// count them from the index, and those that find it in the ring, agree with that.
#[test]
fn what_is_left_is_not_counted_as_taken() {
    for (packed, size) in [(false, 8), (true, 7)] {
        let start = if packed { 0x8000 } else { 0xfffe };
        let world = World::new(packed, size, start);
        let mut driver = Driver::new(&world, start);
        let mut device = Device::start(&world, start);
        assert_eq!(device.resume_at(), start);
        let tags: Vec<_> = (0..4).map(|_| driver.offer(1)).collect();
        for tag in &tags {
            assert_eq!(device.pop(), Ok(*tag));
        }
        // One completes out of order.
        device.push(tags[2].unwrap());
        device.publish();
        device.unmap();
        let used = start.wrapping_add(1);
        assert_eq!((device.next_avail(), device.resume_at()), (start.wrapping_add(4), used));
        drop(device);
        let mut device = Device::start(&world, used);
        assert_eq!((device.resubmissions(), device.next_avail()), (3, start.wrapping_add(4)));
        for tag in [tags[0], tags[1], tags[3]] {
            assert_eq!(device.pop(), Ok(tag));
            device.push(tag.unwrap());
        }
        device.publish();
        device.unmap();
        assert_eq!(device.resume_at(), start.wrapping_add(4));
    }
}

/// A device does not sleep while there are chains to resubmit. They wait for the ring and its memory.
#[test]
fn what_is_to_be_done_again_is_work() {
    for packed in [false, true] {
        let start = if packed { 0x8000 } else { 0 };
        let world = World::new(packed, 4, start);
        let mut driver = Driver::new(&world, start);
        let mut device = Device::start(&world, start);
        let first = driver.offer(2);
        assert_eq!(device.pop(), Ok(first));
        let second = driver.offer(1);
        let before = world.areas[0].all();
        let mut device = Device::start(&world, 0);
        assert_eq!(device.work(), (true, true, 2));
        assert_eq!(world.areas[0].all(), before, "the driver's descriptors are written over");
        device.unmap();
        assert_eq!((device.resubmissions(), device.work()), (0, (false, false, 0)));
        assert_eq!(device.pop(), Ok(None));
        device.remap();
        assert_eq!(device.pop_in_vain(), Ok(PopOutcome::MissingTranslation));
        assert_eq!((device.resubmissions(), device.work()), (1, (true, true, 2)));
        assert_eq!(device.pop(), Ok(first));
        assert_eq!((device.resubmissions(), device.work()), (0, (true, true, 1)));
        assert_eq!(device.pop(), Ok(second));
        assert_eq!((device.pop(), device.work()), (Ok(None), (false, false, 0)));
        // Only one chain.
        let mut device = Device::start(&world, 0);
        assert_eq!(device.work(), (true, true, 2));
    }
}

/// A virtual machine can be migrating to another host when its device is killed.
#[test]
fn what_is_left_of_a_batch_is_taken_back_and_marked() {
    let mut taken_back = 0;
    for cut in 0..40 {
        let world = World::new(true, 5, 0x8000);
        let mut driver = Driver::new(&world, 0x8000);
        let mut device = Device::start(&world, 0x8000);
        (0..3).for_each(|_| assert!(driver.offer(1).is_some()));
        let tags: Vec<Tag> = std::iter::from_fn(|| device.pop().unwrap()).collect();
        world.revive(cut);
        tags.iter().for_each(|tag| device.push(*tag));
        device.publish();
        world.revive(u64::MAX);
        let before = world.areas[0].all();
        world.areas[0].take_marked();
        Device::start(&world, 0);
        let marked = world.areas[0].take_marked();
        let after = world.areas[0].all();
        let changed = (0..before.len()).filter(|at| before[*at] != after[*at]);
        taken_back += changed.inspect(|at| assert!(marked.contains(at), "{at} is not marked")).count();
    }
    assert!(taken_back > 0);
}

/// The contents of a region that was never used do not matter.
#[test]
fn a_region_begins_with_zeroes() {
    for packed in [false, true] {
        let [clean, other] = [0u8, 0xff].map(|byte| {
            let world = World::with_entries(packed, 4, 6, 0x8000);
            (0..world.region.all().len()).for_each(|at| world.region.set(at, &byte));
            // The version.
            world.region.set(8, &0u16);
            let device = Device::start(&world, 0x8000);
            assert_eq!((device.resubmissions(), device.next_avail()), (0, 0x8000));
            world.region.all()
        });
        assert_eq!(clean, other);
    }
}

/// A front-end can give another index with a region that was never used. Nothing is in flight then, so a
/// split ring begins at its used index.
#[test]
fn a_region_that_was_never_used_begins_at_the_used_index() {
    let world = World::new(false, 4, 0xfffe);
    let mut driver = Driver::new(&world, 0xfffe);
    let tags = [(); 3].map(|()| driver.offer(1));
    let mut device = Device::start(&world, 1);
    for tag in tags {
        assert_eq!(device.pop(), Ok(tag));
    }
    assert_eq!(device.pop(), Ok(None));
}
