//! A descriptor, read once.

use kickless_memory::Iova;
use kickless_spec::ring::DESC_F_NEXT;

/// A descriptor as it was read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Descriptor {
    pub(crate) addr: Iova,
    pub(crate) len: u32,
    pub(crate) flags: u16,
    pub(crate) next: u16,
}

impl Descriptor {
    /// Makes a descriptor from its two words, in our byte order: `addr`, then `len`, `flags` and `next` from
    /// the lowest bit on.
    #[inline]
    pub(crate) fn new([addr, rest]: [u64; 2]) -> Self {
        Self { addr: Iova(addr), len: rest as u32, flags: (rest >> 32) as u16, next: (rest >> 48) as u16 }
    }

    fn from_le(words: [u64; 2]) -> Self {
        Self::new(words.map(u64::from_le))
    }

    /// Makes a descriptor of the packed format. It has an id instead of `flags`, and flags instead of `next`.
    #[inline]
    pub(crate) fn from_packed(words: [u64; 2]) -> Self {
        let desc = Self::new(words);
        Self { flags: desc.next, next: desc.flags, ..desc }
    }

    /// Makes entry `index` of an indirect table with `entries`. In the packed format, entries are
    /// consecutive, and NEXT and the id have no meaning (virtio 1.3, section 2.8.7).
    #[inline]
    pub(crate) fn in_table(words: [u64; 2], packed: bool, index: u16, entries: u32) -> Self {
        if !packed {
            return Self::from_le(words);
        }
        let desc = Self::from_packed(words.map(u64::from_le));
        let next = if u32::from(index) + 1 < entries { DESC_F_NEXT } else { 0 };
        Self { flags: desc.flags & !DESC_F_NEXT | next, next: index.wrapping_add(1), ..desc }
    }
}
