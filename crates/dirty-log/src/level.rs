//! Levels of the translation tables, and the size of an entry at each level.

use crate::bounds::BITS;

/// Bits of an address within a page.
pub(crate) const PAGE_BITS: u32 = 12;
/// Bytes of a page.
pub(crate) const PAGE: u64 = 1 << PAGE_BITS;
/// Entries of a table.
pub(crate) const FANOUT: usize = 1 << BITS;
/// The level of the root. Leaves are at level 1 (4 KiB), 2 (2 MiB) and 3 (1 GiB).
pub(crate) const ROOT: u32 = 4;
/// The highest level of leaves.
pub(crate) const LEAF_MAX: u32 = 3;
/// The end of the addresses that can be mapped: 256 TiB.
pub(crate) const END: u64 = 1 << (PAGE_BITS + ROOT * BITS);

/// Returns the bytes that an entry of this level maps, as a power of two.
#[inline]
pub(crate) const fn shift(level: u32) -> u32 {
    PAGE_BITS + (level - 1) * BITS
}

/// Returns the bytes that an entry of this level maps.
#[inline]
pub(crate) const fn size(level: u32) -> u64 {
    1 << shift(level)
}

/// Returns the index of the entry that maps `addr` in a table whose entries are of this level.
#[inline]
pub(crate) const fn index(addr: u64, level: u32) -> usize {
    (addr >> shift(level)) as usize & (FANOUT - 1)
}
