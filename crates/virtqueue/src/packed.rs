//! The rules of a packed ring, for both ends (virtio 1.3, section 2.8).
//!
//! Both sides write one ring of descriptors. The driver makes the next descriptors available, and the device
//! overwrites descriptors with used ones. Each side has a wrap counter of one bit, which it inverts after
//! each round. The flags of a descriptor show its state: it is available if AVAIL is equal to the driver's
//! counter and USED is not. It is used if both are equal to the device's counter.
//!
//! A batch becomes visible by the flags of its first descriptor, which are stored last and with release. The
//! other side reads descriptors in ring order, and stops at the first one that is not for it.
//!
//! Each side has a structure of four bytes with which it asks for notifications. The argument of
//! [`crate::device::suppress`] holds with "idx" replaced by the flags of the descriptors. The teller stores
//! flags, passes a full fence and loads the other side's structure ([`publish`]). The listener stores its
//! structure, passes a full fence and loads flags ([`arm`]). `tests/loom.rs` runs these functions in every
//! order the memory model allows.

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
    /// Executes a sequentially consistent fence.
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

/// A descriptor of the ring, and its round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingPosition {
    /// Index of the descriptor, from 0 to the size of the ring - 1.
    pub index: u16,
    /// The wrap counter.
    pub wrap: bool,
}

impl RingPosition {
    /// The first position of both sides.
    pub const FIRST: Self = Self { index: 0, wrap: true };

    /// Decodes an index in the low 15 bits and the wrap counter above them, as in event structures and in
    /// vhost-user.
    pub fn from_bits(bits: u16) -> Self {
        Self { index: bits & !EVENT_WRAP, wrap: bits & EVENT_WRAP != 0 }
    }

    /// Encodes the position for [`RingPosition::from_bits`].
    pub fn bits(self) -> u16 {
        self.index | if self.wrap { EVENT_WRAP } else { 0 }
    }

    /// Returns the position `count` descriptors later; at most one round.
    pub fn after(self, count: u16, size: u16) -> Self {
        let index = u32::from(self.index) + u32::from(count);
        if index < u32::from(size) {
            Self { index: index as u16, ..self }
        } else {
            Self { index: (index - u32::from(size)) as u16, wrap: !self.wrap }
        }
    }

    /// Returns the position `count` descriptors earlier; at most one round.
    pub fn before(self, count: u16, size: u16) -> Self {
        match self.index.checked_sub(count) {
            Some(index) => Self { index, ..self },
            None => Self { index: size - (count - self.index), wrap: !self.wrap },
        }
    }

    /// Returns the flags of an available descriptor here.
    pub fn available(self) -> u16 {
        if self.wrap { PACKED_F_AVAIL } else { PACKED_F_USED }
    }

    /// Returns the flags of a used descriptor here.
    pub fn used(self) -> u16 {
        if self.wrap { PACKED_F_AVAIL | PACKED_F_USED } else { 0 }
    }

    /// Returns whether the flags say that the driver has made this descriptor available in this round.
    pub fn is_available(self, flags: u16) -> bool {
        flags & (PACKED_F_AVAIL | PACKED_F_USED) == self.available()
    }

    /// Returns whether the flags say that the device has used this descriptor in this round.
    pub fn is_used(self, flags: u16) -> bool {
        flags & (PACKED_F_AVAIL | PACKED_F_USED) == self.used()
    }

    /// Returns the offset of the descriptor.
    pub fn at(self) -> usize {
        usize::from(self.index) * size_of::<PackedDesc>()
    }

    /// Returns the offset of the descriptor's flags.
    pub fn flags_at(self) -> usize {
        self.at() + PACKED_FLAGS
    }
}

/// Asks for a notification of the descriptor at `position`. Returns whether the descriptor has come already,
/// as `has_come` tells ([`RingPosition::is_available`] or [`RingPosition::is_used`]). In that case its
/// notification may never come.
#[must_use]
pub fn arm<W: Words>(
    ring: &W,
    ours: &W,
    event_idx: bool,
    position: RingPosition,
    has_come: impl FnOnce(RingPosition, u16) -> bool,
) -> bool {
    enable_notifications(ours, event_idx, position);
    // L2. Its partner is the other side's fence between its store of flags and its load of our structure.
    ours.fence();
    // Relaxed: this only asks whether it has come. The thread that takes it loads the flags again, with
    // acquire.
    has_come(position, ring.load(position.flags_at(), Ordering::Relaxed))
}

/// Enables a notification of the descriptor at `position`: step L1 of [`arm`]. The caller must execute the
/// fence L2 after it.
pub fn enable_notifications<W: Words>(ours: &W, event_idx: bool, position: RingPosition) {
    if event_idx {
        ours.store(EVENT_OFF_WRAP, position.bits(), Ordering::Relaxed);
        // Release: a side that reads these flags also reads this position.
        ours.store(EVENT_FLAGS, EVENT_F_DESC, Ordering::Release);
    } else {
        ours.store(EVENT_FLAGS, EVENT_F_ENABLE, Ordering::Relaxed);
    }
}

/// Disables notifications. This is only a hint: the other side may have checked before, and still notify.
pub fn disable_notifications<W: Words>(ours: &W) {
    ours.store(EVENT_FLAGS, EVENT_F_DISABLE, Ordering::Relaxed);
}

/// Shows a batch to the other side by the flags of its first descriptor. `first` is `None` if all of it is
/// visible already.
///
/// Returns whether the other side wants a notification of the `count` descriptors before `next`, at most one
/// round. `count` is `None` if the number since the last decision is unknown. If in doubt, this returns
/// `true`.
#[must_use]
pub fn publish<W: Words>(
    ring: &W,
    theirs: &W,
    event_idx: bool,
    first: Option<(RingPosition, u16)>,
    next: RingPosition,
    count: Option<u16>,
    size: u16,
) -> bool {
    // T1. Release: the rest of the batch is stored before.
    if let Some((first, flags)) = first {
        ring.store(first.flags_at(), flags, Ordering::Release);
    }
    // T2. Its partner is the other side's fence between its store of the event structure and its load of
    // flags.
    ring.fence();
    // Acquire: the partner is the release in `enable_notifications`.
    match theirs.load(EVENT_FLAGS, Ordering::Acquire) {
        EVENT_F_DISABLE => false,
        EVENT_F_DESC if event_idx => {
            let event = theirs.load(EVENT_OFF_WRAP, Ordering::Relaxed);
            count.is_none_or(|count| passed(RingPosition::from_bits(event), next, count, size))
        }
        _ => true,
    }
}

/// Returns whether an advance by `count` descriptors to `next` passed `event`.
fn passed(event: RingPosition, next: RingPosition, count: u16, size: u16) -> bool {
    // An event in another round than `next` is in the round before.
    let at = if event.wrap == next.wrap { event.index } else { event.index.wrapping_sub(size) };
    event_passed(at, next.index, next.index.wrapping_sub(count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back() {
        for size in [1, 2, 3, 7, 32768] {
            let mut position = RingPosition::FIRST;
            for count in [0, 1, 1, size / 2, size, size - 1, 1] {
                let after = position.after(count, size);
                assert_eq!(after.before(count, size), position);
                assert_eq!(RingPosition::from_bits(after.bits()), after);
                position = after;
            }
        }
    }

    #[test]
    fn a_position_belongs_to_one_side() {
        for wrap in [false, true] {
            let (now, last) = (RingPosition { index: 0, wrap }, RingPosition { index: 0, wrap: !wrap });
            assert!(now.is_available(now.available()) && !now.is_used(now.available()));
            assert!(now.is_used(now.used()) && !now.is_available(now.used()));
            // Flags of the previous round belong to neither side.
            assert!(!now.is_available(last.used()) && !now.is_used(last.available()));
        }
    }

    #[test]
    fn events_in_every_window() {
        for size in [1u16, 2, 5, 8] {
            let mut next = RingPosition::FIRST;
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
