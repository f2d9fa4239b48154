//! The driver's side of [`crate::device::suppress`], where the argument is: the driver tells by kicks and listens for calls.

use crate::device::suppress::{Cells, Word};
use kickless_spec::ring::{AVAIL_F_NO_INTERRUPT, USED_F_NO_NOTIFY, event_passed};
use std::sync::atomic::Ordering;

/// Shows the device the avail entries up to `new`. Whether it wants a kick for those since `old`, the index at the last
/// decision.
#[inline]
#[must_use]
pub fn publish<C: Cells>(cells: &C, event_idx: bool, old: u16, new: u16) -> bool {
    // T1. Release: descriptors and entries come before it.
    cells.store(Word::AvailIdx, new, Ordering::Release);
    // T2, whose partner is the device's fence between avail_event or used.flags and its look at avail.idx.
    cells.fence();
    if event_idx {
        event_passed(cells.load(Word::AvailEvent, Ordering::Relaxed), new, old)
    } else {
        cells.load(Word::UsedFlags, Ordering::Relaxed) & USED_F_NO_NOTIFY == 0
    }
}

/// Asks for a call for the used element at `next_used`. Whether it is there already: then the call for it may never come.
#[inline]
#[must_use]
pub fn arm<C: Cells>(cells: &C, event_idx: bool, next_used: u16) -> bool {
    if event_idx {
        cells.store(Word::UsedEvent, next_used, Ordering::Relaxed);
    } else {
        cells.store(Word::AvailFlags, 0, Ordering::Relaxed);
    }
    // L2, whose partner is the device's fence between used.idx and its look at used_event or avail.flags.
    cells.fence();
    // Relaxed: only whether it moved. Who pops loads it again, with acquire.
    cells.load(Word::UsedIdx, Ordering::Relaxed) != next_used
}

/// Asks for no calls. With EVENT_IDX that is an event index that the device's has passed: `passed`.
#[inline]
pub fn quiet<C: Cells>(cells: &C, event_idx: bool, passed: u16) {
    if event_idx {
        cells.store(Word::UsedEvent, passed, Ordering::Relaxed);
    } else {
        cells.store(Word::AvailFlags, AVAIL_F_NO_INTERRUPT, Ordering::Relaxed);
    }
}
