//! Models of the suppression of kicks and calls in a packed ring, in every order that the memory model
//! allows.
//!
//! They test the functions of both ends (`packed`), on words that loom watches. They run both directions,
//! which differ in the flags only: the driver notifies the device, and the device notifies the driver. As in
//! `tests/loom.rs`, a sleeping thread wakes only when it is notified.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p kickless-virtqueue --release --test packed_loom`
#![cfg(loom)]
#![allow(unsafe_code, clippy::unwrap_used, clippy::panic, reason = "tests")]

use kickless_spec::ring::{EVENT_F_DISABLE, EVENT_F_ENABLE, PACKED_F_AVAIL, PACKED_F_USED};
use kickless_virtqueue::packed::{self, RingPosition, Words};
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU16, fence};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use std::sync::atomic::Ordering;

const SIZE: u16 = 2;
/// Size of the ring, which wraps in the middle.
const START: RingPosition = RingPosition { index: 1, wrap: true };

/// Words at a distance of this many bytes.
struct NotificationWords {
    words: [AtomicU16; 2],
    apart: usize,
}

impl Words for NotificationWords {
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

/// The same words without the fence.
struct Unfenced<'a>(&'a NotificationWords);

impl Words for Unfenced<'_> {
    fn load(&self, at: usize, order: Ordering) -> u16 {
        self.0.load(at, order)
    }

    fn store(&self, at: usize, value: u16, order: Ordering) {
        self.0.store(at, value, order);
    }

    fn fence(&self) {}
}

/// The direction of notifications.
#[derive(Clone, Copy)]
struct Direction {
    /// The first flags of the descriptors.
    before: [u16; 2],
    /// The flags that the teller writes.
    mark: fn(RingPosition) -> u16,
    come: fn(RingPosition, u16) -> bool,
}

/// The driver notifies. In this round the first descriptor is used, and the second is not available.
const KICKS: Direction = Direction {
    before: [PACKED_F_AVAIL | PACKED_F_USED, 0],
    mark: RingPosition::available,
    come: RingPosition::is_available,
};

/// The device notifies. The second descriptor is available, and the first is available in the next round.
const CALLS: Direction = Direction {
    before: [PACKED_F_USED, PACKED_F_AVAIL],
    mark: RingPosition::used,
    come: RingPosition::is_used,
};

/// The descriptors' flags, the listener's event structure, the data of each descriptor, and an eventfd.
struct Ring {
    flags: NotificationWords,
    event: NotificationWords,
    elements: [UnsafeCell<u16>; 2],
    told: (Mutex<bool>, Condvar),
    direction: Direction,
    event_idx: bool,
}

// SAFETY: the elements are handed over by the flags. loom checks each access to them.
unsafe impl Sync for Ring {}
// SAFETY: as above.
unsafe impl Send for Ring {}

impl Ring {
    /// Makes a ring whose listener wants no notification. Its last event position was passed long ago.
    fn new(direction: Direction, event_idx: bool) -> Self {
        let passed = RingPosition { index: 0, wrap: true }.bits();
        Self {
            flags: NotificationWords { words: direction.before.map(AtomicU16::new), apart: 16 },
            event: NotificationWords { words: [passed, EVENT_F_DISABLE].map(AtomicU16::new), apart: 2 },
            elements: [UnsafeCell::new(0), UnsafeCell::new(0)],
            told: (Mutex::new(false), Condvar::new()),
            direction,
            event_idx,
        }
    }

    fn write(&self, place: RingPosition) {
        // SAFETY: loom checks that no other thread accesses it. That is part of the property under test.
        self.elements[usize::from(place.index)].with_mut(|e| unsafe { *e = place.bits() });
    }

    fn read(&self, place: RingPosition) {
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

    /// Publishes `count` descriptors from `first` on. Returns whether to notify the listener.
    fn publish(&self, first: RingPosition, count: u16) -> bool {
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

    /// Shows two descriptors one by one, and then decides about both.
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
            packed::disable_notifications(&self.event);
        }
    }
}

/// Two elements pass, in batches of this size.
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

/// A decision includes everything that was shown before.
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

/// One publication against one check, without sleeping, because loom cannot unwind out of a deadlock: the
/// listener finds the element, or is notified. `fenced`: teller and listener.
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
fn one_race_with_both_fences() {
    for direction in [KICKS, CALLS] {
        for event_idx in [false, true] {
            once(direction, event_idx, (true, true));
        }
    }
}

#[test]
#[should_panic(expected = "lost")]
fn the_publisher_needs_its_fence_with_event_idx() {
    once(CALLS, true, (false, true));
}

#[test]
#[should_panic(expected = "lost")]
fn the_publisher_needs_its_fence_with_flags() {
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

/// A listener asks again without saying in between that it wants nothing. Its position and its flags are two
/// stores. An old position with new flags, or the other way round, loses nothing.
#[test]
fn enabling_again_is_two_stores() {
    for direction in [KICKS, CALLS] {
        loom::model(move || {
            let ring = Arc::new(Ring::new(direction, true));
            // Everything before is published and taken. The listener has asked for it, or for everything.
            ring.event.store(2, EVENT_F_ENABLE, Ordering::Relaxed);
            let listener = thread::spawn({
                let ring = ring.clone();
                move || {
                    let _ = packed::arm(
                        &ring.flags,
                        &ring.event,
                        true,
                        RingPosition { index: 0, wrap: true },
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
