//! A split ring with its kick descriptor, and what its device keeps of it.

use super::events::Events;
use kickless_spec::ring::{AVAIL_F_NO_INTERRUPT, USED_F_NO_NOTIFY};
use kickless_virtqueue::device::suppress::{self, NotificationWords, Word};
use kickless_virtqueue::driver::suppress as driver;
use loom::sync::Mutex;
use loom::sync::atomic::{AtomicU16, fence};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// How many requests go through.
const COUNT: u16 = 2;
/// The indices wrap in the middle.
const START: u16 = u16::MAX;
pub(crate) const END: u16 = START.wrapping_add(COUNT);

/// An eventfd that nobody reads, and the worker that waits for it.
#[derive(Default)]
struct Kick {
    kicked: bool,
    watcher: Option<Arc<Events>>,
}

pub(crate) struct Ring {
    event_idx: bool,
    words: [AtomicU16; 6],
    /// Relaxed: what makes them visible is the index.
    requests: [AtomicU16; COUNT as usize],
    /// The next to serve. Relaxed: it goes with the queue, to whoever has that.
    next: AtomicU16,
    /// What the queue was asked. A lock that loom does not know, so that it orders nothing.
    asked: std::sync::Mutex<Vec<u8>>,
    kick: Mutex<Kick>,
}

impl Ring {
    /// Empty, and no kicks are wanted.
    pub(crate) fn new(event_idx: bool) -> Self {
        let passed = START.wrapping_sub(8);
        let words = [AVAIL_F_NO_INTERRUPT, START, passed, USED_F_NO_NOTIFY, START, passed];
        Self {
            event_idx,
            words: words.map(AtomicU16::new),
            requests: [AtomicU16::new(0), AtomicU16::new(0)],
            next: AtomicU16::new(START),
            asked: std::sync::Mutex::default(),
            kick: Mutex::new(Kick::default()),
        }
    }

    /// The driver's part: all requests, each with a kick if one is wanted.
    pub(crate) fn drive(&self) {
        for nth in 0..COUNT {
            let old = START.wrapping_add(nth);
            self.requests[usize::from(nth)].store(old, Ordering::Relaxed);
            if driver::publish(self, self.event_idx, old, old.wrapping_add(1)) {
                let mut kick = self.kick.lock().unwrap();
                kick.kicked = true;
                if let Some(watcher) = &kick.watcher {
                    watcher.set_kick(true);
                }
            }
        }
    }

    /// Waits for kicks; one that has come before counts.
    pub(crate) fn watch(&self, events: &Arc<Events>) {
        let mut kick = self.kick.lock().unwrap();
        assert!(kick.watcher.is_none(), "two workers have it");
        kick.watcher = Some(events.clone());
        if kick.kicked {
            events.set_kick(true);
        }
    }

    pub(crate) fn unwatch(&self) {
        if let Some(events) = self.kick.lock().unwrap().watcher.take() {
            events.set_kick(false);
        }
    }

    pub(crate) fn next(&self) -> u16 {
        self.next.load(Ordering::Relaxed)
    }

    pub(crate) fn has_work(&self) -> bool {
        self.load(Word::AvailIdx, Ordering::Acquire) != self.next()
    }

    /// Serves one request, if there is one.
    pub(crate) fn serve(&self) -> bool {
        let next = self.next();
        if !self.has_work() {
            return false;
        }
        let request = self.requests[usize::from(next.wrapping_sub(START))].load(Ordering::Relaxed);
        assert_eq!(request, next, "not the one that was published");
        // Who touches the queue without having been given it finds an old value, or is found by the other: no two serve one request.
        let was = self.next.swap(next.wrapping_add(1), Ordering::Relaxed);
        assert_eq!(was, next, "two have the queue");
        true
    }

    /// Takes back what was served last and not used.
    pub(crate) fn unserve(&self, count: u16) {
        self.next.store(self.next().wrapping_sub(count), Ordering::Relaxed);
    }

    /// Whether there is work already.
    pub(crate) fn arm(&self) -> bool {
        suppress::arm(self, self.event_idx, self.next())
    }

    /// An event index needs no silencing, for it has been passed or is about to be.
    pub(crate) fn disarm(&self) {
        if !self.event_idx {
            suppress::quiet(self, false, 0);
        }
    }

    /// Notes what the queue was asked.
    pub(crate) fn note(&self, what: u8) {
        self.asked.lock().unwrap().push(what);
    }

    pub(crate) fn asked(&self) -> Vec<u8> {
        self.asked.lock().unwrap().clone()
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
