//! Spaces besides the direct one, for devices behind a vIOMMU.
#![expect(unsafe_code, reason = "island: entries are reached by addresses in tables")]

use crate::control::{Control, Garbage, Mmu, check_range, detach, target};
use crate::entry::Entry;
use crate::error::Error;
use crate::level::{ROOT, shift, size};
use crate::node::Node;
use crate::tree::{Found, Tree, split};
use kickless_memory::{Gpa, Iova, Unmapped};
use kickless_sync::atomic::{AtomicU64, Ordering};
use kickless_sync::lock;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

/// An address space of its own over the slots of an [`Mmu`]. Several mappings may map the same memory. A
/// write through any of them is logged.
pub struct Space {
    pub(crate) mmu: Arc<Mmu>,
    pub(crate) tree: Tree,
}

impl Space {
    /// Makes an empty space.
    pub fn new(mmu: &Arc<Mmu>) -> Self {
        Self { mmu: mmu.clone(), tree: Tree::new(&mmu.nodes) }
    }

    /// Maps `len` bytes of guest memory from `gpa` at `iova`, with leaves as large as the alignment allows.
    ///
    /// # Errors
    /// The range is not whole pages of 4 KiB, or too high; a part of it is mapped already; or `gpa` is not
    /// all guest memory.
    pub fn map(&self, iova: Iova, gpa: Gpa, len: u64, may_write: bool) -> Result<(), Error> {
        check_range(iova.0, len)?;
        check_range(gpa.0, len)?;
        let mut control = lock(&self.mmu.control);
        let mut done = 0;
        while done < len {
            let here = Gpa(gpa.0 + done);
            let (_, state) = control.holding(here).ok_or(Unmapped { addr: gpa.0, len })?;
            done = state.slot.gpa().0 + state.slot.len() - gpa.0;
        }
        let mut at = iova.0;
        while at < iova.0 + len {
            // SAFETY: the lock is held.
            let found = unsafe { self.tree.find(at) };
            if !found.entry.is_none() {
                return Err(Error::Mapped { iova, len });
            }
            at = (at & !(size(found.level) - 1)) + size(found.level);
        }
        self.mmu.map_pieces(&mut control, &self.tree, iova.0, gpa, len, may_write);
        Ok(())
    }

    /// Unmaps all mappings in `len` bytes at `iova`. Waits for a quiescent point of every writer. After that
    /// no writer uses the old translations.
    ///
    /// # Errors
    /// The range is not whole pages of 4 KiB, or too high.
    pub fn unmap(&self, iova: Iova, len: u64) -> Result<(), Error> {
        check_range(iova.0, len)?;
        let mut control = lock(&self.mmu.control);
        self.clear_all(&mut control, iova.0..iova.0 + len);
        Ok(())
    }

    fn clear_all(&self, control: &mut Control, range: Range<u64>) {
        let mut garbage = Garbage::default();
        self.clear(control, (self.tree.root(), ROOT), 0, &range, &mut garbage);
        self.mmu.epochs.wait();
        // SAFETY: all writers were waited for just now.
        unsafe { garbage.give_back(&self.mmu.nodes) };
        // SAFETY: as above; its tables were put there before the wait.
        unsafe { std::mem::take(&mut control.garbage).give_back(&self.mmu.nodes) };
    }

    /// Clears `range` in a table whose entries are of `level`, and whose first address is `base`.
    fn clear(
        &self,
        control: &mut Control,
        (node, level): (NonNull<Node>, u32),
        base: u64,
        range: &Range<u64>,
        garbage: &mut Garbage,
    ) {
        // SAFETY: the lock is held, and tables are removed only under it.
        let entries = unsafe { &node.as_ref().entries };
        for (index, at) in entries.iter().enumerate() {
            let start = base + ((index as u64) << shift(level));
            let end = start + size(level);
            let entry = Entry(at.load(Ordering::Acquire));
            if end <= range.start || start >= range.end || entry.is_none() {
                continue;
            }
            let whole = range.start <= start && end <= range.end;
            if entry.is_mapping() && whole {
                // SAFETY: the lock is held.
                let (gpa, slot) = unsafe { target(entry) };
                let state = control.slots[slot].clone();
                if let Some(list) = state.as_ref().and_then(|state| state.rmap.find(gpa, level)) {
                    detach(at, list, &mut control.blocks, garbage);
                }
                continue;
            }
            if entry.is_mapping() {
                self.break_up(control, at, level);
            }
            let Some(below) = Entry(at.load(Ordering::Acquire)).node() else { continue };
            self.clear(control, (below, level - 1), start, range, garbage);
            // SAFETY: the lock is held, and entries of an empty table are filled only under it.
            if unsafe { below.as_ref() }.is_empty() {
                at.store(Entry::NONE.0, Ordering::Release);
                garbage.push(below);
            }
        }
    }

    /// Replaces a mapping of `level` by its pieces. Each piece is in the list of its own memory.
    fn break_up(&self, control: &mut Control, at: &AtomicU64, level: u32) {
        let node = loop {
            let entry = Entry(at.load(Ordering::Acquire));
            match entry.node() {
                Some(node) => break node,
                // A writer may have split it first, or made it writable.
                None => _ = split(&self.mmu.nodes, Found { at, level, entry }),
            }
        };
        // SAFETY: the lock is held.
        let (gpa, slot) = unsafe { target(Entry(at.load(Ordering::Acquire))) };
        let Some(state) = control.slots[slot].clone() else { return };
        // SAFETY: as above.
        for (index, piece) in unsafe { &node.as_ref().entries }.iter().enumerate() {
            let gpa = Gpa(gpa.0 + ((index as u64) << shift(level - 1)));
            if let Some(list) = state.rmap.make(gpa, level - 1) {
                let address = std::ptr::from_ref(piece).expose_provenance() as u64;
                // SAFETY: all blocks are from `control`, and lists do not move.
                unsafe { list.add(&mut control.blocks, address) };
            }
        }
        at.store(Entry::table(node, false).0, Ordering::Release);
        // All pieces must be in their lists first, because a walker goes from the largest level down.
        if let Some(list) = state.rmap.find(gpa, level) {
            // SAFETY: as above.
            unsafe { list.remove(&mut control.blocks, std::ptr::from_ref(at).addr() as u64) };
        }
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        let mmu = self.mmu.clone();
        let mut control = lock(&mmu.control);
        self.clear_all(&mut control, 0..crate::level::END);
        // SAFETY: nothing is mapped, and writers hold a reference.
        unsafe { self.tree.give_back(&mmu.nodes) };
    }
}

impl std::fmt::Debug for Space {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Space").finish_non_exhaustive()
    }
}
