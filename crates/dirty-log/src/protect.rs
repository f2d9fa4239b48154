//! Write-protection through the reverse map, without a lock.
#![expect(unsafe_code, reason = "island: entries are reached by addresses in lists")]

use crate::control::SlotState;
use crate::entry::Entry;
use crate::level::{FANOUT, LEAF_MAX, PAGE_BITS, index, size};
use crate::rmap::Head;
use crate::tree::protect;
use kickless_memory::Gpa;
use kickless_sync::atomic::{AtomicU64, Ordering};

/// Pages that are done together: they have the same tables above them.
const RUN: u32 = if FANOUT < 64 { FANOUT as u32 } else { 64 };

/// Calls `visit` with the entries in a list.
///
/// # Safety
/// The tables and blocks of this list's [`crate::Mmu`] are not freed meanwhile: the caller has the lock for harvests, or that for changes.
unsafe fn entries(head: &Head, mut visit: impl FnMut(&AtomicU64)) {
    // SAFETY: by the caller, the blocks are alive. What is in lists, also in others than this, are addresses of entries in
    // tables, which are alive as well, if perhaps in use elsewhere.
    unsafe { head.walk(|at| visit(&*std::ptr::with_exposed_provenance(at as usize))) };
}

/// Protects those pages of `pages`, from `gpa` on, that a mapping of `level` shows.
///
/// # Safety
/// As [`entries`]. The pages are in one table.
unsafe fn protect_below(mut at: &AtomicU64, mut level: u32, gpa: u64, pages: u64) {
    loop {
        let entry = Entry(at.load(Ordering::Acquire));
        let Some(node) = entry.node().filter(|_| level > 1) else {
            // What is somebody else's by now is better left alone, though it would do no harm.
            if entry.is_leaf() && entry.gpa().0 == gpa & !(size(level) - 1) {
                protect(at);
            }
            return;
        };
        level -= 1;
        // SAFETY: by the caller, tables are not freed.
        let table = unsafe { &node.as_ref().entries };
        if level == 1 {
            let first = index(gpa, 1);
            each_bit(pages, |bit| protect(&table[(first + bit as usize) % FANOUT]));
            return;
        }
        at = &table[index(gpa, level)];
    }
}

/// Protects all that a mapping of `level` shows.
///
/// # Safety
/// The caller has the lock for changes.
pub(crate) unsafe fn protect_whole(at: &AtomicU64, level: u32) {
    protect(at);
    let Some(node) = Entry(at.load(Ordering::Acquire)).node().filter(|_| level > 1) else { return };
    // SAFETY: only who has the lock takes tables away.
    for below in unsafe { &node.as_ref().entries } {
        // SAFETY: by the caller.
        unsafe { protect_whole(below, level - 1) };
    }
}

fn each_bit(mut bits: u64, mut visit: impl FnMut(u32)) {
    while bits != 0 {
        visit(bits.trailing_zeros());
        bits &= bits - 1;
    }
}

impl SlotState {
    /// Protects those of the 64 pages from `gpa` on that are in `pages`, in all spaces.
    ///
    /// # Safety
    /// The caller has the lock for harvests.
    pub(crate) unsafe fn protect_pages(&self, gpa: u64, pages: u64) {
        for run in (0..u64::BITS).step_by(RUN as usize) {
            let pages = pages >> run & (u64::MAX >> (u64::BITS - RUN));
            if pages == 0 {
                continue;
            }
            let gpa = gpa + (u64::from(run) << PAGE_BITS);
            // From the largest down: a mapping that is broken up meanwhile leaves its list when its pieces are in theirs.
            for level in (2..=LEAF_MAX).rev() {
                if let Some(head) = self.granules.find(Gpa(gpa), level) {
                    // SAFETY: by the caller.
                    unsafe { entries(head, |at| protect_below(at, level, gpa, pages)) };
                }
            }
            if self.granules.find(Gpa(gpa), 1).is_some() {
                each_bit(pages, |bit| {
                    if let Some(head) = self.granules.find(Gpa(gpa + (u64::from(bit) << PAGE_BITS)), 1) {
                        // SAFETY: by the caller.
                        unsafe { entries(head, protect) };
                    }
                });
            }
        }
    }

    /// Calls `visit` with each mapping of the slot, and its level.
    ///
    /// # Safety
    /// The caller has the lock for changes.
    pub(crate) unsafe fn each_mapping(&self, mut visit: impl FnMut(&AtomicU64, u32)) {
        // SAFETY: by the caller.
        self.granules.each(|level, head| unsafe { entries(head, |at| visit(at, level)) });
    }
}
