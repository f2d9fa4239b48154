//! Turning the log on, harvests, and turning it off.
#![expect(unsafe_code, reason = "island: walks the reverse map without a lock")]

use crate::bitmap::{Bits, WORD_BYTES, mask};
use crate::control::Mmu;
use crate::control::{Garbage, SlotState};
use crate::entry::Entry;
use crate::error::Error;
use crate::level::PAGE;
use crate::log::{Log, Method};
use crate::pages::Pages;
use crate::protect::protect_whole;
use crate::tree::unsplit;
use kickless_memory::Gpa;
use kickless_sync::atomic::{AtomicU64, Ordering};
use kickless_sync::lock;
use std::ops::{Bound, RangeBounds};
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The log of one slot: whoever has this harvests. Dropping it turns the log off.
pub struct Harvester {
    mmu: Arc<Mmu>,
    index: usize,
    state: Arc<SlotState>,
    /// Also what the slot's word points to.
    log: Arc<Log>,
}

/// How long the two halves of a harvest took.
#[derive(Clone, Copy, Debug, Default)]
pub struct Took {
    /// Taking the bits, and protecting the pages.
    pub walk: Duration,
    /// Until each writer had passed a quiescent point.
    pub wait: Duration,
}

impl Harvester {
    /// Turns on the log of the slot that begins at `gpa`. What is written after this has returned is logged. It waits for a quiescent
    /// point of every writer, as do all functions here: none of them may be called by a thread that has a
    /// [`Writer`](crate::Writer) which is online.
    ///
    /// # Errors
    /// No such slot, or its log is on already.
    pub fn enable(mmu: &Arc<Mmu>, gpa: Gpa, method: Method) -> Result<Self, Error> {
        let _turn = lock(&mmu.harvests);
        let control = lock(&mmu.control);
        let (index, state) = control.find(gpa)?;
        let word = &mmu.slots[index].log;
        if !word.load(Ordering::Relaxed).is_null() {
            return Err(Error::Logged { gpa });
        }
        let log = Arc::new(Log { method, bits: Bits::new(gpa, state.slot.len()) });
        word.store(Arc::as_ptr(&log).cast_mut(), Ordering::Release);
        if method == Method::Protect {
            // SAFETY: the lock for changes is held.
            unsafe { state.each_mapping(|at, level| protect_whole(at, level)) };
        }
        // From its next section on, each writer finds the log and nothing writable.
        mmu.epochs.wait();
        drop(control);
        Ok(Self { mmu: mmu.clone(), index, state, log })
    }

    /// What was written in `range` since the last harvest of it (or since the log was turned on), rounded outwards to whole pages. `pages`
    /// is filled anew. Writers go on meanwhile; it waits for a quiescent point of each before it returns. Harvests of one [`Mmu`]
    /// take turns.
    ///
    /// What is in `pages` has been written and can be read: what is written to it from now on is in the next harvest.
    pub fn harvest(&mut self, range: impl RangeBounds<Gpa>, pages: &mut Pages) -> Took {
        let (start, end) = self.clip(range);
        pages.begin(start);
        if start == end {
            return Took::default();
        }
        let _turn = lock(&self.mmu.harvests);
        let begun = Instant::now();
        self.take(start, end, pages);
        let taken = Instant::now();
        // Each writer empties its cache, and has done its stores to what was taken, before the bits are handed out.
        self.mmu.epochs.wait();
        Took { walk: taken - begun, wait: taken.elapsed() }
    }

    /// As [`Harvester::harvest`], but waits for a quiescent point of every writer before it begins as well: what was written before
    /// the call is in `pages`, or was in a harvest before. When writers have stopped, this is the last one that is needed.
    pub fn harvest_last(&mut self, range: impl RangeBounds<Gpa>, pages: &mut Pages) -> Took {
        let begun = Instant::now();
        // A writer that has made a page writable has set its bit then.
        self.mmu.wait_for_writers();
        let waited = begun.elapsed();
        let took = self.harvest(range, pages);
        Took { wait: waited + took.wait, ..took }
    }

    /// Takes the bits of pages, and protects each page whose bit it took.
    fn take(&self, start: u64, end: u64, pages: &mut Pages) {
        #[cfg(feature = "locked-log")]
        let _one = self.mmu.one.as_ref().map(lock);
        let bits = &self.log.bits;
        let words = bits.words(start, end);
        pages.begin(bits.address(words.start));
        for index in words {
            let at = bits.address(index);
            let taken = if bits.is_blank(index) { 0 } else { bits.take(index, mask(at, start, end)) };
            pages.push(taken);
            if taken != 0 && self.log.protects() {
                // SAFETY: the lock for harvests is held.
                unsafe { self.state.protect_pages(at, taken) };
            }
        }
    }

    /// The part of a range that is in the slot.
    fn clip(&self, range: impl RangeBounds<Gpa>) -> (u64, u64) {
        let (first, after) = (self.state.slot.gpa().0, self.state.slot.gpa().0 + self.state.slot.len());
        let start = match range.start_bound() {
            Bound::Included(gpa) => gpa.0,
            Bound::Excluded(gpa) => gpa.0.saturating_add(1),
            Bound::Unbounded => first,
        };
        let end = match range.end_bound() {
            Bound::Included(gpa) => gpa.0.saturating_add(1),
            Bound::Excluded(gpa) => gpa.0,
            Bound::Unbounded => after,
        };
        let start = (start & !(PAGE - 1)).clamp(first, after);
        let end = end.checked_next_multiple_of(PAGE).unwrap_or(after).clamp(first, after);
        (start, end.max(start))
    }

    /// The slot's first address.
    pub fn gpa(&self) -> Gpa {
        self.state.slot.gpa()
    }

    /// Bytes of guest memory that a word of [`Pages::words`] stands for.
    pub const WORD_BYTES: u64 = WORD_BYTES;

    /// Turns the log off. What was not harvested is forgotten. Leaves that were split are whole again, and their tables freed.
    pub fn disable(self) {}
}

impl Drop for Harvester {
    fn drop(&mut self) {
        let mmu = &self.mmu;
        let _turn = lock(&mmu.harvests);
        let mut control = lock(&mmu.control);
        // From here on nobody looks whether a leaf of this slot is writable.
        mmu.slots[self.index].log.store(null_mut(), Ordering::Release);
        let mut garbage = Garbage::default();
        if self.log.protects() {
            let restore = |at: &AtomicU64, _| {
                // SAFETY: the lock for changes is held, and what is in a list is a mapping.
                let leaf = unsafe { unsplit(Entry(at.load(Ordering::Acquire))) };
                let whole = Entry::leaf(leaf.gpa().0, leaf.slot(), leaf.may_write());
                // A writer may be splitting it.
                if let Some(node) = Entry(at.swap(whole.0, Ordering::AcqRel)).node() {
                    garbage.push(node);
                }
            };
            // SAFETY: the lock for changes is held.
            unsafe { self.state.each_mapping(restore) };
        }
        mmu.epochs.wait();
        // SAFETY: waited just now.
        unsafe { garbage.give_back(&mmu.nodes) };
        // SAFETY: as above, and what is there was put there before.
        unsafe { std::mem::take(&mut control.garbage).give_back(&mmu.nodes) };
        // SAFETY: harvests take turns, and this one is not walking.
        unsafe { mmu.nodes.trim() };
    }
}

impl std::fmt::Debug for Harvester {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Harvester").field("gpa", &self.gpa()).finish_non_exhaustive()
    }
}
