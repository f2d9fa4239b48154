//! A split ring with its kick descriptor and its device's state.

use super::events::Events;
use kickless_spec::ring::{AVAIL_F_NO_INTERRUPT, USED_F_NO_NOTIFY};
use kickless_virtqueue::device::suppress::{self, NotificationWords, Word};
use kickless_virtqueue::driver::suppress as driver;
use loom::sync::Mutex;
use loom::sync::atomic::{AtomicU16, fence};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The number of requests.
const COUNT: u16 = 2;
/// The indices wrap in the middle.
const START: u16 = u16::MAX;
pub(crate) const END: u16 = START.wrapping_add(COUNT);

/// A kick eventfd, which is never read, and the worker that waits for it.
#[derive(Default)]
struct Kick {
    kicked: bool,
    watcher: Option<Arc<Events>>,
}

pub(crate) struct Ring {
    event_idx: bool,
    words: [AtomicU16; 6],
    /// Relaxed, because the index makes them visible.
    requests: [AtomicU16; COUNT as usize],
    /// The next request to serve. Relaxed: it belongs to the owner of the queue, and moves with it.
    next: AtomicU16,
    /// The items of the queue. This lock is unknown to loom, so that it orders nothing.
    items: std::sync::Mutex<Vec<u8>>,
    kick: Mutex<Kick>,
}

impl Ring {
    /// Makes an empty ring that wants no kicks.
    pub(crate) fn new(event_idx: bool) -> Self {
        let passed = START.wrapping_sub(8);
        let words = [AVAIL_F_NO_INTERRUPT, START, passed, USED_F_NO_NOTIFY, START, passed];
        Self {
            event_idx,
            words: words.map(AtomicU16::new),
            requests: [AtomicU16::new(0), AtomicU16::new(0)],
            next: AtomicU16::new(START),
            items: std::sync::Mutex::default(),
            kick: Mutex::new(Kick::default()),
        }
    }

    /// Runs the driver: publishes all requests, each with a kick if one is wanted.
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

    /// Adds the kicks to the worker's wait. An earlier kick counts.
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
        // A thread that touches the queue without owning it finds an old value, or is found by the owner: no
        // two threads serve one request.
        let was = self.next.swap(next.wrapping_add(1), Ordering::Relaxed);
        assert_eq!(was, next, "two have the queue");
        true
    }

    /// Returns the last requests, which were popped and not used.
    pub(crate) fn unserve(&self, count: u16) {
        self.next.store(self.next().wrapping_sub(count), Ordering::Relaxed);
    }

    /// Enables kicks. Returns whether there is work already.
    pub(crate) fn arm(&self) -> bool {
        suppress::arm(self, self.event_idx, self.next())
    }

    /// Disables kicks. With an event index, this needs no store, because the index has been passed or soon
    /// is.
    pub(crate) fn disarm(&self) {
        if !self.event_idx {
            suppress::disable_kicks(self, false, 0);
        }
    }

    /// Records an item of the queue.
    pub(crate) fn record_item(&self, item: u8) {
        self.items.lock().unwrap().push(item);
    }

    pub(crate) fn items(&self) -> Vec<u8> {
        self.items.lock().unwrap().clone()
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
