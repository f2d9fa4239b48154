//! The suppression of kicks and calls in a packed ring, in every order that the memory model allows.
//!
//! The functions under test are those that both ends use (`packed`), over words that loom watches. Both directions are tried:
//! the driver tells and the device listens, and the other way round; they differ in the flags alone. As in `tests/loom.rs`,
//! who sleeps wakes only when told.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p kickless-virtqueue --release --test packed_loom`
#![cfg(loom)]
#![allow(unsafe_code, clippy::unwrap_used, clippy::panic, reason = "tests")]

use kickless_spec::ring::{EVENT_F_DISABLE, EVENT_F_ENABLE, PACKED_F_AVAIL, PACKED_F_USED};
use kickless_virtqueue::packed::{self, Place, Words};
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU16, fence};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use std::sync::atomic::Ordering;

const SIZE: u16 = 2;
/// The ring wraps in the middle.
const START: Place = Place { index: 1, wrap: true };

/// Words that lie so many bytes apart.
struct Cells {
    words: [AtomicU16; 2],
    apart: usize,
}

impl Words for Cells {
    fn load(&self, at: usize, order: Ordering) -> u16 {
        self.words[at / self.apart].load(order)
    }

    fn store(&self, at: usize, value: u16, order: Ordering) {
        self.words[at / self.apart].store(value, order);
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

/// The same words, but without the fence.
struct Unfenced<'a>(&'a Cells);

impl Words for Unfenced<'_> {
    fn load(&self, at: usize, order: Ordering) -> u16 {
        self.0.load(at, order)
    }

    fn store(&self, at: usize, value: u16, order: Ordering) {
        self.0.store(at, value, order);
    }

    fn fence(&self) {}
}

/// Who tells whom.
#[derive(Clone, Copy)]
struct Direction {
    /// The flags of the descriptors to begin with.
    before: [u16; 2],
    /// What the teller writes.
    mark: fn(Place) -> u16,
    come: fn(Place, u16) -> bool,
}

/// The driver tells. In this round the first place has been used, the second has not been made available.
const KICKS: Direction = Direction {
    before: [PACKED_F_AVAIL | PACKED_F_USED, 0],
    mark: Place::available,
    come: Place::is_available,
};

/// The device tells. The second place is available, and so is the first, in the next round.
const CALLS: Direction =
    Direction { before: [PACKED_F_USED, PACKED_F_AVAIL], mark: Place::used, come: Place::is_used };

/// The descriptors' flags, the listener's event structure, what each descriptor hands over, and an eventfd.
struct Ring {
    flags: Cells,
    event: Cells,
    elements: [UnsafeCell<u16>; 2],
    told: (Mutex<bool>, Condvar),
    direction: Direction,
    event_idx: bool,
}

// SAFETY: the elements are handed over by the flags; loom checks each access to them.
unsafe impl Sync for Ring {}
// SAFETY: as above.
unsafe impl Send for Ring {}

impl Ring {
    /// The listener does not want to be told anything to begin with; where it was told last is long past.
    fn new(direction: Direction, event_idx: bool) -> Self {
        let passed = Place { index: 0, wrap: true }.bits();
        Self {
            flags: Cells { words: direction.before.map(AtomicU16::new), apart: 16 },
            event: Cells { words: [passed, EVENT_F_DISABLE].map(AtomicU16::new), apart: 2 },
            elements: [UnsafeCell::new(0), UnsafeCell::new(0)],
            told: (Mutex::new(false), Condvar::new()),
            direction,
            event_idx,
        }
    }

    fn write(&self, place: Place) {
        // SAFETY: loom checks that nobody else has it: that is a part of what is tested.
        self.elements[usize::from(place.index)].with_mut(|e| unsafe { *e = place.bits() });
    }

    fn read(&self, place: Place) {
        // SAFETY: as above.
        let element = self.elements[usize::from(place.index)].with(|e| unsafe { *e });
        assert_eq!(element, place.bits());
    }

    fn tell(&self) {
        *self.told.0.lock().unwrap() = true;
        self.told.1.notify_one();
    }

    fn sleep(&self) {
        let mut told = self.told.0.lock().unwrap();
        while !*told {
            told = self.told.1.wait(told).unwrap();
        }
        *told = false;
    }

    /// Publishes `count` places from `first` on; whether the listener is to be told.
    fn publish(&self, first: Place, count: u16) -> bool {
        for nth in 0..count {
            let place = first.after(nth, SIZE);
            self.write(place);
            if nth > 0 {
                let flags = (self.direction.mark)(place);
                self.flags.store(place.flags_at(), flags, Ordering::Relaxed);
            }
        }
        let (flags, next) = ((self.direction.mark)(first), first.after(count, SIZE));
        packed::publish(
            &self.flags,
            &self.event,
            self.event_idx,
            Some((first, flags)),
            next,
            Some(count),
            SIZE,
        )
    }

    /// Shows two places one by one, and decides about both then.
    fn show_and_publish(&self) -> bool {
        for place in [START, START.after(1, SIZE)] {
            self.write(place);
            self.flags.store(place.flags_at(), (self.direction.mark)(place), Ordering::Release);
        }
        packed::publish(&self.flags, &self.event, self.event_idx, None, START.after(2, SIZE), Some(2), SIZE)
    }

    /// Takes two elements, and sleeps when there are none.
    fn listen(&self) {
        let (mut place, mut taken) = (START, 0);
        loop {
            while taken < 2
                && (self.direction.come)(place, self.flags.load(place.flags_at(), Ordering::Acquire))
            {
                self.read(place);
                place = place.after(1, SIZE);
                taken += 1;
            }
            if taken == 2 {
                return;
            }
            if !packed::arm(&self.flags, &self.event, self.event_idx, place, self.direction.come) {
                self.sleep();
            }
            packed::quiet(&self.event);
        }
    }
}

/// Two elements go through, in batches of this many.
fn run(direction: Direction, event_idx: bool, batch: u16) {
    loom::model(move || {
        let ring = Arc::new(Ring::new(direction, event_idx));
        let listener = thread::spawn({
            let ring = ring.clone();
            move || ring.listen()
        });
        for nth in 0..2 / batch {
            if ring.publish(START.after(nth * batch, SIZE), batch) {
                ring.tell();
            }
        }
        listener.join().unwrap();
    });
}

#[test]
fn no_kick_is_lost() {
    for event_idx in [false, true] {
        run(KICKS, event_idx, 1);
        run(KICKS, event_idx, 2);
    }
}

#[test]
fn no_call_is_lost() {
    for event_idx in [false, true] {
        run(CALLS, event_idx, 1);
        run(CALLS, event_idx, 2);
    }
}

/// What was shown before the decision is a part of it.
#[test]
fn no_call_is_lost_for_what_was_shown_before() {
    for event_idx in [false, true] {
        loom::model(move || {
            let ring = Arc::new(Ring::new(CALLS, event_idx));
            let listener = thread::spawn({
                let ring = ring.clone();
                move || ring.listen()
            });
            if ring.show_and_publish() {
                ring.tell();
            }
            listener.join().unwrap();
        });
    }
}

/// One publication against one look, without sleeping, since loom cannot unwind out of a deadlock: the listener finds it, or
/// is told. `fenced`: teller and listener.
fn once(direction: Direction, event_idx: bool, fenced: (bool, bool)) {
    loom::model(move || {
        let ring = Arc::new(Ring::new(direction, event_idx));
        let listener = thread::spawn({
            let ring = ring.clone();
            move || {
                let come = ring.direction.come;
                if fenced.1 {
                    packed::arm(&ring.flags, &ring.event, event_idx, START, come)
                } else {
                    packed::arm(&Unfenced(&ring.flags), &Unfenced(&ring.event), event_idx, START, come)
                }
            }
        });
        let (first, next) = (Some((START, (direction.mark)(START))), START.after(1, SIZE));
        let told = if fenced.0 {
            packed::publish(&ring.flags, &ring.event, event_idx, first, next, Some(1), SIZE)
        } else {
            let (flags, event) = (Unfenced(&ring.flags), Unfenced(&ring.event));
            packed::publish(&flags, &event, event_idx, first, next, Some(1), SIZE)
        };
        let found = listener.join().unwrap();
        assert!(told || found, "lost");
    });
}

#[test]
fn one_race_with_the_fences() {
    for direction in [KICKS, CALLS] {
        for event_idx in [false, true] {
            once(direction, event_idx, (true, true));
        }
    }
}

#[test]
#[should_panic(expected = "lost")]
fn the_teller_needs_its_fence_with_event_idx() {
    once(CALLS, true, (false, true));
}

#[test]
#[should_panic(expected = "lost")]
fn the_teller_needs_its_fence_with_flags() {
    once(CALLS, false, (false, true));
}

#[test]
#[should_panic(expected = "lost")]
fn the_listener_needs_its_fence_with_event_idx() {
    once(KICKS, true, (true, false));
}

#[test]
#[should_panic(expected = "lost")]
fn the_listener_needs_its_fence_with_flags() {
    once(KICKS, false, (true, false));
}

/// Where the listener asks again without having said in between that it wants nothing, its place and its flags are two stores:
/// an old place with new flags, or the other way round, loses nothing.
#[test]
fn asking_again_is_two_stores() {
    for direction in [KICKS, CALLS] {
        loom::model(move || {
            let ring = Arc::new(Ring::new(direction, true));
            // All that comes before is published and taken; the listener has asked for it, or for everything.
            ring.event.store(2, EVENT_F_ENABLE, Ordering::Relaxed);
            let listener = thread::spawn({
                let ring = ring.clone();
                move || {
                    let _ = packed::arm(
                        &ring.flags,
                        &ring.event,
                        true,
                        Place { index: 0, wrap: true },
                        |_, _| true,
                    );
                    packed::arm(&ring.flags, &ring.event, true, START, ring.direction.come)
                }
            });
            let told = ring.publish(START, 1);
            let found = listener.join().unwrap();
            assert!(told || found, "lost");
        });
    }
}
