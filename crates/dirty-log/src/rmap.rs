//! The list of entries that map one piece of guest memory, readable while it changes.
//!
//! Whoever adds and removes holds a lock (they need the [`Blocks`] mutably); who walks holds none. A list is empty, one
//! address, or a chain of blocks of [`PLACES`] each. All blocks but the first are full; the first is filled from place 0 on.
//! An addition goes into the first block, or into a new one before it. A removal fills the hole from the last place that is
//! taken in the first block, and an empty first block is unlinked and may be in use again at once, in any list.
//!
//! # Why a walk misses nothing
//! *What was in the list before the walk and stays in it is visited.* A walk takes the blocks from the first on, and in a block
//! the places from the last down. So the only way an address moves, from the first block to a later one, or to a lower place in
//! the same block, is forwards as the walker sees it: it is stored at its new place (release) before it is removed from the
//! old (release), and who finds the old one without it (acquire) finds the new one when he gets there. It can be visited
//! twice. An address never moves towards the head: a chain that has shrunk to one address stays a chain.
//!
//! *A walker in a block that was unlinked goes on.* The block was first and empty: all that it held is in later blocks, and
//! its link still leads there. If it is in use again, its link was changed: into a list that ends with the mark of another head
//! (the *nulls* mark, which takes the place of the last link), and then the walker starts again; or into this very list, whose first
//! block it then is, so that all that was there before follows it. What is visited meanwhile belongs to others, and a visitor
//! must do no harm to that.
//!
//! Blocks are freed only with the [`Blocks`].
#![expect(unsafe_code, reason = "island: blocks are reached by addresses in links")]

#[cfg(all(test, loom))]
mod model;

use crate::bounds::PLACES;
use kickless_sync::atomic::{AtomicU64, Ordering};
use std::ptr::NonNull;

/// Lowest bits of a head: 0 and nothing else for an empty list.
const KIND: u64 = 3;
const SINGLE: u64 = 1;
const CHAIN: u64 = 2;
/// Lowest bit of a link that is the end: the rest is the address of the head.
const NULLS: u64 = 1;
/// Blocks that are made at once.
const BATCH: usize = if cfg!(loom) { 2 } else { 64 };

/// A part of a chain.
#[repr(C, align(64))]
struct Block {
    link: AtomicU64,
    places: [AtomicU64; PLACES],
}

impl Block {
    fn new() -> Self {
        Self { link: AtomicU64::new(NULLS), places: std::array::from_fn(|_| AtomicU64::new(0)) }
    }

    /// The block at an address from a head or a link.
    ///
    /// # Safety
    /// The [`Blocks`] that it is from live as long as `'b`.
    unsafe fn at<'b>(address: u64) -> &'b Self {
        // SAFETY: heads and links hold addresses of blocks only, all of which live as long as `Blocks`; nothing in them changes
        // but atomically.
        unsafe { &*std::ptr::with_exposed_provenance(address as usize) }
    }

    fn address(&self) -> u64 {
        std::ptr::from_ref(self).expose_provenance() as u64
    }

    /// How many places are taken, of a first block.
    fn taken(&self) -> usize {
        self.places.iter().take_while(|place| place.load(Ordering::Relaxed) != 0).count()
    }
}

/// Where blocks come from.
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
            // SAFETY: just made, and freed with `self` only.
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
            // SAFETY: from `Box::leak`; who walks borrows what owns this.
            drop(unsafe { Box::from_raw(batch.as_ptr()) });
        }
    }
}

/// The list for one piece of memory. What is in it are addresses that are multiples of 4 and not 0, each at most once.
pub(crate) struct Head(AtomicU64);

impl Head {
    pub(crate) fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    fn nulls(&self) -> u64 {
        std::ptr::from_ref(self).addr() as u64 | NULLS
    }

    /// Adds `what`, which is not in it.
    ///
    /// # Safety
    /// `blocks` are those of all calls for this head, and it has not moved since the first.
    pub(crate) unsafe fn add(&self, blocks: &mut Blocks, what: u64) {
        let head = self.0.load(Ordering::Relaxed);
        let (first, link) = match head & KIND {
            SINGLE => (Some(head & !KIND), self.nulls()),
            CHAIN => {
                // SAFETY: by the caller, a block of `blocks`.
                let block = unsafe { Block::at(head & !KIND) };
                let taken = block.taken();
                if let Some(place) = block.places.get(taken) {
                    place.store(what, Ordering::Release);
                    return;
                }
                (None, head & !KIND)
            }
            _ => {
                self.0.store(what | SINGLE, Ordering::Release);
                return;
            }
        };
        let address = blocks.take();
        // SAFETY: a block of `blocks`.
        let block = unsafe { Block::at(address) };
        // A walker may still be here: what it makes of it is said above.
        block.link.store(link, Ordering::Release);
        for (place, what) in block.places.iter().zip(first.into_iter().chain([what])) {
            place.store(what, Ordering::Release);
        }
        self.0.store(address | CHAIN, Ordering::Release);
    }

    /// Removes `what`; whether it was there.
    ///
    /// # Safety
    /// As [`Head::add`].
    pub(crate) unsafe fn remove(&self, blocks: &mut Blocks, what: u64) -> bool {
        let head = self.0.load(Ordering::Relaxed);
        match head & KIND {
            SINGLE if head & !KIND == what => self.0.store(0, Ordering::Release),
            CHAIN => {
                // SAFETY: by the caller, a block of `blocks`.
                let Some(hole) = (unsafe { self.place_of(head & !KIND, what) }) else { return false };
                // SAFETY: as above.
                let first = unsafe { Block::at(head & !KIND) };
                let last = first.taken() - 1;
                let moved = &first.places[last];
                // To its new place first, for whom comes by meanwhile; the same place if there is nothing to move.
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

    /// Where `what` is in the chain that begins with the block at `address`.
    ///
    /// # Safety
    /// As [`Head::add`].
    unsafe fn place_of<'b>(&self, mut address: u64, what: u64) -> Option<&'b AtomicU64> {
        while address & NULLS == 0 {
            // SAFETY: by the caller, a block of the chain.
            let block: &Block = unsafe { Block::at(address) };
            if let Some(place) = block.places.iter().find(|place| place.load(Ordering::Relaxed) == what) {
                return Some(place);
            }
            address = block.link.load(Ordering::Relaxed);
        }
        None
    }

    /// Calls `visit` with all that was in it before the call and still is, some perhaps twice; perhaps also with what came or went
    /// meanwhile, or is in another list.
    ///
    /// # Safety
    /// The blocks given to [`Head::add`] are alive.
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

    /// Whether the chain was this head's to the end.
    ///
    /// # Safety
    /// As [`Head::walk`], and `address` is that of a block.
    unsafe fn walk_chain(&self, mut address: u64, visit: &mut impl FnMut(u64)) -> bool {
        while address & NULLS == 0 {
            // SAFETY: by the caller, a block.
            let block: &Block = unsafe { Block::at(address) };
            // Against the direction in which addresses move.
            for place in block.places.iter().rev() {
                let what = place.load(Ordering::Acquire);
                if what != 0 {
                    visit(what);
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

    fn walked(head: &Head) -> Vec<u64> {
        let mut all = Vec::new();
        unsafe { head.walk(|what| all.push(what)) };
        all.sort_unstable();
        all
    }

    #[test]
    fn it_holds_what_a_set_would() {
        let mut blocks = Blocks::default();
        let heads: Vec<Head> = (0..3).map(|_| Head::new()).collect();
        let mut sets = vec![BTreeSet::new(); 3];
        let mut random = 1_u64;
        for _ in 0..if cfg!(miri) { 500 } else { 20_000 } {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let (at, what) = ((random >> 33) as usize % 3, ((random >> 40) % 40 + 1) * 4);
            if sets[at].insert(what) {
                unsafe { heads[at].add(&mut blocks, what) };
            } else {
                sets[at].remove(&what);
                assert!(unsafe { heads[at].remove(&mut blocks, what) });
                assert!(!unsafe { heads[at].remove(&mut blocks, what) });
            }
            assert_eq!(walked(&heads[at]), Vec::from_iter(sets[at].iter().copied()));
        }
        // Reused, and not made anew each time.
        assert_eq!(blocks.batches.len(), 1);
    }
}
