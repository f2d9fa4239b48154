//! What both ends of a packed ring know (virtio 1.3, section 2.8).
//!
//! One ring of descriptors that both sides write: the driver makes the next places available, the device overwrites places
//! with what it has used. Each side counts its rounds by a wrap counter of one bit, and the flags of a place say whose it
//! is: available if AVAIL is the driver's counter and USED is not, used if both are the device's.
//!
//! A batch is shown by the flags of its first descriptor, stored last and with release: the other side reads places in their
//! order, and stops at the first that is not for it.
//!
//! Notifications are asked for by two structures of four bytes, one of each side. The argument of
//! [`crate::device::suppress`] holds with "idx" replaced by the flags of the descriptors: who tells stores flags, passes a
//! full fence and loads the other side's structure ([`publish`]); who listens stores its structure, passes a full fence and
//! loads flags ([`arm`]). `tests/loom.rs` runs these functions in every order the memory model allows.

use kickless_memory::Area;
use kickless_spec::ring::{
    EVENT_F_DESC, EVENT_F_DISABLE, EVENT_F_ENABLE, EVENT_FLAGS, EVENT_OFF_WRAP, EVENT_WRAP, PACKED_F_AVAIL,
    PACKED_F_USED, PACKED_FLAGS, PackedDesc, event_passed,
};
use std::sync::atomic::{Ordering, fence};

/// Access to the 16-bit words of one of the three areas: the memory itself, or a model checker's atomics.
pub trait Words {
    /// Loads the word at an offset in bytes.
    fn load(&self, at: usize, order: Ordering) -> u16;
    /// Stores the word at an offset in bytes.
    fn store(&self, at: usize, value: u16, order: Ordering);
    /// A sequentially consistent fence.
    fn fence(&self);
}

impl Words for Area {
    #[inline(always)]
    fn load(&self, at: usize, order: Ordering) -> u16 {
        self.load_u16(at, order)
    }

    #[inline(always)]
    fn store(&self, at: usize, value: u16, order: Ordering) {
        self.store_u16(at, value, order);
    }

    #[inline(always)]
    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

/// A place in the ring, and the round that it is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Which descriptor, from 0 to the size of the ring - 1.
    pub index: u16,
    /// The wrap counter.
    pub wrap: bool,
}

impl Place {
    /// Where both sides begin.
    pub const FIRST: Self = Self { index: 0, wrap: true };

    /// From an index in the low 15 bits and the wrap counter above them, as event structures and vhost-user carry it.
    #[inline]
    pub fn from_bits(bits: u16) -> Self {
        Self { index: bits & !EVENT_WRAP, wrap: bits & EVENT_WRAP != 0 }
    }

    /// What [`Place::from_bits`] takes.
    #[inline]
    pub fn bits(self) -> u16 {
        self.index | if self.wrap { EVENT_WRAP } else { 0 }
    }

    /// `count` places on; no more than a round.
    #[inline]
    pub fn after(self, count: u16, size: u16) -> Self {
        let index = u32::from(self.index) + u32::from(count);
        if index < u32::from(size) {
            Self { index: index as u16, ..self }
        } else {
            Self { index: (index - u32::from(size)) as u16, wrap: !self.wrap }
        }
    }

    /// `count` places back; no more than a round.
    #[inline]
    pub fn before(self, count: u16, size: u16) -> Self {
        match self.index.checked_sub(count) {
            Some(index) => Self { index, ..self },
            None => Self { index: size - (count - self.index), wrap: !self.wrap },
        }
    }

    /// What the driver writes into the flags of an available descriptor here.
    #[inline]
    pub fn available(self) -> u16 {
        if self.wrap { PACKED_F_AVAIL } else { PACKED_F_USED }
    }

    /// What the device writes into the flags of a used descriptor here.
    #[inline]
    pub fn used(self) -> u16 {
        if self.wrap { PACKED_F_AVAIL | PACKED_F_USED } else { 0 }
    }

    /// Whether flags say that the driver has made this place available in this round.
    #[inline]
    pub fn is_available(self, flags: u16) -> bool {
        flags & (PACKED_F_AVAIL | PACKED_F_USED) == self.available()
    }

    /// Whether flags say that the device has used this place in this round.
    #[inline]
    pub fn is_used(self, flags: u16) -> bool {
        flags & (PACKED_F_AVAIL | PACKED_F_USED) == self.used()
    }

    /// Where its descriptor begins.
    #[inline]
    pub fn at(self) -> usize {
        usize::from(self.index) * size_of::<PackedDesc>()
    }

    /// Where the flags of its descriptor are.
    #[inline]
    pub fn flags_at(self) -> usize {
        self.at() + PACKED_FLAGS
    }
}

/// Asks to be notified of what comes at `place`. Whether that has come already, by `come` ([`Place::is_available`] or
/// [`Place::is_used`]): then the notification of it may never come.
#[inline]
#[must_use]
pub fn arm<W: Words>(
    ring: &W,
    ours: &W,
    event_idx: bool,
    place: Place,
    come: impl FnOnce(Place, u16) -> bool,
) -> bool {
    ask(ours, event_idx, place);
    // L2, whose partner is the other side's fence between flags of descriptors and its look at our structure.
    ours.fence();
    // Relaxed: only whether it came. Who takes it loads it again, with acquire.
    come(place, ring.load(place.flags_at(), Ordering::Relaxed))
}

/// Says that a notification is wanted for what comes at `place`. The fence that belongs behind it (L2) is the caller's.
#[inline]
pub fn ask<W: Words>(ours: &W, event_idx: bool, place: Place) {
    if event_idx {
        ours.store(EVENT_OFF_WRAP, place.bits(), Ordering::Relaxed);
        // Release: who reads these flags reads that place.
        ours.store(EVENT_FLAGS, EVENT_F_DESC, Ordering::Release);
    } else {
        ours.store(EVENT_FLAGS, EVENT_F_ENABLE, Ordering::Relaxed);
    }
}

/// Says that no notification is wanted. Only a hint: who has looked before notifies all the same.
#[inline]
pub fn quiet<W: Words>(ours: &W) {
    ours.store(EVENT_FLAGS, EVENT_F_DISABLE, Ordering::Relaxed);
}

/// Shows the other side a batch by the flags of its first descriptor, unless it has seen all of it. Whether it wants to be
/// notified of the `count` places up to `next`, at most a round; `None`: how many there were since the last decision is not known, and if in doubt it is notified.
#[inline]
#[must_use]
pub fn publish<W: Words>(
    ring: &W,
    theirs: &W,
    event_idx: bool,
    first: Option<(Place, u16)>,
    next: Place,
    count: Option<u16>,
    size: u16,
) -> bool {
    // T1. Release: everything else of the batch comes before it.
    if let Some((first, flags)) = first {
        ring.store(first.flags_at(), flags, Ordering::Release);
    }
    // T2, whose partner is the other side's fence between its event structure and its look at the flags.
    ring.fence();
    // Acquire, whose partner is the release in `ask`.
    match theirs.load(EVENT_FLAGS, Ordering::Acquire) {
        EVENT_F_DISABLE => false,
        EVENT_F_DESC if event_idx => {
            let event = theirs.load(EVENT_OFF_WRAP, Ordering::Relaxed);
            count.is_none_or(|count| passed(Place::from_bits(event), next, count, size))
        }
        _ => true,
    }
}

/// Whether going `count` places on to `next` passed `event`.
#[inline]
fn passed(event: Place, next: Place, count: u16, size: u16) -> bool {
    // In another round than `next`, it is behind.
    let at = if event.wrap == next.wrap { event.index } else { event.index.wrapping_sub(size) };
    event_passed(at, next.index, next.index.wrapping_sub(count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back() {
        for size in [1, 2, 3, 7, 32768] {
            let mut place = Place::FIRST;
            for count in [0, 1, 1, size / 2, size, size - 1, 1] {
                let after = place.after(count, size);
                assert_eq!(after.before(count, size), place);
                assert_eq!(Place::from_bits(after.bits()), after);
                place = after;
            }
        }
    }

    #[test]
    fn a_place_is_one_sides() {
        for wrap in [false, true] {
            let (now, last) = (Place { index: 0, wrap }, Place { index: 0, wrap: !wrap });
            assert!(now.is_available(now.available()) && !now.is_used(now.available()));
            assert!(now.is_used(now.used()) && !now.is_available(now.used()));
            // What is left of the round before is neither's.
            assert!(!now.is_available(last.used()) && !now.is_used(last.available()));
        }
    }

    #[test]
    fn events_in_every_window() {
        for size in [1u16, 2, 5, 8] {
            let mut next = Place::FIRST;
            for _ in 0..3 * size {
                for count in 0..=size {
                    let old = next.before(count, size);
                    for at in 0..size {
                        let event = old.after(at, size);
                        assert_eq!(
                            passed(event, next, count, size),
                            at < count,
                            "{size} {next:?} {count} {at}"
                        );
                    }
                }
                next = next.after(1, size);
            }
        }
    }
}
