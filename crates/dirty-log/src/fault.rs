//! What a writer does when its cache does not have what it needs: a look into the tables, and before a page's first write since
//! a harvest, the steps that log it.
#![expect(unsafe_code, reason = "island: tables and logs are good for the length of a section")]

use crate::control::Mmu;
use crate::entry::Entry;
use crate::level::{END, size};
use crate::log::Log;
use crate::tlb::Extent;
use crate::tree::{Found, Tree, split};
use kickless_sync::atomic::Ordering;
use std::ptr::NonNull;

impl Mmu {
    /// The translation of `addr`, as wide as one can be had; one that may be written through is logged when this returns, or its
    /// bytes are to be marked after the write. `None`: not mapped, or not writable and that is what was asked for.
    ///
    /// # Safety
    /// The caller is in a section, and uses what it gets in that section only. `tree` is one of this.
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

    /// The first write to a page: makes its leaf writable, then sets its dirty bit; the store comes after that. `false`: the leaf has changed
    /// and is to be looked for again.
    fn make_writable(&self, found: &mut Found<'_>, addr: u64, log: &Log) -> bool {
        if found.level == 1 && found.entry.is_writable() {
            // Logged by who made it so.
            return true;
        }
        #[cfg(feature = "locked-log")]
        let _one = self.one.as_ref().map(kickless_sync::lock);
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
        // Always, and after the swap: a harvest that takes this bit sees the entry writable, and one that took it before leaves
        // this one for the next.
        log.bits.mark(writable.gpa().0 + addr % size(1));
        true
    }

    /// What the cache is to hold for a leaf.
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
            // Where an address is a guest-physical one, all of a slot is mapped, or nothing.
            let len = words.len.load(Ordering::Relaxed);
            return Some(Extent { start: slot_gpa, len, gpa: slot_gpa, host, writable: true, marks });
        }
        let gpa = entry.gpa().0;
        // SAFETY: all of a leaf is in its slot.
        let host = unsafe { host.add((gpa - slot_gpa) as usize) };
        let writable =
            entry.may_write() && (!self.leaf_is_guarded(entry) || level == 1 && entry.is_writable());
        let start = addr & !(size(level) - 1);
        Some(Extent { start, len: size(level), gpa, host, writable, marks })
    }

    fn leaf_is_guarded(&self, entry: Entry) -> bool {
        self.protects(entry.slot())
    }
}
