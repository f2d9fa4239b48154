//! The translation tables of one space: a radix tree whose entries are atomic words.
//!
//! Lookups take no lock. Entries change in these ways only:
//!
//! | from | to | changed by |
//! |---|---|---|
//! | none | leaf, table | a thread that maps, under the lock for changes |
//! | leaf, table | none | a thread that unmaps, under that lock; the tables are given back after a wait for all writers |
//! | leaf, writable | leaf, protected | a harvest, without a lock |
//! | small leaf, protected | writable | a writer, without a lock |
//! | large leaf, protected | table of protected leaves that replaces it | a writer, without a lock |
//! | table that replaces a leaf | leaf | a thread that turns the log off, under the lock for changes |
//!
//! A change that can race with another one is a compare-and-swap, so that it starts from the value that its
//! thread saw.
#![expect(unsafe_code, reason = "island: tables are reached by addresses in entries")]

use crate::entry::Entry;
use crate::level::{ROOT, index};
use crate::node::Node;
use crate::node_pool::NodePool;
use kickless_sync::atomic::{AtomicU64, Ordering};
use std::ptr::NonNull;

/// The entry at which a lookup ended.
#[derive(Clone, Copy)]
pub(crate) struct Found<'t> {
    pub(crate) at: &'t AtomicU64,
    pub(crate) level: u32,
    pub(crate) entry: Entry,
}

/// The tables of a space. Only [`Tree::give_back`] gives them back.
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

    /// Returns the entry for `addr`, which is below [`crate::level::END`]: a leaf or nothing.
    ///
    /// # Safety
    /// The caller is in a section or holds the lock for changes. The result is valid as long as that.
    #[inline]
    pub(crate) unsafe fn find(&self, addr: u64) -> Found<'_> {
        let (mut node, mut level) = (self.root, ROOT);
        loop {
            // SAFETY: the root lives as long as this tree, and a table below it as long as the caller's
            // section.
            let at = unsafe { &node.as_ref().entries[index(addr, level)] };
            let entry = Entry(at.load(Ordering::Acquire));
            match entry.node() {
                Some(below) if level > 1 => (node, level) = (below, level - 1),
                _ => return Found { at, level, entry },
            }
        }
    }

    /// Returns the entry of `level` for `addr`. Makes the tables above it if needed.
    ///
    /// # Safety
    /// The caller holds the lock for changes, and no leaf is mapped above.
    pub(crate) unsafe fn make(&self, nodes: &NodePool, addr: u64, level: u32) -> &AtomicU64 {
        let (mut node, mut at_level) = (self.root, ROOT);
        loop {
            // SAFETY: tables are removed only under the lock, which is held.
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
    /// No list of the reverse map has an entry of these tables, and this tree is not used any more.
    pub(crate) unsafe fn give_back(&self, nodes: &NodePool) {
        // SAFETY: from `NodePool::take`, and out of use.
        unsafe { nodes.give(self.root) };
    }
}

/// Replaces a large leaf by a table of the same translations, none of them writable. Returns false if the
/// leaf has changed meanwhile.
pub(crate) fn split(nodes: &NodePool, found: Found<'_>) -> bool {
    let node = nodes.take();
    // SAFETY: a table from the pool, which no other thread uses.
    let entries = unsafe { &node.as_ref().entries };
    for (index, at) in entries.iter().enumerate() {
        let piece = found.entry.piece(found.level, index).with_writable(false);
        // Relaxed: the swap below publishes it.
        at.store(piece.0, Ordering::Relaxed);
    }
    let table = Entry::table(node, true);
    let swapped =
        found.at.compare_exchange(found.entry.0, table.0, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    if !swapped {
        // SAFETY: it was not shared with another thread.
        unsafe { nodes.give(node) };
    }
    swapped
}

/// Returns the leaf that this entry is, or was before it was split.
///
/// # Safety
/// The entry is a mapping, and the caller holds the lock for changes.
pub(crate) unsafe fn unsplit(mut entry: Entry) -> Entry {
    // A table that replaces a leaf is full, so its first entry has the leaf's address.
    while let Some(node) = entry.node() {
        // SAFETY: tables are removed only under the lock, which is held.
        entry = Entry(unsafe { node.as_ref() }.entries[0].load(Ordering::Acquire));
    }
    entry
}

/// Clears the writable bit of a leaf.
#[inline]
pub(crate) fn protect(at: &AtomicU64) {
    let mut entry = Entry(at.load(Ordering::Acquire));
    while entry.is_writable() {
        // Release: a writer that finds the entry protected finds the log for which it was protected.
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
