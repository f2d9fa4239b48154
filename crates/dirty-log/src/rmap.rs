//! The list of entries that map one piece of guest memory. It can be read while it changes.
//!
//! A thread that adds or removes holds a lock (it needs the [`Blocks`] mutably). A thread that walks holds
//! none. A list is empty, one address, or a chain of blocks of [`CELLS`] cells each. All blocks but the first
//! are full. The first is filled from cell 0 on. An addition goes into the first block, or into a new block
//! before it. A removal moves the last address of the first block into the hole. An empty first block is
//! unlinked, and may be reused at once in any list.
//!
//! # Why a walk misses nothing
//! *An address that is in the list before the walk, and stays in it, is visited.* A walk takes the blocks
//! from the first on. Within a block it takes the cells from the last down. So an address only moves forwards
//! as the walker sees it: from the first block to a later one, or to a lower cell of the same block. It is
//! stored in its new cell (release) before it is removed from the old one (release). A walker that finds the
//! old cell without it (acquire) finds it later in the new cell. It may visit an address twice. An address
//! never moves towards the head: a chain that has shrunk to one address stays a chain.
//!
//! *A walker in an unlinked block continues correctly.* The block was the first one and empty. All addresses
//! that it held are in later blocks, and its link still leads there. If the block is reused, its link was
//! changed. There are two cases:
//! * The block is in another list. That list ends with the mark of another head (the *nulls* mark, which
//!   replaces the last link). The walker then starts again.
//! * The block is the first block of the same list again. Then all earlier addresses follow it.
//!
//! Meanwhile the walker may visit addresses of other lists, so its visitor must be harmless to them.
//!
//! Blocks are freed only with the [`Blocks`].
#![expect(unsafe_code, reason = "island: blocks are reached by addresses in links")]

#[cfg(all(test, loom))]
mod model;

use crate::bounds::CELLS;
use kickless_sync::atomic::{AtomicU64, Ordering};
use std::ptr::NonNull;

/// The lowest bits of a head. The head of an empty list is 0.
const KIND: u64 = 3;
const SINGLE: u64 = 1;
const CHAIN: u64 = 2;
/// The lowest bit of a link at the end of a chain. The other bits are the address of the list.
const NULLS: u64 = 1;
/// Blocks that are allocated at once.
const BATCH: usize = if cfg!(loom) { 2 } else { 64 };

/// A part of a chain.
#[repr(C, align(64))]
struct Block {
    link: AtomicU64,
    cells: [AtomicU64; CELLS],
}

impl Block {
    fn new() -> Self {
        Self { link: AtomicU64::new(NULLS), cells: std::array::from_fn(|_| AtomicU64::new(0)) }
    }

    /// Returns the block at an address from a head or a link.
    ///
    /// # Safety
    /// The [`Blocks`] that it is from live as long as `'b`.
    unsafe fn at<'b>(address: u64) -> &'b Self {
        // SAFETY: heads and links hold addresses of blocks only, all of which live as long as `Blocks`.
        // Blocks change by atomics only.
        unsafe { &*std::ptr::with_exposed_provenance(address as usize) }
    }

    fn address(&self) -> u64 {
        std::ptr::from_ref(self).expose_provenance() as u64
    }

    /// Returns the number of used cells of a first block.
    fn used(&self) -> usize {
        self.cells.iter().take_while(|cell| cell.load(Ordering::Relaxed) != 0).count()
    }
}

/// The allocator of blocks.
#[derive(Default)]
pub(crate) struct Blocks {
    batches: Vec<NonNull<[Block]>>,
    free: Vec<u64>,
}

// SAFETY: it owns the blocks, which change by atomics only.
unsafe impl Send for Blocks {}

impl Blocks {
    fn take(&mut self) -> u64 {
        if self.free.is_empty() {
            let batch: Box<[Block]> = (0..BATCH).map(|_| Block::new()).collect();
            let batch = NonNull::from(Box::leak(batch));
            batch.as_ptr().expose_provenance();
            // SAFETY: allocated just now, and freed with `self` only.
            self.free.extend(unsafe { batch.as_ref() }.iter().map(Block::address));
            self.batches.push(batch);
        }
        self.free.pop().unwrap_or_default()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.batches.len() * BATCH * size_of::<Block>()
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        for batch in self.batches.drain(..) {
            // SAFETY: from `Box::leak`. A walk borrows the owner of this, so there is none.
            drop(unsafe { Box::from_raw(batch.as_ptr()) });
        }
    }
}

/// The list for one piece of memory.
///
/// It holds the addresses of table entries, which are multiples of 4 and not 0. Each is in the list at most
/// once.
pub(crate) struct List(AtomicU64);

impl List {
    pub(crate) fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    fn nulls(&self) -> u64 {
        std::ptr::from_ref(self).addr() as u64 | NULLS
    }

    /// Adds `entry`, which is not in the list.
    ///
    /// # Safety
    /// All calls for this list have the same `blocks`, and the list has not moved since the first call.
    pub(crate) unsafe fn add(&self, blocks: &mut Blocks, entry: u64) {
        let head = self.0.load(Ordering::Relaxed);
        let (first, link) = match head & KIND {
            SINGLE => (Some(head & !KIND), self.nulls()),
            CHAIN => {
                // SAFETY: by the caller, a block of `blocks`.
                let block = unsafe { Block::at(head & !KIND) };
                let used = block.used();
                if let Some(cell) = block.cells.get(used) {
                    cell.store(entry, Ordering::Release);
                    return;
                }
                (None, head & !KIND)
            }
            _ => {
                self.0.store(entry | SINGLE, Ordering::Release);
                return;
            }
        };
        let address = blocks.take();
        // SAFETY: a block of `blocks`.
        let block = unsafe { Block::at(address) };
        // A walker may still be in this block: see the module's documentation.
        block.link.store(link, Ordering::Release);
        for (cell, entry) in block.cells.iter().zip(first.into_iter().chain([entry])) {
            cell.store(entry, Ordering::Release);
        }
        self.0.store(address | CHAIN, Ordering::Release);
    }

    /// Removes `entry`. Returns whether it was in the list.
    ///
    /// # Safety
    /// As [`List::add`].
    pub(crate) unsafe fn remove(&self, blocks: &mut Blocks, entry: u64) -> bool {
        let head = self.0.load(Ordering::Relaxed);
        match head & KIND {
            SINGLE if head & !KIND == entry => self.0.store(0, Ordering::Release),
            CHAIN => {
                // SAFETY: by the caller, a block of `blocks`.
                let Some(hole) = (unsafe { self.cell_of(head & !KIND, entry) }) else { return false };
                // SAFETY: as above.
                let first = unsafe { Block::at(head & !KIND) };
                let last = first.used() - 1;
                let moved = &first.cells[last];
                // Stored in its new cell first, for a concurrent walker. Both cells are the same if there is
                // nothing to move.
                hole.store(moved.load(Ordering::Relaxed), Ordering::Release);
                moved.store(0, Ordering::Release);
                if last == 0 {
                    let link = first.link.load(Ordering::Relaxed);
                    self.0.store(if link & NULLS != 0 { 0 } else { link | CHAIN }, Ordering::Release);
                    blocks.free.push(head & !KIND);
                }
            }
            _ => return false,
        }
        true
    }

    /// Returns the cell of `entry` in the chain that begins with the block at `address`.
    ///
    /// # Safety
    /// As [`List::add`].
    unsafe fn cell_of<'b>(&self, mut address: u64, entry: u64) -> Option<&'b AtomicU64> {
        while address & NULLS == 0 {
            // SAFETY: by the caller, a block of the chain.
            let block: &Block = unsafe { Block::at(address) };
            if let Some(cell) = block.cells.iter().find(|cell| cell.load(Ordering::Relaxed) == entry) {
                return Some(cell);
            }
            address = block.link.load(Ordering::Relaxed);
        }
        None
    }

    /// Calls `visit` with each entry that is in the list during the whole call, some perhaps twice. It may
    /// also visit addresses that were added or removed meanwhile, or are in another list.
    ///
    /// # Safety
    /// The blocks given to [`List::add`] are alive.
    #[inline]
    pub(crate) unsafe fn walk(&self, mut visit: impl FnMut(u64)) {
        loop {
            let head = self.0.load(Ordering::Acquire);
            if head & KIND != CHAIN {
                if head & KIND == SINGLE {
                    visit(head & !KIND);
                }
                return;
            }
            // SAFETY: an address from a head; the caller keeps the blocks alive.
            if unsafe { self.walk_chain(head & !KIND, &mut visit) } {
                return;
            }
        }
    }

    /// Visits a chain. Returns whether the chain ended in this list.
    ///
    /// # Safety
    /// As [`List::walk`], and `address` is that of a block.
    unsafe fn walk_chain(&self, mut address: u64, visit: &mut impl FnMut(u64)) -> bool {
        while address & NULLS == 0 {
            // SAFETY: by the caller, a block.
            let block: &Block = unsafe { Block::at(address) };
            // Against the direction in which addresses move.
            for cell in block.cells.iter().rev() {
                let entry = cell.load(Ordering::Acquire);
                if entry != 0 {
                    visit(entry);
                }
            }
            address = block.link.load(Ordering::Acquire);
        }
        address == self.nulls()
    }
}

#[cfg(all(test, not(loom)))]
#[expect(
    clippy::undocumented_unsafe_blocks,
    reason = "tests: one set of blocks, heads that stay where they are"
)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn walked(head: &List) -> Vec<u64> {
        let mut all = Vec::new();
        unsafe { head.walk(|entry| all.push(entry)) };
        all.sort_unstable();
        all
    }

    #[test]
    fn it_holds_what_a_set_would() {
        let mut blocks = Blocks::default();
        let heads: Vec<List> = (0..3).map(|_| List::new()).collect();
        let mut sets = vec![BTreeSet::new(); 3];
        let mut random = 1_u64;
        for _ in 0..if cfg!(miri) { 500 } else { 20_000 } {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let (at, entry) = ((random >> 33) as usize % 3, ((random >> 40) % 40 + 1) * 4);
            if sets[at].insert(entry) {
                unsafe { heads[at].add(&mut blocks, entry) };
            } else {
                sets[at].remove(&entry);
                assert!(unsafe { heads[at].remove(&mut blocks, entry) });
                assert!(!unsafe { heads[at].remove(&mut blocks, entry) });
            }
            assert_eq!(walked(&heads[at]), Vec::from_iter(sets[at].iter().copied()));
        }
        // Blocks are reused, and not allocated each time.
        assert_eq!(blocks.batches.len(), 1);
    }
}
