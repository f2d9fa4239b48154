//! The table's one writer.

use super::table::{self, Entry, FANOUT, LEAF_LEVEL_MAX, LEVELS, Leaf, PAGE_BITS, ROOT, Table};
use super::{Access, IovaRange, UpdateError};
use crate::{Iova, UserAddr};
use std::sync::Arc;

/// Nodes of 4 KiB that a table has at most: what a front-end can make us allocate.
pub const TABLES_MAX: u32 = 8192;

/// Translations of a vIOMMU, as the session keeps them. Readers have its [`Table`].
#[derive(Debug)]
pub struct Iotlb {
    table: Arc<Table>,
    /// Entries in use, by node.
    live: Vec<u16>,
    nodes_max: u32,
    /// Nodes that nobody can be reading, all zero.
    free: Vec<u32>,
    /// Nodes that were unlinked, and that somebody may still be reading.
    limbo: Vec<u32>,
    /// What is evicted next lies behind this page.
    hand: u64,
    /// See [`Iotlb::take_stale`].
    stale: Option<IovaRange>,
}

impl Default for Iotlb {
    fn default() -> Self {
        Self::new(TABLES_MAX)
    }
}

impl Iotlb {
    /// An empty table, with room for so many nodes.
    pub fn new(nodes_max: u32) -> Self {
        let table = Arc::new(Table::new(nodes_max));
        Self { table, live: vec![0], nodes_max, free: Vec::new(), limbo: Vec::new(), hand: 0, stale: None }
    }

    /// What queues read.
    pub fn table(&self) -> &Arc<Table> {
        &self.table
    }

    /// Bytes of memory that it takes.
    pub fn bytes(&self) -> usize {
        self.table.fixed_bytes() + self.table.made() * FANOUT * size_of::<u64>()
    }

    /// Takes in a translation: the `len` bytes at `iova` are those that the front-end knows at `user`. It replaces what was said
    /// of these addresses before. Where that was something else, it counts as invalidated: see [`Iotlb::take_stale`].
    ///
    /// # Errors
    /// See [`UpdateError`]. After [`UpdateError::Full`] a part of it may have been taken in, which is as true as the whole.
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
            self.set(page, level, leaf).ok_or(UpdateError::Full { iova })?;
            let pages = table::span(level);
            // The last page may be the last there is.
            page = page.wrapping_add(pages);
            left -= pages;
            leaf = leaf.after(pages);
        }
        Ok(())
    }

    /// Forgets all translations of these addresses, and of more where a leaf goes beyond them: see [`Iotlb::take_stale`].
    pub fn invalidate(&mut self, range: IovaRange) {
        self.drop_range(range);
        let (first, last) = (range.first().0 >> PAGE_BITS, range.last().0 >> PAGE_BITS);
        self.clear(ROOT, LEVELS - 1, 0, first, last);
    }

    /// The addresses whose translations are not what they were when this was called last, and some between them. Queues
    /// are to drop them before anything is acknowledged.
    pub fn take_stale(&mut self) -> Option<IovaRange> {
        self.stale.take()
    }

    /// Forgets a node's worth of translations: the next one round the address space, none of whose addresses is `pinned`.
    /// `false`: there is none that could go. Its node is in limbo then: see [`Iotlb::is_in_limbo`].
    pub fn evict(&mut self, pinned: impl Fn(IovaRange) -> bool) -> bool {
        let hand = std::mem::take(&mut self.hand);
        self.evict_after(ROOT, LEVELS - 1, 0, hand, &pinned)
            || self.evict_after(ROOT, LEVELS - 1, 0, 0, &pinned)
    }

    /// Whether nodes wait for a quiescent point of every queue.
    pub fn is_in_limbo(&self) -> bool {
        !self.limbo.is_empty()
    }

    /// Every queue has passed a quiescent point since the last change: nodes in limbo can be used again.
    pub fn quiesced(&mut self) {
        for node in self.limbo.drain(..) {
            (0..FANOUT).for_each(|index| self.table.store(node, index, Entry::Empty));
            self.live[node as usize] = 0;
            self.free.push(node);
        }
    }

    /// Puts a leaf over a page at a level; `None`: there are no nodes.
    fn set(&mut self, page: u64, level: u32, leaf: Leaf) -> Option<()> {
        let mut node = ROOT;
        for above in (level + 1..LEVELS).rev() {
            let index = table::index(page, above);
            let old = self.table.load(node, index);
            node = match old {
                Entry::Node(child) => child,
                Entry::Leaf(old) => {
                    let here = old.after(page & (table::span(above) - 1));
                    if here == leaf {
                        return Some(());
                    }
                    self.drop_pages(page, above);
                    let Some(child) = self.link(node, index, true) else {
                        // It counts as taken back; nobody is to find it still.
                        self.empty(node, index);
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
            Entry::Empty => self.live[node as usize] += 1,
            Entry::Leaf(old) if revokes(leaf, old) => self.drop_pages(page, level),
            Entry::Leaf(_) => {}
            Entry::Node(child) => {
                // Its leaves may say the same; but that is rare, and to ask again does no harm.
                self.drop_pages(page, level);
                self.unlinked(child, level - 1);
            }
        }
        Some(())
    }

    /// These are not what they were.
    fn drop_range(&mut self, range: IovaRange) {
        self.stale = Some(self.stale.map_or(range, |stale| stale.hull(range)));
    }

    /// Nor are all pages under the entry at a level that is over this page.
    fn drop_pages(&mut self, page: u64, level: u32) {
        let span = table::span(level);
        let first = page & !(span - 1);
        self.drop_range(IovaRange::new(Iova(first << PAGE_BITS), span << PAGE_BITS));
    }

    /// Links a new node in an entry, which is empty or has a leaf.
    fn link(&mut self, node: u32, index: usize, was_leaf: bool) -> Option<u32> {
        let child = match self.free.pop() {
            Some(child) => child,
            None if self.live.len() <= self.nodes_max as usize => {
                self.live.push(0);
                let child = (self.live.len() - 1) as u32;
                self.table.make(child);
                child
            }
            None => return None,
        };
        if !was_leaf {
            self.live[node as usize] += 1;
        }
        self.table.store(node, index, Entry::Node(child));
        Some(child)
    }

    /// A node that was just unlinked goes to limbo, with all below it.
    fn unlinked(&mut self, node: u32, level: u32) {
        if level > 0 {
            for index in 0..FANOUT {
                if let Entry::Node(child) = self.table.load(node, index) {
                    self.unlinked(child, level - 1);
                }
            }
        }
        self.limbo.push(node);
    }

    fn empty(&mut self, node: u32, index: usize) {
        self.table.store(node, index, Entry::Empty);
        self.live[node as usize] -= 1;
    }

    /// Empties what lies from page `first` to `last` in a node whose first page is `base`.
    fn clear(&mut self, node: u32, level: u32, base: u64, first: u64, last: u64) {
        let span = table::span(level);
        for index in 0..FANOUT {
            // Past the last page there is, at the topmost level.
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
                    self.empty(node, index);
                    self.drop_pages(from, level);
                }
                Entry::Node(child) if first <= from && to <= last => {
                    self.empty(node, index);
                    self.unlinked(child, level - 1);
                }
                Entry::Node(child) => {
                    self.clear(child, level - 1, from, first, last);
                    if self.live[child as usize] == 0 {
                        self.empty(node, index);
                        self.limbo.push(child);
                    }
                }
            }
        }
    }

    /// Unlinks the first node below this one that begins at page `hand` or later and has no nodes below it.
    fn evict_after(
        &mut self,
        node: u32,
        level: u32,
        base: u64,
        hand: u64,
        pinned: &impl Fn(IovaRange) -> bool,
    ) -> bool {
        let span = table::span(level);
        for index in 0..FANOUT {
            let Entry::Node(child) = self.table.load(node, index) else { continue };
            let from = base.saturating_add((index as u64).saturating_mul(span));
            if from.saturating_add(span - 1) < hand {
                continue;
            }
            let has_nodes =
                level > 1 && (0..FANOUT).any(|i| matches!(self.table.load(child, i), Entry::Node(_)));
            let range = IovaRange::new(Iova(from << PAGE_BITS), span << PAGE_BITS);
            if has_nodes {
                if self.evict_after(child, level - 1, from, hand, pinned) {
                    return true;
                }
            } else if from >= hand && !pinned(range) {
                self.hand = from + 1;
                self.empty(node, index);
                self.limbo.push(child);
                self.drop_range(range);
                return true;
            }
        }
        false
    }
}

/// Whether a leaf that takes the place of another takes something back.
fn revokes(new: Leaf, old: Leaf) -> bool {
    new.user != old.user || new.access & old.access != old.access
}
