//! Suppression of notifications, and the four fences that it needs.
//!
//! Each end can say that it wants no notifications for now. So a decision to sleep at one end races with a
//! decision not to notify at the other. Both directions are the same problem. The *teller* publishes an
//! index, and then checks whether the *listener* wants a notification. The listener says that it wants one,
//! and then checks the index.
//!
//! ```text
//!   teller                                  listener
//!   T1  store idx                           L1  store "tell me" (event index or flag)
//!   T2  full fence                          L2  full fence
//!   T3  load "tell me"                      L3  load idx
//!   notifies if asked to                    sleeps if idx has not moved
//! ```
//!
//! T2 and L2 are partners. One of them comes first in the single order of all full fences. If T2 is first, L3
//! sees the store of T1, and the listener does not sleep. If L2 is first, T3 sees the store of L1, and the
//! teller notifies. So one of them always sees the other. Without either fence, a store can still be in its
//! core's buffer when the following load is done, and both can miss.
//!
//! | direction | teller | publishes | listener | asks by |
//! |---|---|---|---|---|
//! | kick | driver | `avail.idx` | device ([`arm`]) | `avail_event`, or `used.flags` without NO_NOTIFY |
//! | call | device ([`show`], [`decide`]) | `used.idx` | driver | `used_event`, or `avail.flags` without NO_INTERRUPT |
//!
//! With EVENT_IDX, the listener names the index whose passing it wants to hear of. The teller compares that
//! with the window from the index of its *last decision* to the new one. So a decision must follow each
//! publication, or several of them together; otherwise an event in the gap is lost. A listener that does not
//! sleep does not change its event index. The teller's index has passed it, and passes it again only after it
//! has gone through its whole range ([`disable_kicks`]).
//!
//! The data is published with the index, independently of this: T1 is a release store, and a side that uses
//! the published data loads the index with acquire.

use kickless_spec::ring::{AVAIL_F_NO_INTERRUPT, USED_F_NO_NOTIFY, event_passed};
use std::sync::atomic::Ordering;

/// The 16-bit words of a split ring that both ends use to agree on notifications.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// `avail.flags`, the driver's.
    AvailFlags,
    /// `avail.idx`, the driver's.
    AvailIdx,
    /// `used_event` behind the avail ring, the driver's.
    UsedEvent,
    /// `used.flags`, the device's.
    UsedFlags,
    /// `used.idx`, the device's.
    UsedIdx,
    /// `avail_event` behind the used ring, the device's.
    AvailEvent,
}

/// Access to these words: a ring's memory, or a model checker's atomics.
pub trait NotificationWords {
    /// Loads a word.
    fn load(&self, word: Word, order: Ordering) -> u16;
    /// Stores a word.
    fn store(&self, word: Word, value: u16, order: Ordering);
    /// Executes a sequentially consistent fence.
    fn fence(&self);
}

/// Asks for kicks from `next_avail` on, the first entry that is not popped. Returns whether there is
/// something to pop already. In that case its kick may never come.
#[inline]
#[must_use]
pub fn arm<W: NotificationWords>(words: &W, event_idx: bool, next_avail: u16) -> bool {
    enable_kicks(words, event_idx, next_avail);
    // L2. Its partner is the driver's fence between its store of avail.idx and its load of avail_event or
    // used.flags.
    words.fence();
    // Relaxed: this only asks whether it has moved. The thread that pops loads it again, with acquire.
    words.load(Word::AvailIdx, Ordering::Relaxed) != next_avail
}

/// Enables kicks: step L1 of [`arm`]. The caller must execute the fence L2 after it.
#[inline]
pub fn enable_kicks<W: NotificationWords>(words: &W, event_idx: bool, next_avail: u16) {
    if event_idx {
        words.store(Word::AvailEvent, next_avail, Ordering::Relaxed);
    } else {
        words.store(Word::UsedFlags, 0, Ordering::Relaxed);
    }
}

/// Disables kicks. With EVENT_IDX, that needs an event index that the driver's index has `passed`.
///
/// This is only a hint: the driver may have checked before, and still kick.
#[inline]
pub fn disable_kicks<W: NotificationWords>(words: &W, event_idx: bool, passed: u16) {
    if event_idx {
        words.store(Word::AvailEvent, passed, Ordering::Relaxed);
    } else {
        words.store(Word::UsedFlags, USED_F_NO_NOTIFY, Ordering::Relaxed);
    }
}

/// Shows the driver the used elements up to `new`: T1. A call of [`decide`] must follow.
#[inline]
pub fn show<W: NotificationWords>(words: &W, new: u16) {
    // Release: the elements, and the bytes in the buffers, are written before.
    words.store(Word::UsedIdx, new, Ordering::Release);
}

/// Returns whether the driver wants a call for the elements up to `new` that it was shown.
///
/// `old` is the index at the last decision, or `None` if that is unknown. The driver is then called if in
/// doubt.
#[inline]
#[must_use]
pub fn decide<W: NotificationWords>(words: &W, event_idx: bool, old: Option<u16>, new: u16) -> bool {
    // T2. Its partner is the driver's fence between its store of used_event or avail.flags and its load of
    // used.idx.
    words.fence();
    if event_idx {
        let event = words.load(Word::UsedEvent, Ordering::Relaxed);
        old.is_none_or(|old| event_passed(event, new, old))
    } else {
        words.load(Word::AvailFlags, Ordering::Relaxed) & AVAIL_F_NO_INTERRUPT == 0
    }
}
