//! The suppression of kicks and calls in every order that the memory model allows.
//!
//! The functions under test are those that the rings use (`device::suppress`), over words that loom watches.
//! Nobody polls here: who sleeps wakes only when told, so that a notification which is lost is a deadlock,
//! and loom finds it.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p kickless-virtqueue --release --test loom`
#![cfg(loom)]
#![allow(unsafe_code, clippy::unwrap_used, clippy::panic, reason = "tests")]

use kickless_spec::ring::{AVAIL_F_NO_INTERRUPT, USED_F_NO_NOTIFY, event_passed};
use kickless_virtqueue::device::suppress::{self, Cells, Word};
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU16, fence};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use std::sync::atomic::Ordering;

/// How many elements go through; each is published on its own.
const COUNT: u16 = 2;
/// The indices wrap in the middle.
const START: u16 = u16::MAX;

/// The words of a ring, one element for each round, and an eventfd.
struct Ring {
    words: [AtomicU16; 6],
    elements: [UnsafeCell<u16>; COUNT as usize],
    event: Mutex<bool>,
    told: Condvar,
    event_idx: bool,
}

// SAFETY: the elements are handed over by the indices; loom checks each access to them.
unsafe impl Sync for Ring {}

impl Ring {
    /// Nobody wants to be told anything to begin with.
    fn new(event_idx: bool) -> Self {
        let passed = START.wrapping_sub(8);
        let words = [AVAIL_F_NO_INTERRUPT, START, passed, USED_F_NO_NOTIFY, START, passed];
        Self {
            words: words.map(AtomicU16::new),
            elements: [UnsafeCell::new(0), UnsafeCell::new(0)],
            event: Mutex::new(false),
            told: Condvar::new(),
            event_idx,
        }
    }

    fn write(&self, idx: u16) {
        // SAFETY: loom checks that nobody else has it: that is a part of what is tested.
        self.elements[usize::from(idx.wrapping_sub(START))].with_mut(|e| unsafe { *e = idx });
    }

    fn read(&self, idx: u16) {
        // SAFETY: as above.
        let element = self.elements[usize::from(idx.wrapping_sub(START))].with(|e| unsafe { *e });
        assert_eq!(element, idx);
    }

    fn tell(&self) {
        *self.event.lock().unwrap() = true;
        self.told.notify_one();
    }

    fn sleep(&self) {
        let mut event = self.event.lock().unwrap();
        while !*event {
            event = self.told.wait(event).unwrap();
        }
        *event = false;
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
        fence(Ordering::SeqCst);
    }
}

/// The same ring, but without the device's fence.
struct Unfenced<'a>(&'a Ring);

impl Cells for Unfenced<'_> {
    fn load(&self, word: Word, order: Ordering) -> u16 {
        self.0.load(word, order)
    }

    fn store(&self, word: Word, value: u16, order: Ordering) {
        self.0.store(word, value, order);
    }

    fn fence(&self) {}
}

/// The driver's half, as the standard describes it.
mod driver {
    use super::*;

    /// Publishes an avail index; whether to kick.
    pub(crate) fn publish(ring: &Ring, old: u16, new: u16) -> bool {
        ring.store(Word::AvailIdx, new, Ordering::Release);
        ring.fence();
        if ring.event_idx {
            event_passed(ring.load(Word::AvailEvent, Ordering::Relaxed), new, old)
        } else {
            ring.load(Word::UsedFlags, Ordering::Relaxed) & USED_F_NO_NOTIFY == 0
        }
    }

    /// Asks for calls; whether something was used already.
    pub(crate) fn ask(ring: &Ring, used: u16) -> bool {
        if ring.event_idx {
            ring.store(Word::UsedEvent, used, Ordering::Relaxed);
        } else {
            ring.store(Word::AvailFlags, 0, Ordering::Relaxed);
        }
        ring.fence();
        ring.load(Word::UsedIdx, Ordering::Relaxed) != used
    }
}

/// The driver makes elements available; the device takes them, and sleeps when there are none.
fn kicks(event_idx: bool) {
    loom::model(move || {
        let ring = Arc::new(Ring::new(event_idx));
        let device = thread::spawn({
            let ring = ring.clone();
            move || {
                let mut next = START;
                while next != START.wrapping_add(COUNT) {
                    let idx = ring.load(Word::AvailIdx, Ordering::Acquire);
                    while next != idx {
                        ring.read(next);
                        next = next.wrapping_add(1);
                    }
                    if next == START.wrapping_add(COUNT) {
                        break;
                    }
                    if !suppress::arm(&*ring, event_idx, next) {
                        ring.sleep();
                    }
                    if !event_idx {
                        suppress::quiet(&*ring, event_idx, next.wrapping_sub(8));
                    }
                }
            }
        });
        for i in 0..COUNT {
            let old = START.wrapping_add(i);
            ring.write(old);
            if driver::publish(&ring, old, old.wrapping_add(1)) {
                ring.tell();
            }
        }
        device.join().unwrap();
    });
}

/// The device uses elements; the driver takes them, and sleeps when there are none.
///
/// `shown`: the first element is shown without a decision, which follows with that of the last.
fn calls(event_idx: bool, shown: bool) {
    loom::model(move || {
        let ring = Arc::new(Ring::new(event_idx));
        let device = thread::spawn({
            let ring = ring.clone();
            move || {
                for i in 0..COUNT {
                    let old = START.wrapping_add(i);
                    let new = old.wrapping_add(1);
                    ring.write(old);
                    if shown && i + 1 < COUNT {
                        suppress::show(&*ring, new);
                        continue;
                    }
                    let decided = if shown { START } else { old };
                    suppress::show(&*ring, new);
                    if suppress::decide(&*ring, event_idx, Some(decided), new) {
                        ring.tell();
                    }
                }
            }
        });
        let mut next = START;
        while next != START.wrapping_add(COUNT) {
            let idx = ring.load(Word::UsedIdx, Ordering::Acquire);
            while next != idx {
                ring.read(next);
                next = next.wrapping_add(1);
            }
            if next == START.wrapping_add(COUNT) {
                break;
            }
            if !driver::ask(&ring, next) {
                ring.sleep();
            }
            if !event_idx {
                ring.store(Word::AvailFlags, AVAIL_F_NO_INTERRUPT, Ordering::Relaxed);
            }
        }
        device.join().unwrap();
    });
}

#[test]
fn no_kick_is_lost_with_event_idx() {
    kicks(true);
}

#[test]
fn no_kick_is_lost_with_flags() {
    kicks(false);
}

#[test]
fn no_call_is_lost_with_event_idx() {
    calls(true, false);
    calls(true, true);
}

#[test]
fn no_call_is_lost_with_flags() {
    calls(false, false);
    calls(false, true);
}

// The same race once, without sleeping, so that it can be shown that the fence is what decides it: loom
// cannot unwind out of a deadlock.

/// One publication against one look: the listener finds it, or is told.
fn once(event_idx: bool, tell: fn(&Ring) -> bool, listen: fn(&Ring) -> bool) {
    loom::model(move || {
        let ring = Arc::new(Ring::new(event_idx));
        let listener = thread::spawn({
            let ring = ring.clone();
            move || listen(&ring)
        });
        let told = tell(&ring);
        let found = listener.join().unwrap();
        assert!(told || found, "lost");
    });
}

fn kick_once(event_idx: bool, fenced: bool) {
    let listen: fn(&Ring) -> bool = if fenced {
        |ring| suppress::arm(ring, ring.event_idx, START)
    } else {
        |ring| suppress::arm(&Unfenced(ring), ring.event_idx, START)
    };
    once(event_idx, |ring| driver::publish(ring, START, START.wrapping_add(1)), listen);
}

fn call_once(event_idx: bool, fenced: bool) {
    fn publish<C: Cells>(ring: &C, event_idx: bool) -> bool {
        const NEW: u16 = START.wrapping_add(1);
        suppress::show(ring, NEW);
        suppress::decide(ring, event_idx, Some(START), NEW)
    }
    let tell: fn(&Ring) -> bool = if fenced {
        |ring| publish(ring, ring.event_idx)
    } else {
        |ring| publish(&Unfenced(ring), ring.event_idx)
    };
    once(event_idx, tell, |ring| driver::ask(ring, START));
}

#[test]
fn one_race_with_the_fence() {
    for event_idx in [false, true] {
        kick_once(event_idx, true);
        call_once(event_idx, true);
    }
}

#[test]
#[should_panic(expected = "lost")]
fn kicks_with_event_idx_need_the_fence() {
    kick_once(true, false);
}

#[test]
#[should_panic(expected = "lost")]
fn kicks_with_flags_need_the_fence() {
    kick_once(false, false);
}

#[test]
#[should_panic(expected = "lost")]
fn calls_with_event_idx_need_the_fence() {
    call_once(true, false);
}

#[test]
#[should_panic(expected = "lost")]
fn calls_with_flags_need_the_fence() {
    call_once(false, false);
}
