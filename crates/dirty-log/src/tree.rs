//! The translation tables of one space: a radix tree whose entries are words that change atomically.
//!
//! Who looks up takes no lock. Entries change in these ways only:
//!
//! | from | to | by whom |
//! |---|---|---|
//! | none | leaf, table | who maps, under the lock for changes |
//! | leaf, table | none | who unmaps, under that lock; the tables are given back after a wait for all writers |
//! | leaf, writable | leaf, protected | a harvest, without a lock |
//! | small leaf, protected | writable | a writer, without a lock |
//! | large leaf, protected | table of protected leaves in its place | a writer, without a lock |
//! | table in the place of a leaf | leaf | who turns the log off, under the lock for changes |
//!
//! All by compare-and-swap where somebody else could be about to change it as well, so that each step starts from what its author saw.
#![expect(unsafe_code, reason = "island: tables are reached by addresses in entries")]

use crate::entry::Entry;
use crate::level::{ROOT, index};
use crate::node::Node;
use crate::node_pool::NodePool;
use kickless_sync::atomic::{AtomicU64, Ordering};
use std::ptr::NonNull;

/// Where an address leads.
#[derive(Clone, Copy)]
pub(crate) struct Found<'t> {
    pub(crate) at: &'t AtomicU64,
    pub(crate) level: u32,
    pub(crate) entry: Entry,
}

/// The tables of a space. Given back by [`Tree::give_back`] only.
pub(crate) struct Tree {
    root: NonNull<Node>,
}

// SAFETY: tables are shared by all threads and change by atomics only.
unsafe impl Send for Tree {}
// SAFETY: as above.
unsafe impl Sync for Tree {}

impl Tree {
    pub(crate) fn new(nodes: &NodePool) -> Self {
        Self { root: nodes.take() }
    }

    /// The entry that `addr`, below [`crate::level::END`], ends at: a leaf or nothing.
    ///
    /// # Safety
    /// The caller is in a section, or holds the lock for changes; what it gets is good for as long as that.
    #[inline]
    pub(crate) unsafe fn find(&self, addr: u64) -> Found<'_> {
        let (mut node, mut level) = (self.root, ROOT);
        loop {
            // SAFETY: the root lives as long as this tree, a table below it as long as the section of who found it.
            let at = unsafe { &node.as_ref().entries[index(addr, level)] };
            let entry = Entry(at.load(Ordering::Acquire));
            match entry.node() {
                Some(below) if level > 1 => (node, level) = (below, level - 1),
                _ => return Found { at, level, entry },
            }
        }
    }

    /// The entry of `level` for `addr`, with the tables above it, which are made if need be.
    ///
    /// # Safety
    /// The caller holds the lock for changes, and no leaf is mapped above.
    pub(crate) unsafe fn make(&self, nodes: &NodePool, addr: u64, level: u32) -> &AtomicU64 {
        let (mut node, mut at_level) = (self.root, ROOT);
        loop {
            // SAFETY: only who holds the lock takes tables away.
            let at = unsafe { &node.as_ref().entries[index(addr, at_level)] };
            if at_level == level {
                return at;
            }
            node = Entry(at.load(Ordering::Acquire)).node().unwrap_or_else(|| {
                let below = nodes.take();
                at.store(Entry::table(below, false).0, Ordering::Release);
                below
            });
            at_level -= 1;
        }
    }

    pub(crate) fn root(&self) -> NonNull<Node> {
        self.root
    }

    /// Gives all tables back.
    ///
    /// # Safety
    /// No list of the reverse map has an entry of theirs, and nobody uses this tree any more.
    pub(crate) unsafe fn give_back(&self, nodes: &NodePool) {
        // SAFETY: from `NodePool::take`, and out of use.
        unsafe { nodes.give(self.root) };
    }
}

/// Puts a table of the same translations, none of them writable, in the place of a large leaf; `false` if the leaf has changed
/// meanwhile.
pub(crate) fn split(nodes: &NodePool, found: Found<'_>) -> bool {
    let node = nodes.take();
    // SAFETY: a table from the pool, which nobody else fills.
    let entries = unsafe { &node.as_ref().entries };
    for (index, at) in entries.iter().enumerate() {
        let piece = found.entry.piece(found.level, index).with_writable(false);
        // Published by the swap below.
        at.store(piece.0, Ordering::Relaxed);
    }
    let table = Entry::table(node, true);
    let swapped =
        found.at.compare_exchange(found.entry.0, table.0, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    if !swapped {
        // SAFETY: it was never shown to anybody.
        unsafe { nodes.give(node) };
    }
    swapped
}

/// The leaf that this entry of `level` is, or that it was before it was split.
///
/// # Safety
/// The entry is a mapping, and the caller holds the lock for changes.
pub(crate) unsafe fn unsplit(mut entry: Entry) -> Entry {
    // A table in the place of a leaf is full: its first entry begins where the leaf did.
    while let Some(node) = entry.node() {
        // SAFETY: only who holds the lock takes tables away.
        entry = Entry(unsafe { node.as_ref() }.entries[0].load(Ordering::Acquire));
    }
    entry
}

/// Takes the writable bit from a leaf.
#[inline]
pub(crate) fn protect(at: &AtomicU64) {
    let mut entry = Entry(at.load(Ordering::Acquire));
    while entry.is_writable() {
        // Release: who finds it protected finds the log that it was protected for.
        match at.compare_exchange_weak(
            entry.0,
            entry.with_writable(false).0,
            Ordering::AcqRel,
            Ordering::Acquire,
        ) {
            Ok(_) => return,
            Err(now) => entry = Entry(now),
        }
    }
}
