//! The driver's two halves in every order that the memory model allows: what they tell each other (`driver::shared`), and
//! who has to notify whom (`driver::suppress`, against the device's `device::suppress`).
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p kickless-virtqueue --release --test driver_loom`
#![cfg(loom)]
#![allow(unsafe_code, clippy::unwrap_used, reason = "tests")]

use kickless_spec::ring::{AVAIL_F_NO_INTERRUPT, USED_F_NO_NOTIFY};
use kickless_virtqueue::device;
use kickless_virtqueue::device::suppress::{Cells, Word};
use kickless_virtqueue::driver;
use kickless_virtqueue::driver::shared::{Record, Shared};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU16, fence};
use loom::thread;
use std::sync::atomic::Ordering;

/// Descriptors, and ids.
const SIZE: u16 = 2;
/// Chains that go through: some ids are used twice.
const CHAINS: u32 = 3;

/// The two tables, and memory that goes with each id (a status byte, the owner of a buffer).
struct Halves {
    shared: Shared,
    memory: [UnsafeCell<u32>; SIZE as usize],
    /// How many chains the device is done with, if it says so.
    used: AtomicU16,
}

// SAFETY: the memory is handed over with its id; loom checks each access to it.
unsafe impl Sync for Halves {}

impl Halves {
    fn new(in_order: bool) -> Self {
        Self {
            shared: Shared::new(SIZE, in_order),
            memory: [UnsafeCell::new(0), UnsafeCell::new(0)],
            used: AtomicU16::new(0),
        }
    }

    fn write(&self, id: u16, value: u32) {
        // SAFETY: loom checks that nobody else has it: that is what is tested.
        self.memory[usize::from(id)].with_mut(|memory| unsafe { *memory = value });
    }

    fn read(&self, id: u16) -> u32 {
        // SAFETY: as above.
        self.memory[usize::from(id)].with(|memory| unsafe { *memory })
    }

    /// Adds all chains, each as soon as there is an id. `show` is what the device gets to know of it.
    fn submit(&self, show: impl Fn(&Self, u32)) {
        let mut free: Vec<u16> = (0..SIZE).rev().collect();
        let mut taken = 0;
        for number in 0..CHAINS {
            while free.is_empty() {
                match self.shared.returned(taken) {
                    Some(id) => {
                        taken = taken.wrapping_add(1);
                        free.push(id);
                    }
                    None => thread::yield_now(),
                }
            }
            let id = free.pop().unwrap();
            self.write(id, number);
            self.shared.add(id, number, Record { descriptors: 1, writable: number });
            show(self, number);
        }
    }

    /// The device says that it is done with `id`, and it may be.
    fn complete(&self, id: u16, record: Record) {
        assert_eq!(self.read(id), record.writable, "another chain's");
        self.shared.take(id);
        assert_eq!(self.shared.in_flight(id.into()), None, "twice");
        self.write(id, u32::MAX);
        self.shared.give_back(id);
    }
}

/// A device that says of every id, all the time, that it is done with it, whether it was told of it or not: nothing but the
/// tables keeps the halves apart.
#[test]
fn a_lying_device() {
    loom::model(|| {
        let halves = Arc::new(Halves::new(false));
        let submitter = thread::spawn({
            let halves = halves.clone();
            move || halves.submit(|_, _| {})
        });
        let mut done = 0;
        while done < CHAINS {
            let before = done;
            for id in 0..u32::from(SIZE) + 1 {
                if let Some((id, record)) = halves.shared.in_flight(id) {
                    halves.complete(id, record);
                    done += 1;
                }
            }
            if done == before {
                thread::yield_now();
            }
        }
        submitter.join().unwrap();
        assert!((0..u32::from(SIZE)).all(|id| halves.shared.in_flight(id).is_none()));
    });
}

/// A device that uses chains in their order, and says only how many; what it tells has passed through it alone.
#[test]
fn in_order() {
    loom::model(|| {
        let halves = Arc::new(Halves::new(true));
        let submitter = thread::spawn({
            let halves = halves.clone();
            move || halves.submit(|halves, number| halves.used.store(number as u16 + 1, Ordering::Release))
        });
        let mut done = 0;
        while done < CHAINS {
            let used = u32::from(halves.used.load(Ordering::Acquire));
            if used == done {
                thread::yield_now();
            }
            for number in done..used {
                let (id, record) = halves.shared.in_flight(halves.shared.ordered(number).into()).unwrap();
                assert_eq!(record.writable, number);
                halves.complete(id, record);
            }
            done = used;
        }
        submitter.join().unwrap();
    });
}

/// As [`in_order`], but the device names the last chain of a batch, which it was never told of.
#[test]
fn a_lie_about_a_batch() {
    loom::model(|| {
        let halves = Arc::new(Halves::new(true));
        let submitter = thread::spawn({
            let halves = halves.clone();
            move || halves.submit(|_, _| {})
        });
        let mut done = 0;
        while done < CHAINS {
            let last = (0..u32::from(SIZE)).rev().find_map(|id| halves.shared.in_flight(id));
            let Some((last, _)) = last else {
                thread::yield_now();
                continue;
            };
            loop {
                let (id, record) = halves.shared.in_flight(halves.shared.ordered(done).into()).unwrap();
                assert_eq!(record.writable, done);
                halves.complete(id, record);
                done += 1;
                if id == last {
                    break;
                }
            }
        }
        submitter.join().unwrap();
    });
}

/// The indices wrap in the middle.
const START: u16 = u16::MAX;

/// The words of a split ring.
struct Ring {
    words: [AtomicU16; 6],
    fenced: bool,
}

impl Ring {
    /// Nobody wants to be told anything to begin with.
    fn new(fenced: bool) -> Self {
        let passed = START.wrapping_sub(8);
        let words = [AVAIL_F_NO_INTERRUPT, START, passed, USED_F_NO_NOTIFY, START, passed];
        Self { words: words.map(AtomicU16::new), fenced }
    }
}

impl Cells for Ring {
    fn load(&self, word: Word, order: Ordering) -> u16 {
        self.words[word as usize].load(order)
    }

    fn store(&self, word: Word, value: u16, order: Ordering) {
        self.words[word as usize].store(value, order);
    }

    fn fence(&self) {
        if self.fenced {
            fence(Ordering::SeqCst);
        }
    }
}

/// One publication against one look, by our two ends: the listener finds it, or is told.
fn once(fenced: bool, tell: fn(&Ring) -> bool, listen: fn(&Ring) -> bool) {
    loom::model(move || {
        let ring = Arc::new(Ring::new(fenced));
        let listener = thread::spawn({
            let ring = ring.clone();
            move || listen(&ring)
        });
        let told = tell(&ring);
        let found = listener.join().unwrap();
        assert!(told || found, "lost");
    });
}

const NEXT: u16 = START.wrapping_add(1);

fn kick(event_idx: bool, fenced: bool) {
    match event_idx {
        true => once(
            fenced,
            |ring| driver::suppress::publish(ring, true, START, NEXT),
            |ring| device::suppress::arm(ring, true, START),
        ),
        false => once(
            fenced,
            |ring| driver::suppress::publish(ring, false, START, NEXT),
            |ring| device::suppress::arm(ring, false, START),
        ),
    }
}

fn call(event_idx: bool, fenced: bool) {
    fn publish(ring: &Ring, event_idx: bool) -> bool {
        device::suppress::show(ring, NEXT);
        device::suppress::decide(ring, event_idx, Some(START), NEXT)
    }
    match event_idx {
        true => once(fenced, |ring| publish(ring, true), |ring| driver::suppress::arm(ring, true, START)),
        false => once(fenced, |ring| publish(ring, false), |ring| driver::suppress::arm(ring, false, START)),
    }
}

#[test]
fn nothing_is_lost() {
    for event_idx in [false, true] {
        kick(event_idx, true);
        call(event_idx, true);
    }
}

#[test]
#[should_panic(expected = "lost")]
fn kicks_with_event_idx_need_the_fences() {
    kick(true, false);
}

#[test]
#[should_panic(expected = "lost")]
fn kicks_with_flags_need_the_fences() {
    kick(false, false);
}

#[test]
#[should_panic(expected = "lost")]
fn calls_with_event_idx_need_the_fences() {
    call(true, false);
}

#[test]
#[should_panic(expected = "lost")]
fn calls_with_flags_need_the_fences() {
    call(false, false);
}
