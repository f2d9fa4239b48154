//! Who has to notify whom, and the four fences that it takes.
//!
//! Either end can say that it wants no notifications for now, and so each decision to sleep and each decision
//! not to notify race with each other. Both directions are the same problem: a *teller* publishes an index
//! and then looks whether the *listener* wants to be told; the listener says that it wants to be told and
//! then looks at the index.
//!
//! ```text
//!   teller                                  listener
//!   T1  store idx                           L1  store "tell me" (event index or flag)
//!   T2  full fence                          L2  full fence
//!   T3  load "tell me"                      L3  load idx
//!   tells if it was asked to                sleeps if idx has not moved
//! ```
//!
//! T2 and L2 are partners. One of them comes first in the single order of all full fences. If it is T2, L3
//! sees what T1 stored, and the listener does not sleep. If it is L2, T3 sees what L1 stored, and the teller
//! tells. So they never both miss each other; without either fence, the store can still be in its core's
//! buffer when the load is done, and they can.
//!
//! | direction | teller | publishes | listener | says it with |
//! |---|---|---|---|---|
//! | kick | driver | `avail.idx` | device ([`arm`]) | `avail_event`, or `used.flags` without NO_NOTIFY |
//! | call | device ([`show`], [`decide`]) | `used.idx` | driver | `used_event`, or `avail.flags` without NO_INTERRUPT |
//!
//! With EVENT_IDX the listener names the index whose passing it wants to hear of, and the teller compares
//! that with the window from the index of its *last decision* to the new one: each publication is followed by a decision, its own
//! or one for several, or an event in the gap is lost. A listener that does not sleep does not touch
//! its event index, which the teller's index has passed and does not pass again before it has gone round
//! ([`quiet`]).
//!
//! The data go with the index, apart from all that: T1 is a release store, and whoever looks at the index to
//! use what it publishes loads it with acquire.

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

/// Access to those words: a ring's memory, or a model checker's atomics.
pub trait Cells {
    /// Loads a word.
    fn load(&self, word: Word, order: Ordering) -> u16;
    /// Stores a word.
    fn store(&self, word: Word, value: u16, order: Ordering);
    /// A sequentially consistent fence.
    fn fence(&self);
}

/// Asks for kicks from `next_avail` on, the first entry that was not popped. Whether there is something to
/// pop already: then the kick for it may never come.
#[inline]
#[must_use]
pub fn arm<C: Cells>(cells: &C, event_idx: bool, next_avail: u16) -> bool {
    ask(cells, event_idx, next_avail);
    // L2, whose partner is the driver's fence between avail.idx and its look at avail_event or used.flags.
    cells.fence();
    // Relaxed: only whether it moved. Who pops loads it again, with acquire.
    cells.load(Word::AvailIdx, Ordering::Relaxed) != next_avail
}

/// L1 of [`arm`]: says that kicks are wanted, and no more.
#[inline]
pub fn ask<C: Cells>(cells: &C, event_idx: bool, next_avail: u16) {
    if event_idx {
        cells.store(Word::AvailEvent, next_avail, Ordering::Relaxed);
    } else {
        cells.store(Word::UsedFlags, 0, Ordering::Relaxed);
    }
}

/// Says that no kicks are wanted. With EVENT_IDX that is an event index that the driver's has passed:
/// `passed`.
///
/// Only a hint: a driver that has looked before kicks all the same.
#[inline]
pub fn quiet<C: Cells>(cells: &C, event_idx: bool, passed: u16) {
    if event_idx {
        cells.store(Word::AvailEvent, passed, Ordering::Relaxed);
    } else {
        cells.store(Word::UsedFlags, USED_F_NO_NOTIFY, Ordering::Relaxed);
    }
}

/// Shows a driver that is looking the used elements up to `new`: T1. [`decide`] has to follow.
#[inline]
pub fn show<C: Cells>(cells: &C, new: u16) {
    // Release: the elements, and what was written into the buffers, come before it.
    cells.store(Word::UsedIdx, new, Ordering::Release);
}

/// Whether the driver wants a call for what it was shown, up to `new`.
///
/// `old` is the index at the last decision; `None` if that is not known, and then the driver is called if in
/// doubt.
#[inline]
#[must_use]
pub fn decide<C: Cells>(cells: &C, event_idx: bool, old: Option<u16>, new: u16) -> bool {
    // T2, whose partner is the driver's fence between used_event or avail.flags and its look at used.idx.
    cells.fence();
    if event_idx {
        let event = cells.load(Word::UsedEvent, Ordering::Relaxed);
        old.is_none_or(|old| event_passed(event, new, old))
    } else {
        cells.load(Word::AvailFlags, Ordering::Relaxed) & AVAIL_F_NO_INTERRUPT == 0
    }
}
