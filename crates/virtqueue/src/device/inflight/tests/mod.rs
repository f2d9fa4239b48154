//! Tests devices that are killed at each of their stores, to the region and to the ring, and the devices that
//! resume.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

mod device;
mod driver;
mod hostile;
mod letter;
mod memory;
mod start;

use device::Device;
use driver::{Driver, Tag};
use letter::Letter;
use memory::World;
use std::collections::VecDeque;

/// A small, fast generator with the same numbers on each machine.
pub(super) struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, below: usize) -> usize {
        (self.next() % below as u64) as usize
    }
}

/// The known state of all chains, whatever the devices say.
struct Model {
    driver: Driver,
    /// Chains popped by the running device, in this order, and not seen as used.
    popped: Vec<Tag>,
    /// The chains of `popped` that the device has pushed.
    pushed: Vec<Tag>,
    /// Chains that the device has popped after those, as credit.
    credit: Vec<Tag>,
    /// Chains that must come out of its ring, in this order.
    expected: VecDeque<Tag>,
    used: usize,
}

impl Model {
    fn new(world: &World, place: u16) -> Self {
        Self {
            driver: Driver::new(world, place),
            popped: Vec::new(),
            pushed: Vec::new(),
            credit: Vec::new(),
            expected: VecDeque::new(),
            used: 0,
        }
    }

    fn offer(&mut self, random: &mut Random) {
        if let Some(tag) = self.driver.offer(1 + random.below(3) as u16) {
            self.expected.push_back(tag);
        }
    }

    fn came(&mut self, tag: Option<Tag>) {
        // The device pops nothing while the ring is away.
        let Some(tag) = tag else { return };
        assert_eq!(Some(tag), self.expected.pop_front(), "not the next one");
        self.popped.push(tag);
    }

    fn came_as_credit(&mut self, tag: Option<Tag>) {
        let Some(tag) = tag else { return };
        assert_eq!(Some(tag), self.expected.pop_front(), "not the next one");
        self.credit.push(tag);
    }

    /// The driver takes all chains that it is shown.
    fn take(&mut self) {
        while let Some(tag) = self.driver.take() {
            let at = self.pushed.iter().position(|pushed| *pushed == tag);
            self.pushed.remove(at.unwrap_or_else(|| panic!("chain {tag} is used, and nobody has used it")));
            self.popped.retain(|popped| *popped != tag);
            self.used += 1;
        }
    }

    /// The device is gone. Its chains come again before all others.
    fn killed(&mut self) {
        self.take();
        self.pushed.clear();
        for tag in self.popped.drain(..).chain(self.credit.drain(..)).rev() {
            self.expected.push_front(tag);
        }
    }
}

/// A step of a device or its driver.
#[derive(Clone, Copy, Debug)]
enum Op {
    Offer,
    Pop,
    PopCredit,
    UseCredit,
    Unpop,
    Push(usize),
    Show,
    Publish,
    Take,
    /// The areas go away and come back, with these steps in between.
    Unmap,
    Remap,
}

fn script(random: &mut Random, len: usize) -> Vec<Op> {
    let op = |random: &mut Random| match random.below(30) {
        0..6 => Op::Offer,
        6..11 => Op::Pop,
        11..15 => Op::Push(random.below(8)),
        15 => Op::Show,
        16 => Op::Publish,
        17 => Op::Take,
        18 if random.below(4) == 0 => Op::Unmap,
        19..23 => Op::PopCredit,
        23..27 => Op::UseCredit,
        27..29 => Op::Unpop,
        _ => Op::Remap,
    };
    (0..len).map(|_| op(random)).collect()
}

fn perform(op: Op, world: &World, model: &mut Model, device: &mut Device, random: &mut Random) {
    match op {
        Op::Offer => model.offer(random),
        // A device with credit pops nothing else.
        Op::Pop if model.credit.is_empty() => {
            let came = device.pop();
            // A killed device goes on to return chains, but its stores take no effect any more.
            if world.is_alive() {
                model.came(came.unwrap());
            } else if let Ok(Some(tag)) = came {
                assert_eq!(Some(&tag), model.expected.front());
            }
        }
        Op::Pop | Op::PopCredit => model.came_as_credit(device.pop_credit().unwrap()),
        Op::UseCredit => {
            if device.use_credit() {
                model.popped.push(model.credit.remove(0));
            }
        }
        Op::Unpop => {
            if let Some(tag) = model.credit.pop() {
                device.unpop(tag);
                model.expected.push_front(tag);
            }
        }
        Op::Push(nth) => {
            let held: Vec<Tag> =
                model.popped.iter().copied().filter(|tag| !model.pushed.contains(tag)).collect();
            if let Some(&tag) = held.get(nth % held.len().max(1)) {
                model.pushed.push(tag);
                device.push(tag);
            }
        }
        Op::Show => device.show(),
        Op::Publish => device.publish(),
        Op::Take => model.take(),
        Op::Unmap => device.unmap(),
        Op::Remap => device.remap(),
    }
}

/// A device that is not killed does the rest.
fn finish(world: &World, model: &mut Model, start: u16) {
    world.revive(u64::MAX);
    // It begins where the region says, although the front-end says something else.
    let mut device = Device::start(world, if world.is_begun() { 0 } else { start });
    assert_eq!(device.resubmissions(), device.in_flight());
    while let Some(tag) = device.pop().unwrap() {
        model.came(Some(tag));
    }
    assert!(model.expected.is_empty(), "{:?} are lost", model.expected);
    assert_eq!(usize::from(device.in_flight()), model.popped.len());
    for tag in model.popped.clone() {
        model.pushed.push(tag);
        device.push(tag);
        // One at a time, so that the rest of an old batch in the ring must not matter.
        device.publish();
        model.take();
    }
    assert_eq!(model.used, model.driver.offered(), "each once");
    // The region says that nothing is in flight.
    let mut next = Device::start(world, 0);
    assert_eq!((next.resubmissions(), next.in_flight(), next.pop().unwrap()), (0, 0, None));
}

/// Runs a script on a device that is killed at its store number `cut`, and then on others that are killed
/// too. Returns whether the first was killed.
fn run(packed: bool, size: u16, seed: u64, cut: u64) -> bool {
    let mut random = Random(seed);
    let ops = script(&mut random, 80);
    let start = if packed { 0x8000 } else { random.next() as u16 };
    let world = World::new(packed, size, start);
    let mut model = Model::new(&world, start);
    let mut cut = Some(cut);
    let mut first_was = false;
    for generation in 0..3 {
        world.revive(cut.take().unwrap_or_else(|| random.below(80) as u64));
        let mut device = Device::start(&world, start);
        if world.is_alive() {
            assert_eq!(device.resubmissions(), device.in_flight());
        }
        for op in &ops {
            if !world.is_alive() {
                break;
            }
            perform(*op, &world, &mut model, &mut device, &mut random);
            assert_eq!(usize::from(device.credit()), model.credit.len());
        }
        first_was |= generation == 0 && !world.is_alive();
        model.killed();
        for _ in 0..random.below(3) {
            model.offer(&mut random);
        }
    }
    finish(&world, &mut model, start);
    first_was
}

fn killed_at_each_store(packed: bool, sizes: &[u16]) {
    let mut cuts = 0;
    for &size in sizes {
        for seed in 0..12 {
            let mut cut = 0;
            while run(packed, size, seed << 8 | u64::from(size), cut) {
                cut += 1;
            }
            cuts += cut;
        }
    }
    assert!(cuts > 2_000, "hardly a store: {cuts}");
}

#[test]
fn split_killed_at_each_store() {
    killed_at_each_store(false, &[1, 2, 4, 8, 16]);
}

#[test]
fn packed_killed_at_each_store() {
    killed_at_each_store(true, &[1, 2, 3, 5, 8, 13]);
}

/// A region that was written as the specification says, field by field, one request at a time.
fn another(packed: bool, size: u16, seed: u64, cut: u64) -> bool {
    let mut random = Random(seed);
    let start = if packed { 0x8000 } else { random.next() as u16 };
    let world = World::new(packed, size, start);
    let mut model = Model::new(&world, start);
    let mut letter = Letter::begin(&world, start);
    world.revive(cut);
    for _ in 0..40 {
        if !world.is_alive() {
            break;
        }
        match random.below(4) {
            0 | 1 => model.offer(&mut random),
            2 => {
                if let Some(tag) = letter.pop()
                    && world.is_alive()
                {
                    model.came(Some(tag));
                }
            }
            _ if model.popped.is_empty() => {}
            _ => {
                let tag = model.popped[random.below(model.popped.len())];
                model.pushed.push(tag);
                letter.push(tag);
                if world.is_alive() {
                    model.take();
                }
            }
        }
    }
    let was = !world.is_alive();
    model.killed();
    model.offer(&mut random);
    finish(&world, &mut model, start);
    was
}

#[test]
fn what_others_wrote_down() {
    for (packed, sizes) in [(false, [2u16, 8]), (true, [3, 8])] {
        for size in sizes {
            for seed in 0..60 {
                let mut cut = 0;
                while another(packed, size, seed << 8 | u64::from(size), cut) {
                    cut += 1;
                }
            }
        }
    }
}

/// Credit makes no store, not even credit that an earlier device had in flight. All of it comes again in its
/// order.
#[test]
fn credit_is_not_in_the_region() {
    for (packed, size) in [(false, 8), (true, 7)] {
        let start = if packed { 0x8000 | 5 } else { 0xfffe };
        let world = World::new(packed, size, start);
        let mut driver = Driver::new(&world, start);
        let mut first = Device::start(&world, start);
        let tags: Vec<Tag> = (0..5).map(|_| driver.offer(1).unwrap()).collect();
        assert_eq!([first.pop().unwrap(), first.pop().unwrap()], [Some(tags[0]), Some(tags[1])]);
        let mut second = Device::start(&world, 0);
        let regions = world.region.all();
        for _ in 0..3 {
            for tag in &tags {
                assert_eq!(second.pop_credit().unwrap(), Some(*tag));
            }
            assert_eq!((second.pop_credit().unwrap(), second.credit()), (None, 5));
            assert_eq!((second.resubmissions(), second.in_flight()), (0, 2));
            for tag in tags.iter().rev() {
                second.unpop(*tag);
            }
            assert_eq!((second.resubmissions(), second.in_flight(), second.credit()), (2, 2, 0));
            assert_eq!(world.region.all(), regions);
        }
        // The region names the first two already, and the third when it is used.
        (0..4).for_each(|_| assert!(second.pop_credit().unwrap().is_some()));
        assert!(second.use_credit() && second.use_credit());
        assert_eq!(world.region.all(), regions);
        assert!(second.use_credit());
        assert_ne!(world.region.all(), regions);
        second.push(tags[1]);
        second.publish();
        assert_eq!(driver.take(), Some(tags[1]));
        let mut third = Device::start(&world, 0);
        assert_eq!(third.resubmissions(), 2);
        for tag in [tags[0], tags[2], tags[3], tags[4]] {
            assert_eq!(third.pop().unwrap(), Some(tag));
        }
    }
}

/// Chains held from before the first use of the region are shown first, whenever the device is killed.
#[test]
fn what_was_held_before_is_not_in_the_region() {
    for (packed, size) in [(false, 8), (true, 7)] {
        for cut in 0..200 {
            let start = if packed { 0x8000 } else { 0xfffe };
            let world = World::new(packed, size, start);
            let mut model = Model::new(&world, start);
            let mut random = Random(cut);
            world.revive(u64::MAX);
            let mut device = Device::untracked(&world, start);
            (0..3).for_each(|_| model.offer(&mut random));
            while let Some(tag) = device.pop().unwrap() {
                model.came(Some(tag));
            }
            device.unmap();
            for tag in model.popped.clone() {
                model.pushed.push(tag);
                device.push(tag);
            }
            let (next, held) = device.stop();
            assert_eq!(held.len(), model.popped.len());
            world.revive(cut);
            let mut device = Device::with_unpublished(&world, next, &held);
            device.publish();
            let alive = world.is_alive();
            model.take();
            if !alive && !model.popped.is_empty() {
                // The region is not begun and the chains are not shown. The next device gets the held chains
                // in the same way as without a region.
                assert!(!world.is_begun());
                continue;
            }
            world.revive(u64::MAX);
            let device = Device::start(&world, next);
            assert_eq!((device.resubmissions(), device.in_flight(), device.next_avail()), (0, 0, next));
            if alive {
                break;
            }
            assert!(cut < 199);
        }
    }
}
