//! Models of the suppression of kicks and calls, in every order that the memory model allows.
//!
//! They test the functions of the rings (`device::suppress` and `driver::suppress`), on words that loom
//! watches. No thread polls here. A sleeping thread wakes only when it is notified, so a lost notification is
//! a deadlock, which loom finds.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p kickless-virtqueue --release --test loom`
#![cfg(loom)]
#![allow(unsafe_code, clippy::unwrap_used, clippy::panic, reason = "tests")]

use kickless_spec::ring::{AVAIL_F_NO_INTERRUPT, USED_F_NO_NOTIFY};
use kickless_virtqueue::device::suppress::{self as device, NotificationWords, Word};
use kickless_virtqueue::driver::suppress as driver;
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU16, fence};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use std::sync::atomic::Ordering;

/// Number of elements.
const COUNT: u16 = 2;
/// First index. The indices wrap in the middle.
const START: u16 = u16::MAX;
const END: u16 = START.wrapping_add(COUNT);
/// An event index that was passed.
const PASSED: u16 = START.wrapping_sub(8);

/// The words of a ring, one element for each round, and an eventfd.
struct Ring {
    words: [AtomicU16; 6],
    elements: [UnsafeCell<u16>; COUNT as usize],
    event: Mutex<bool>,
    told: Condvar,
}

// SAFETY: the elements are handed over by the indices. loom checks each access to them.
unsafe impl Sync for Ring {}

impl Ring {
    /// Makes a ring in which neither side wants a notification.
    fn new() -> Self {
        let words = [AVAIL_F_NO_INTERRUPT, START, PASSED, USED_F_NO_NOTIFY, START, PASSED];
        Self {
            words: words.map(AtomicU16::new),
            elements: [UnsafeCell::new(0), UnsafeCell::new(0)],
            event: Mutex::new(false),
            told: Condvar::new(),
        }
    }

    fn write(&self, idx: u16) {
        // SAFETY: loom checks that no other thread accesses it. That is part of the property under test.
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

impl NotificationWords for Ring {
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

/// Runs a listener. It takes the elements up to the index in `word`, and sleeps when there are none.
fn listen(ring: &Ring, word: Word, arm: impl Fn(u16) -> bool, quiet: impl Fn()) {
    let mut next = START;
    loop {
        let idx = ring.load(word, Ordering::Acquire);
        while next != idx {
            ring.read(next);
            next = next.wrapping_add(1);
        }
        if next == END {
            return;
        }
        if !arm(next) {
            ring.sleep();
        }
        quiet();
    }
}

/// The driver makes elements available. The device takes them, and sleeps when there are none.
fn kicks(event_idx: bool) {
    loom::model(move || {
        let ring = Arc::new(Ring::new());
        let device = thread::spawn({
            let ring = ring.clone();
            move || {
                // An event index needs no suppression.
                let quiet = || {
                    if !event_idx {
                        device::disable_kicks(&*ring, false, PASSED)
                    }
                };
                listen(&ring, Word::AvailIdx, |next| device::arm(&*ring, event_idx, next), quiet);
            }
        });
        for i in 0..COUNT {
            let old = START.wrapping_add(i);
            ring.write(old);
            if driver::publish(&*ring, event_idx, old, old.wrapping_add(1)) {
                ring.tell();
            }
        }
        device.join().unwrap();
    });
}

/// The device uses elements. The driver takes them, and sleeps when there are none. Each element is shown on
/// its own. A decision follows each, or one decision follows the last: that publication only decides, because
/// there is nothing left to show.
fn calls(event_idx: bool, decide_once: bool) {
    loom::model(move || {
        let ring = Arc::new(Ring::new());
        let device = thread::spawn({
            let ring = ring.clone();
            move || {
                let mut decided_at = START;
                for i in 0..COUNT {
                    let old = START.wrapping_add(i);
                    let new = old.wrapping_add(1);
                    ring.write(old);
                    device::show(&*ring, new);
                    if decide_once && new != END {
                        continue;
                    }
                    if device::decide(&*ring, event_idx, Some(decided_at), new) {
                        ring.tell();
                    }
                    decided_at = new;
                }
            }
        });
        let quiet = || {
            if !event_idx {
                driver::disable_calls(&*ring, false, PASSED)
            }
        };
        listen(&ring, Word::UsedIdx, |next| driver::arm(&*ring, event_idx, next), quiet);
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

// The same race once, without sleeping, to show that the fences decide it: loom cannot unwind out of a
// deadlock.

/// The ring of an end that may lack its fence.
struct End<'a> {
    ring: &'a Ring,
    fenced: bool,
}

impl NotificationWords for End<'_> {
    fn load(&self, word: Word, order: Ordering) -> u16 {
        self.ring.load(word, order)
    }

    fn store(&self, word: Word, value: u16, order: Ordering) {
        self.ring.store(word, value, order);
    }

    fn fence(&self) {
        if self.fenced {
            self.ring.fence();
        }
    }
}

/// The ends that have a fence.
#[derive(Clone, Copy)]
struct Fences {
    teller: bool,
    listener: bool,
}

const BOTH: Fences = Fences { teller: true, listener: true };

/// One publication against one check: the listener finds the element, or is notified.
fn once(fences: Fences, tell: fn(&End<'_>) -> bool, listen: fn(&End<'_>) -> bool) {
    loom::model(move || {
        let ring = Arc::new(Ring::new());
        let listener = thread::spawn({
            let ring = ring.clone();
            move || listen(&End { ring: &ring, fenced: fences.listener })
        });
        let told = tell(&End { ring: &ring, fenced: fences.teller });
        let found = listener.join().unwrap();
        assert!(told || found, "lost");
    });
}

const NEXT: u16 = START.wrapping_add(1);

fn kick_with_event_idx(fences: Fences) {
    once(fences, |end| driver::publish(end, true, START, NEXT), |end| device::arm(end, true, START));
}

fn kick_with_flags(fences: Fences) {
    once(fences, |end| driver::publish(end, false, START, NEXT), |end| device::arm(end, false, START));
}

fn call_with_event_idx(fences: Fences) {
    let tell = |end: &End<'_>| {
        device::show(end, NEXT);
        device::decide(end, true, Some(START), NEXT)
    };
    once(fences, tell, |end| driver::arm(end, true, START));
}

fn call_with_flags(fences: Fences) {
    let tell = |end: &End<'_>| {
        device::show(end, NEXT);
        device::decide(end, false, Some(START), NEXT)
    };
    once(fences, tell, |end| driver::arm(end, false, START));
}

/// Each race is won with both fences, and lost without either.
macro_rules! races {
    ($($race:ident)*) => {
        $(mod $race {
            use super::{$race, BOTH, Fences};

            #[test]
            fn is_won() {
                $race(BOTH);
            }

            #[test]
            #[should_panic(expected = "lost")]
            fn needs_the_tellers_fence() {
                $race(Fences { teller: false, ..BOTH });
            }

            #[test]
            #[should_panic(expected = "lost")]
            fn needs_the_listeners_fence() {
                $race(Fences { listener: false, ..BOTH });
            }
        })*
    };
}

races! {
    kick_with_event_idx
    kick_with_flags
    call_with_event_idx
    call_with_flags
}
