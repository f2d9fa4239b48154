//! The only writer of the table.

use super::table::{self, Entry, FANOUT, LEAF_LEVEL_MAX, LEVELS, Leaf, PAGE_BITS, ROOT, Table};
use super::{Access, IovaRange, UpdateError};
use crate::{Iova, UserAddr};
use std::sync::Arc;

/// Largest number of nodes of a table, of 4 KiB each. It bounds the memory that a front-end can make us
/// allocate.
pub const TABLES_MAX: u32 = 8192;

/// The session's end of the translations. Queues read its [`Table`].
#[derive(Debug)]
pub struct Iotlb {
    table: Arc<Table>,
    /// Number of used entries, by node.
    used: Vec<u16>,
    nodes_max: u32,
    /// Nodes that no queue can be reading. They are all zero.
    free: Vec<u32>,
    /// Unlinked nodes that a queue may still be reading.
    limbo: Vec<u32>,
    /// The page behind which the next eviction begins.
    next_evicted: u64,
    /// See [`Iotlb::take_stale`].
    stale: Option<IovaRange>,
}

impl Default for Iotlb {
    fn default() -> Self {
        Self::new(TABLES_MAX)
    }
}

impl Iotlb {
    /// Makes an empty table with room for this many nodes.
    pub fn new(nodes_max: u32) -> Self {
        let table = Arc::new(Table::new(nodes_max));
        Self {
            table,
            used: vec![0],
            nodes_max,
            free: Vec::new(),
            limbo: Vec::new(),
            next_evicted: 0,
            stale: None,
        }
    }

    /// Returns the table that queues read.
    pub fn table(&self) -> &Arc<Table> {
        &self.table
    }

    /// Returns the number of bytes of memory that the table takes.
    pub fn bytes(&self) -> usize {
        self.table.fixed_bytes() + self.table.allocated() * FANOUT * size_of::<u64>()
    }

    /// Adds a translation: the `len` bytes at `iova` are those at the front-end's address `user`.
    ///
    /// It replaces the previous translation of these addresses. If the previous one was different, it counts
    /// as invalidated: see [`Iotlb::take_stale`].
    ///
    /// # Errors
    /// See [`UpdateError`]. With [`UpdateError::Full`], the table may have a part of the translation, which
    /// is valid.
    pub fn update(
        &mut self,
        iova: Iova,
        len: u64,
        user: UserAddr,
        access: Access,
    ) -> Result<(), UpdateError> {
        if len == 0 {
            return Err(UpdateError::Empty { iova });
        }
        if access == Access::NONE {
            return Err(UpdateError::NoAccess { iova });
        }
        if iova.0.checked_add(len - 1).is_none() || user.0.checked_add(len - 1).is_none() {
            return Err(UpdateError::Wraps { iova, user, len });
        }
        if (iova.0 | user.0 | len) & ((1 << PAGE_BITS) - 1) != 0 {
            return Err(UpdateError::Misaligned { iova, user, len });
        }
        let (mut page, mut left) = (iova.0 >> PAGE_BITS, len >> PAGE_BITS);
        let mut leaf = Leaf { user: user.0, access: access.bits() };
        while left > 0 {
            let fits = |level: &u32| page.is_multiple_of(table::span(*level)) && table::span(*level) <= left;
            let level = (0..=LEAF_LEVEL_MAX).rev().find(fits).unwrap_or(0);
            self.set_leaf(page, level, leaf).ok_or(UpdateError::Full { iova })?;
            let pages = table::span(level);
            // This may be the last page of all, so the number may wrap.
            page = page.wrapping_add(pages);
            left -= pages;
            leaf = leaf.offset_by(pages);
        }
        Ok(())
    }

    /// Removes all translations of these addresses, and of further ones that share a leaf with them: see
    /// [`Iotlb::take_stale`].
    pub fn invalidate(&mut self, range: IovaRange) {
        self.mark_stale(range);
        let (first, last) = (range.first().0 >> PAGE_BITS, range.last().0 >> PAGE_BITS);
        self.clear_pages(ROOT, LEVELS - 1, 0, first, last);
    }

    /// Returns a range that contains all addresses whose translations have changed since the last call.
    /// Queues must drop the range before the session acknowledges anything.
    pub fn take_stale(&mut self) -> Option<IovaRange> {
        self.stale.take()
    }

    /// Removes the translations of one node: the next node in the order of addresses none of whose addresses
    /// is `pinned`. Returns false if there is no such node.
    ///
    /// The node is in limbo afterwards: see [`Iotlb::has_nodes_in_limbo`].
    pub fn evict(&mut self, pinned: impl Fn(IovaRange) -> bool) -> bool {
        let start = std::mem::take(&mut self.next_evicted);
        self.evict_after(ROOT, LEVELS - 1, 0, start, &pinned)
            || self.evict_after(ROOT, LEVELS - 1, 0, 0, &pinned)
    }

    /// Returns whether nodes wait for a quiescent point of every queue.
    pub fn has_nodes_in_limbo(&self) -> bool {
        !self.limbo.is_empty()
    }

    /// Frees the nodes in limbo. Every queue must have passed a quiescent point since the last change.
    pub fn quiesced(&mut self) {
        for node in self.limbo.drain(..) {
            (0..FANOUT).for_each(|index| self.table.store(node, index, Entry::Empty));
            self.used[node as usize] = 0;
            self.free.push(node);
        }
    }

    /// Puts a leaf over a page at a level. Returns `None` if there are no nodes.
    fn set_leaf(&mut self, page: u64, level: u32, leaf: Leaf) -> Option<()> {
        let mut node = ROOT;
        for above in (level + 1..LEVELS).rev() {
            let index = table::index(page, above);
            let old = self.table.load(node, index);
            node = match old {
                Entry::Node(child) => child,
                Entry::Leaf(old) => {
                    let here = old.offset_by(page & (table::span(above) - 1));
                    if here == leaf {
                        return Some(());
                    }
                    self.mark_entry_stale(page, above);
                    let Some(child) = self.link(node, index, true) else {
                        // The leaf is reported as stale, so the table must not keep it.
                        self.clear_entry(node, index);
                        return None;
                    };
                    child
                }
                Entry::Empty => self.link(node, index, false)?,
            };
        }
        let index = table::index(page, level);
        let old = self.table.load(node, index);
        self.table.store(node, index, Entry::Leaf(leaf));
        match old {
            Entry::Empty => self.used[node as usize] += 1,
            Entry::Leaf(old) if revokes(leaf, old) => self.mark_entry_stale(page, level),
            Entry::Leaf(_) => {}
            Entry::Node(child) => {
                // Its leaves may be the same as the new one. That is rare, and a queue that asks again does
                // no harm.
                self.mark_entry_stale(page, level);
                self.move_to_limbo(child, level - 1);
            }
        }
        Some(())
    }

    /// Adds a range to those that changed.
    fn mark_stale(&mut self, range: IovaRange) {
        self.stale = Some(self.stale.map_or(range, |stale| stale.hull(range)));
    }

    /// Adds the pages under the entry over `page` at `level` to those that changed.
    fn mark_entry_stale(&mut self, page: u64, level: u32) {
        let span = table::span(level);
        let first = page & !(span - 1);
        self.mark_stale(IovaRange::new(Iova(first << PAGE_BITS), span << PAGE_BITS));
    }

    /// Links a new node in an entry that is empty or has a leaf.
    fn link(&mut self, node: u32, index: usize, was_leaf: bool) -> Option<u32> {
        let child = match self.free.pop() {
            Some(child) => child,
            None if self.used.len() <= self.nodes_max as usize => {
                self.used.push(0);
                let child = (self.used.len() - 1) as u32;
                self.table.allocate(child);
                child
            }
            None => return None,
        };
        if !was_leaf {
            self.used[node as usize] += 1;
        }
        self.table.store(node, index, Entry::Node(child));
        Some(child)
    }

    /// Moves an unlinked node, and all nodes below it, to limbo.
    fn move_to_limbo(&mut self, node: u32, level: u32) {
        if level > 0 {
            for index in 0..FANOUT {
                if let Entry::Node(child) = self.table.load(node, index) {
                    self.move_to_limbo(child, level - 1);
                }
            }
        }
        self.limbo.push(node);
    }

    fn clear_entry(&mut self, node: u32, index: usize) {
        self.table.store(node, index, Entry::Empty);
        self.used[node as usize] -= 1;
    }

    /// Empties the entries from page `first` to `last` in a node whose first page is `base`.
    fn clear_pages(&mut self, node: u32, level: u32, base: u64, first: u64, last: u64) {
        let span = table::span(level);
        for index in 0..FANOUT {
            // At the topmost level, the entry may be beyond the last page.
            let Some(from) = (index as u64).checked_mul(span).and_then(|offset| base.checked_add(offset))
            else {
                return;
            };
            let to = from.saturating_add(span - 1);
            if to < first || from > last {
                continue;
            }
            match self.table.load(node, index) {
                Entry::Empty => {}
                Entry::Leaf(_) => {
                    self.clear_entry(node, index);
                    self.mark_entry_stale(from, level);
                }
                Entry::Node(child) if first <= from && to <= last => {
                    self.clear_entry(node, index);
                    self.move_to_limbo(child, level - 1);
                }
                Entry::Node(child) => {
                    self.clear_pages(child, level - 1, from, first, last);
                    if self.used[child as usize] == 0 {
                        self.clear_entry(node, index);
                        self.limbo.push(child);
                    }
                }
            }
        }
    }

    /// Unlinks the first node below this one that begins at page `start` or later and has no nodes below it.
    fn evict_after(
        &mut self,
        node: u32,
        level: u32,
        base: u64,
        start: u64,
        pinned: &impl Fn(IovaRange) -> bool,
    ) -> bool {
        let span = table::span(level);
        for index in 0..FANOUT {
            let Entry::Node(child) = self.table.load(node, index) else { continue };
            let from = base.saturating_add((index as u64).saturating_mul(span));
            if from.saturating_add(span - 1) < start {
                continue;
            }
            let has_nodes =
                level > 1 && (0..FANOUT).any(|i| matches!(self.table.load(child, i), Entry::Node(_)));
            let range = IovaRange::new(Iova(from << PAGE_BITS), span << PAGE_BITS);
            if has_nodes {
                if self.evict_after(child, level - 1, from, start, pinned) {
                    return true;
                }
            } else if from >= start && !pinned(range) {
                self.next_evicted = from + 1;
                self.clear_entry(node, index);
                self.limbo.push(child);
                self.mark_stale(range);
                return true;
            }
        }
        false
    }
}

/// Returns whether the leaf `new` withdraws something that `old` allowed.
fn revokes(new: Leaf, old: Leaf) -> bool {
    new.user != old.user || new.access & old.access != old.access
}
