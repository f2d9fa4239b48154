//! A writer's lookup in the tables after a miss in its cache. Before the first write to a page since a
//! harvest, it also takes the steps that log the write.
#![expect(unsafe_code, reason = "island: tables and logs are valid within a section")]

use crate::control::Mmu;
use crate::entry::Entry;
use crate::level::{END, size};
use crate::log::Log;
use crate::tlb::Extent;
use crate::tree::{Found, Tree, split};
use kickless_sync::atomic::Ordering;
use std::ptr::NonNull;

impl Mmu {
    /// Translates `addr`, as a range that is as large as possible.
    ///
    /// A writable translation is logged when this returns, or its bytes must be marked after the write.
    /// Returns `None` if `addr` is not mapped, or if `write` is true and it is not writable.
    ///
    /// # Safety
    /// The caller is in a section, and uses the result in that section only. `tree` belongs to this `Mmu`.
    #[cold]
    pub(crate) unsafe fn resolve(&self, tree: &Tree, addr: u64, write: bool) -> Option<Extent> {
        let direct = std::ptr::eq(tree, &raw const self.direct);
        loop {
            if addr >= END {
                return None;
            }
            // SAFETY: the caller is in a section.
            let mut found = unsafe { tree.find(addr) };
            if !found.entry.is_leaf() || write && !found.entry.may_write() {
                return None;
            }
            // SAFETY: the log is freed after a wait for the caller's section.
            let log = unsafe { self.slots[found.entry.slot()].log.load(Ordering::Acquire).as_ref() };
            let Some(log) = log.filter(|log| log.protects()) else {
                return self.extent(found, addr, direct, log.map(NonNull::from));
            };
            if write && !self.make_writable(&mut found, addr, log) {
                continue;
            }
            return self.extent(found, addr, false, None);
        }
    }

    /// Makes a page's leaf writable, then sets its dirty bit. The store comes after that. Returns false if
    /// the leaf has changed and must be looked up again.
    fn make_writable(&self, found: &mut Found<'_>, addr: u64, log: &Log) -> bool {
        if found.level == 1 && found.entry.is_writable() {
            // Logged by the thread that made it writable.
            return true;
        }
        if found.level > 1 {
            split(&self.nodes, *found);
            return false;
        }
        let writable = found.entry.with_writable(true);
        let (from, to) = (found.entry.0, writable.0);
        if found.at.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return false;
        }
        found.entry = writable;
        // Always set, and after the swap: a harvest that takes this bit sees the writable entry, and a
        // harvest that took an earlier one leaves this bit for the next harvest.
        log.bits.mark(writable.gpa().0 + addr % size(1));
        true
    }

    /// Returns the cache entry for a leaf.
    fn extent(
        &self,
        found: Found<'_>,
        addr: u64,
        whole_slot: bool,
        marks: Option<NonNull<Log>>,
    ) -> Option<Extent> {
        let Found { level, entry, .. } = found;
        let words = &self.slots[entry.slot()];
        let slot_gpa = words.gpa.load(Ordering::Relaxed);
        let host = NonNull::new(words.host.load(Ordering::Relaxed))?;
        if whole_slot {
            // In the direct space, a slot is mapped as a whole or not at all.
            let len = words.len.load(Ordering::Relaxed);
            return Some(Extent { start: slot_gpa, len, gpa: slot_gpa, host, writable: true, marks });
        }
        let gpa = entry.gpa().0;
        // SAFETY: a leaf is completely in its slot.
        let host = unsafe { host.add((gpa - slot_gpa) as usize) };
        let writable = entry.may_write() && (!self.is_protected(entry) || level == 1 && entry.is_writable());
        let start = addr & !(size(level) - 1);
        Some(Extent { start, len: size(level), gpa, host, writable, marks })
    }

    fn is_protected(&self, entry: Entry) -> bool {
        self.protects(entry.slot())
    }
}
