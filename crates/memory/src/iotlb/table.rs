//! The radix tree and its readers. The module above says why they can read it while it changes.

use kickless_sync::atomic::{AtomicU64, Ordering};
use std::sync::OnceLock;

/// Bits of the address that choose an entry in a node. A model has few, so that it has few entries to search.
pub(super) const BITS: u32 = if cfg!(loom) { 1 } else { 9 };
/// Levels of nodes: enough for a page number of 64 - 12 bits, or for a model.
pub(super) const LEVELS: u32 = if cfg!(loom) { 3 } else { 6 };
/// Entries of a node.
pub(super) const FANOUT: usize = 1 << BITS;
/// The node that always exists.
pub(super) const ROOT: u32 = 0;
/// The highest level that has leaves. They have 1 GiB there.
pub(super) const LEAF_LEVEL_MAX: u32 = 2;
/// Bits of the offset in a page.
pub(super) const PAGE_BITS: u32 = 12;

/// Flag of an entry that is a leaf. Bits from 1 on have the allowed access, bits from 12 on the address.
const LEAF: u64 = 1;
const ACCESS_SHIFT: u32 = 1;
/// Flag of an entry that leads to a node. Bits from 12 on have the node's number.
const NODE: u64 = 8;

/// An entry as it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    Empty,
    Node(u32),
    Leaf(Leaf),
}

/// A leaf: a front-end's address, whose lowest 12 bits are zero, and bits of [`super::Access`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Leaf {
    pub(super) user: u64,
    pub(super) access: u64,
}

impl Leaf {
    /// Returns the leaf for the address that is `pages` pages higher.
    #[inline]
    pub(super) fn offset_by(self, pages: u64) -> Self {
        Self { user: self.user.wrapping_add(pages << PAGE_BITS), ..self }
    }
}

impl Entry {
    #[inline]
    fn from_bits(bits: u64) -> Self {
        let rest = bits & !((1 << PAGE_BITS) - 1);
        if bits & LEAF != 0 {
            Self::Leaf(Leaf { user: rest, access: (bits >> ACCESS_SHIFT) & 3 })
        } else if bits & NODE != 0 {
            Self::Node((rest >> PAGE_BITS) as u32)
        } else {
            Self::Empty
        }
    }

    fn bits(self) -> u64 {
        match self {
            Self::Empty => 0,
            Self::Node(number) => u64::from(number) << PAGE_BITS | NODE,
            Self::Leaf(Leaf { user, access }) => user | access << ACCESS_SHIFT | LEAF,
        }
    }
}

/// Returns the index of a page's entry in a node at `level`.
#[inline]
pub(super) fn index(page: u64, level: u32) -> usize {
    (page >> (BITS * level)) as usize & (FANOUT - 1)
}

/// Returns the number of pages under one entry at `level`.
#[inline]
pub(super) fn span(level: u32) -> u64 {
    1 << (BITS * level)
}

type Node = Box<[AtomicU64; FANOUT]>;

/// The translations that the front-end has sent. Any number of queues may read it.
#[derive(Debug)]
pub struct Table {
    /// The nodes by number. A node is allocated when it is first needed, and is never freed.
    nodes: Box<[OnceLock<Node>]>,
}

impl Table {
    /// Makes an empty table with room for `nodes_max` nodes and the root.
    pub(super) fn new(nodes_max: u32) -> Self {
        let table = Self { nodes: (0..=nodes_max).map(|_| OnceLock::new()).collect() };
        table.allocate(ROOT);
        table
    }

    /// Allocates a node unless it exists. An existing node does not change.
    pub(super) fn allocate(&self, number: u32) {
        if let Some(place) = self.nodes.get(number as usize) {
            place.get_or_init(|| Box::new(std::array::from_fn(|_| AtomicU64::new(0))));
        }
    }

    #[inline]
    fn entry(&self, node: u32, index: usize) -> Option<&AtomicU64> {
        self.nodes.get(node as usize)?.get()?.get(index)
    }

    /// Returns the number of allocated nodes.
    pub(super) fn allocated(&self) -> usize {
        self.nodes.iter().filter(|node| node.get().is_some()).count()
    }

    /// Returns the number of bytes that the table takes for the numbers of its nodes.
    pub(super) fn fixed_bytes(&self) -> usize {
        size_of_val(&*self.nodes)
    }

    /// Returns the leaf over a page, moved on to that page.
    #[inline]
    pub(super) fn get(&self, page: u64) -> Option<Leaf> {
        self.find(page).map(|(leaf, level)| leaf.offset_by(page & (span(level) - 1)))
    }

    /// Returns the leaf over a page as it stands in the table, and its level.
    #[inline]
    pub(super) fn find(&self, page: u64) -> Option<(Leaf, u32)> {
        let (mut node, mut level) = (ROOT, LEVELS - 1);
        loop {
            match self.load(node, index(page, level)) {
                Entry::Leaf(leaf) => return Some((leaf, level)),
                Entry::Node(child) if level > 0 => {
                    node = child;
                    level -= 1;
                }
                _ => return None,
            }
        }
    }

    /// Reads an entry.
    #[inline]
    pub(super) fn load(&self, node: u32, index: usize) -> Entry {
        // Acquire: the node that the entry leads to was filled before. The partner is in `store`.
        Entry::from_bits(self.entry(node, index).map_or(0, |entry| entry.load(Ordering::Acquire)))
    }

    /// Writes an entry. Only the session may call this.
    pub(super) fn store(&self, node: u32, index: usize, entry: Entry) {
        if let Some(place) = self.entry(node, index) {
            // Release: see `load`.
            place.store(entry.bits(), Ordering::Release);
        }
    }
}
