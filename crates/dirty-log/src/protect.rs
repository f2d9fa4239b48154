//! Write-protection through the reverse map, without a lock.
#![expect(unsafe_code, reason = "island: entries are reached by addresses in lists")]

use crate::control::MappedSlot;
use crate::entry::Entry;
use crate::level::{FANOUT, LEAF_MAX, PAGE_BITS, index, size};
use crate::rmap::List;
use crate::tree::protect;
use kickless_memory::Gpa;
use kickless_sync::atomic::{AtomicU64, Ordering};

/// Pages that are protected together, because they have the same tables above them.
const RUN: u32 = if FANOUT < 64 { FANOUT as u32 } else { 64 };

/// Calls `visit` with the entries in a list.
///
/// # Safety
/// The tables and blocks of this list's [`crate::Mmu`] are not freed meanwhile: the caller has the lock for
/// harvests or the lock for changes.
unsafe fn entries(list: &List, mut visit: impl FnMut(&AtomicU64)) {
    // SAFETY: by the caller, the blocks are alive. Each list has addresses of entries in tables. The tables
    // are alive too, although they may have been reused.
    unsafe { list.walk(|at| visit(&*std::ptr::with_exposed_provenance(at as usize))) };
}

/// Protects the pages in `pages`, from `gpa` on, that a mapping of `level` maps.
///
/// # Safety
/// As [`entries`]. The pages are in one table.
unsafe fn protect_below(mut at: &AtomicU64, mut level: u32, gpa: u64, pages: u64) {
    loop {
        let entry = Entry(at.load(Ordering::Acquire));
        let Some(node) = entry.node().filter(|_| level > 1) else {
            // An entry that is reused for something else is skipped, although protecting it would be
            // harmless.
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

/// Protects all pages that a mapping of `level` maps.
///
/// # Safety
/// The caller has the lock for changes.
pub(crate) unsafe fn protect_whole(at: &AtomicU64, level: u32) {
    protect(at);
    let Some(node) = Entry(at.load(Ordering::Acquire)).node().filter(|_| level > 1) else { return };
    // SAFETY: tables are removed only under the lock, which is held.
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

impl MappedSlot {
    /// Protects the pages in `pages`, among the 64 pages from `gpa` on, in all spaces.
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
            // From the largest level down. A mapping that is broken up leaves its list only after its pieces
            // are in their lists.
            for level in (2..=LEAF_MAX).rev() {
                if let Some(list) = self.rmap.find(Gpa(gpa), level) {
                    // SAFETY: by the caller.
                    unsafe { entries(list, |at| protect_below(at, level, gpa, pages)) };
                }
            }
            if self.rmap.find(Gpa(gpa), 1).is_some() {
                each_bit(pages, |bit| {
                    if let Some(list) = self.rmap.find(Gpa(gpa + (u64::from(bit) << PAGE_BITS)), 1) {
                        // SAFETY: by the caller.
                        unsafe { entries(list, protect) };
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
        self.rmap.each(|level, list| unsafe { entries(list, |at| visit(at, level)) });
    }
}
