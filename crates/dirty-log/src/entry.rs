//! One entry of a translation table, in one atomic word.

use crate::level::{END, PAGE, shift};
use crate::node::Node;
use kickless_memory::Gpa;
use std::ptr::NonNull;

const LEAF: u64 = 1;
const TABLE: u64 = 1 << 1;
/// Flag of a leaf: writable now. It counts only while the slot is logged by write-protection.
const WRITABLE: u64 = 1 << 2;
/// Flag of a leaf: writing is permitted.
const MAY_WRITE: u64 = 1 << 3;
/// Flag of a table: it replaces one leaf.
const SPLIT: u64 = 1 << 2;
const FLAGS: u64 = PAGE - 1;
const TARGET: u64 = END - PAGE;
const SLOT_SHIFT: u32 = 48;

/// An entry: nothing, a leaf, or a table.
///
/// A leaf has its guest-physical address (bits 12 to 47) and the number of its slot (bits 48 to 57). Its size
/// is that of its level. A table has the table's host address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry(pub(crate) u64);

impl Entry {
    pub(crate) const NONE: Self = Self(0);

    /// Returns a leaf that is writable now if `may_write`.
    pub(crate) fn leaf(gpa: u64, slot: usize, may_write: bool) -> Self {
        let write = if may_write { MAY_WRITE | WRITABLE } else { 0 };
        Self(gpa & TARGET | (slot as u64) << SLOT_SHIFT | LEAF | write)
    }

    pub(crate) fn table(node: NonNull<Node>, split: bool) -> Self {
        let flags = if split { TABLE | SPLIT } else { TABLE };
        Self(node.as_ptr().expose_provenance() as u64 | flags)
    }

    #[inline]
    pub(crate) fn is_none(self) -> bool {
        self.0 & (LEAF | TABLE) == 0
    }

    #[inline]
    pub(crate) fn is_leaf(self) -> bool {
        self.0 & LEAF != 0
    }

    #[inline]
    pub(crate) fn is_writable(self) -> bool {
        self.0 & (LEAF | WRITABLE) == LEAF | WRITABLE
    }

    #[inline]
    pub(crate) fn may_write(self) -> bool {
        self.0 & MAY_WRITE != 0
    }

    /// Returns whether this is a leaf, or a table that replaces one.
    pub(crate) fn is_mapping(self) -> bool {
        self.is_leaf() || self.0 & (TABLE | SPLIT) == TABLE | SPLIT
    }

    /// Returns this leaf, writable or not.
    #[inline]
    pub(crate) fn with_writable(self, writable: bool) -> Self {
        Self(if writable { self.0 | WRITABLE } else { self.0 & !WRITABLE })
    }

    /// Returns a leaf's guest-physical address.
    #[inline]
    pub(crate) fn gpa(self) -> Gpa {
        Gpa(self.0 & TARGET)
    }

    /// Returns a leaf's slot.
    #[inline]
    pub(crate) fn slot(self) -> usize {
        (self.0 >> SLOT_SHIFT) as usize
    }

    /// Returns the table, if the entry is one.
    #[inline]
    pub(crate) fn node(self) -> Option<NonNull<Node>> {
        if self.0 & TABLE == 0 {
            return None;
        }
        NonNull::new(std::ptr::with_exposed_provenance_mut((self.0 & !FLAGS) as usize))
    }

    /// Returns smaller leaf number `index` of those that this leaf of level `level` consists of.
    pub(crate) fn piece(self, level: u32, index: usize) -> Self {
        Self(self.0 + ((index as u64) << shift(level - 1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::level::FANOUT;

    #[test]
    fn a_leaf_keeps_its_address_slot_and_flags() {
        let leaf = Entry::leaf(0x7fff_c000_0000, 511, true);
        assert!(leaf.is_leaf() && leaf.is_writable() && leaf.may_write() && leaf.is_mapping());
        assert_eq!((leaf.gpa(), leaf.slot()), (Gpa(0x7fff_c000_0000), 511));
        let protected = leaf.with_writable(false);
        assert!(!protected.is_writable() && protected.may_write());
        assert_eq!(protected.with_writable(true), leaf);
        assert_eq!(leaf.node(), None);
        let last = leaf.piece(3, FANOUT - 1);
        assert_eq!((last.gpa(), last.slot()), (Gpa(0x7fff_ffe0_0000), 511));
        assert!(!Entry::leaf(0, 0, false).is_writable());
    }
}
