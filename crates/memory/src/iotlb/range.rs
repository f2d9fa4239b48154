//! Ranges of addresses, and the access that is allowed there.

use crate::Iova;

/// The access that a device has to an address, or wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Access(u8);

impl Access {
    /// No access.
    pub const NONE: Self = Self(0);
    /// Reading.
    pub const READ: Self = Self(1);
    /// Writing.
    pub const WRITE: Self = Self(2);
    /// Reading and writing.
    pub const BOTH: Self = Self(3);

    /// Returns whether this allows all of `wanted`.
    #[inline]
    pub fn allows(self, wanted: Self) -> bool {
        self.0 & wanted.0 == wanted.0
    }

    /// Returns the access of two bits: 1 to read, 2 to write.
    #[inline]
    pub(super) fn from_bits(bits: u64) -> Self {
        Self((bits & 3) as u8)
    }

    #[inline]
    pub(super) fn bits(self) -> u64 {
        self.0.into()
    }
}

/// Addresses from one to another, both included. A range is never empty, and can hold all addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IovaRange {
    first: u64,
    last: u64,
}

impl IovaRange {
    /// All addresses.
    pub const ALL: Self = Self { first: 0, last: u64::MAX };

    /// Returns the range of `len` bytes from `first` on. If it would wrap, or `len` is 0, it ends at the last
    /// address.
    ///
    /// This is right for an invalidation: a queue asks again for what is dropped without need, but a range
    /// that is too small would leave invalid translations.
    #[inline]
    pub fn new(first: Iova, len: u64) -> Self {
        let last = first.0.saturating_add(len.wrapping_sub(1));
        Self { first: first.0, last: if len == 0 { u64::MAX } else { last } }
    }

    /// Returns the first address.
    pub fn first(self) -> Iova {
        Iova(self.first)
    }

    /// Returns the last address.
    pub fn last(self) -> Iova {
        Iova(self.last)
    }

    /// Returns whether both have an address in common.
    #[inline]
    pub fn overlaps(self, other: Self) -> bool {
        self.first <= other.last && other.first <= self.last
    }

    /// Returns whether all addresses of `other` are in this range.
    pub fn contains(self, other: Self) -> bool {
        self.first <= other.first && other.last <= self.last
    }

    /// Returns the smallest range that contains both.
    pub fn hull(self, other: Self) -> Self {
        Self { first: self.first.min(other.first), last: self.last.max(other.last) }
    }

    /// Returns both ranges as one if `next` begins right after this one.
    #[inline]
    pub fn joined(self, next: Self) -> Option<Self> {
        (self.last.checked_add(1) == Some(next.first)).then_some(Self { first: self.first, last: next.last })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_end_where_addresses_do() {
        let range = |first, len| IovaRange::new(Iova(first), len);
        assert_eq!(range(0x1000, 0x1000).last(), Iova(0x1fff));
        assert_eq!(range(0x1000, 0).last(), Iova(u64::MAX));
        assert_eq!(range(0x1000, u64::MAX).last(), Iova(u64::MAX));
        assert_eq!(range(u64::MAX, 1).last(), Iova(u64::MAX));
        assert_eq!(range(0, 0), IovaRange::ALL);
        assert!(range(0, 0x1000).overlaps(range(0xfff, 1)) && !range(0, 0x1000).overlaps(range(0x1000, 1)));
        assert_eq!(range(0, 0x1000).joined(range(0x1000, 1)), Some(range(0, 0x1001)));
        assert_eq!(range(0, 0x1000).joined(range(0x1001, 1)), None);
        assert_eq!(IovaRange::ALL.joined(range(0, 1)), None);
        assert!(IovaRange::ALL.contains(range(5, 5)) && !range(5, 5).contains(range(5, 6)));
    }
}
