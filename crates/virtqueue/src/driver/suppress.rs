//! The driver's side of [`crate::device::suppress`], which has the argument. The driver tells by kicks and
//! listens for calls.

use crate::device::suppress::{NotificationWords, Word};
use kickless_spec::ring::{AVAIL_F_NO_INTERRUPT, USED_F_NO_NOTIFY, event_passed};
use std::sync::atomic::Ordering;

/// Shows the device the avail entries up to `new`. Returns whether it wants a kick for the entries since
/// `old`, the index at the last decision.
#[inline]
#[must_use]
pub fn publish<W: NotificationWords>(words: &W, event_idx: bool, old: u16, new: u16) -> bool {
    // T1. Release: descriptors and entries are stored before.
    words.store(Word::AvailIdx, new, Ordering::Release);
    // T2. Its partner is the device's fence between its store of avail_event or used.flags and its load of
    // avail.idx.
    words.fence();
    if event_idx {
        event_passed(words.load(Word::AvailEvent, Ordering::Relaxed), new, old)
    } else {
        words.load(Word::UsedFlags, Ordering::Relaxed) & USED_F_NO_NOTIFY == 0
    }
}

/// Asks for a call for the used element at `next_used`. Returns whether the element is there already. In that
/// case its call may never come.
#[inline]
#[must_use]
pub fn arm<W: NotificationWords>(words: &W, event_idx: bool, next_used: u16) -> bool {
    if event_idx {
        words.store(Word::UsedEvent, next_used, Ordering::Relaxed);
    } else {
        words.store(Word::AvailFlags, 0, Ordering::Relaxed);
    }
    // L2. Its partner is the device's fence between its store of used.idx and its load of used_event or
    // avail.flags.
    words.fence();
    // Relaxed: this only asks whether it has moved. The thread that pops loads it again, with acquire.
    words.load(Word::UsedIdx, Ordering::Relaxed) != next_used
}

/// Disables calls. With EVENT_IDX, that needs an event index that the device's index has `passed`.
#[inline]
pub fn disable_calls<W: NotificationWords>(words: &W, event_idx: bool, passed: u16) {
    if event_idx {
        words.store(Word::UsedEvent, passed, Ordering::Relaxed);
    } else {
        words.store(Word::AvailFlags, AVAIL_F_NO_INTERRUPT, Ordering::Relaxed);
    }
}
