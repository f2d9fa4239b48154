//! Turns the log on and off, and harvests.
#![expect(unsafe_code, reason = "island: walks the reverse map without a lock")]

use crate::bitmap::{DirtyBits, WORD_BYTES, mask};
use crate::control::Mmu;
use crate::control::{Garbage, MappedSlot};
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

/// The log of one slot, for its harvester. Dropping it turns the log off.
pub struct Harvester {
    mmu: Arc<Mmu>,
    index: usize,
    state: Arc<MappedSlot>,
    /// The log that the slot's word points to.
    log: Arc<Log>,
}

/// Durations of the two parts of a harvest.
#[derive(Clone, Copy, Debug, Default)]
pub struct HarvestTime {
    /// Taking the bits and protecting the pages.
    pub walk: Duration,
    /// Waiting until each writer had passed a quiescent point.
    pub wait: Duration,
}

impl Harvester {
    /// Turns on the log of the slot that begins at `gpa`. Writes after this has returned are logged.
    ///
    /// Each function of a harvester waits for a quiescent point of every writer. So a thread that has an
    /// online [`Writer`](crate::Writer) must not call them.
    ///
    /// # Errors
    /// There is no such slot, or its log is on already.
    pub fn enable(mmu: &Arc<Mmu>, gpa: Gpa, method: Method) -> Result<Self, Error> {
        let _turn = lock(&mmu.harvests);
        let control = lock(&mmu.control);
        let (index, state) = control.find(gpa)?;
        let word = &mmu.slots[index].log;
        if !word.load(Ordering::Relaxed).is_null() {
            return Err(Error::Logged { gpa });
        }
        let log = Arc::new(Log { method, bits: DirtyBits::new(gpa, state.slot.len()) });
        word.store(Arc::as_ptr(&log).cast_mut(), Ordering::Release);
        if method == Method::Protect {
            // SAFETY: the lock for changes is held.
            unsafe { state.each_mapping(|at, level| protect_whole(at, level)) };
        }
        // From its next section on, each writer finds the log, and no writable entry.
        mmu.epochs.wait();
        drop(control);
        Ok(Self { mmu: mmu.clone(), index, state, log })
    }

    /// Fills `pages` with the pages in `range` that were written since the last harvest of it, or since the
    /// log was turned on. The range is rounded outwards to whole pages.
    ///
    /// Writers go on meanwhile. It waits for a quiescent point of each before it returns. Harvests of one
    /// [`Mmu`] take turns.
    ///
    /// The bytes of the reported pages have been written and can be read. Later writes to them are in the
    /// next harvest.
    pub fn harvest(&mut self, range: impl RangeBounds<Gpa>, pages: &mut Pages) -> HarvestTime {
        let (start, end) = self.clip(range);
        pages.begin(start);
        if start == end {
            return HarvestTime::default();
        }
        let _turn = lock(&self.mmu.harvests);
        let begun = Instant::now();
        self.take(start, end, pages);
        let taken = Instant::now();
        // Each writer must empty its cache and complete its stores to these pages before the bits are handed
        // out.
        self.mmu.epochs.wait();
        HarvestTime { walk: taken - begun, wait: taken.elapsed() }
    }

    /// Does the same as [`Harvester::harvest`], but first waits for a quiescent point of every writer.
    ///
    /// A write before the call is in `pages` or was in an earlier harvest. After the writers have stopped,
    /// this is the last harvest that is needed.
    pub fn harvest_last(&mut self, range: impl RangeBounds<Gpa>, pages: &mut Pages) -> HarvestTime {
        let begun = Instant::now();
        // After this, a writer that made a page writable before has set its bit.
        self.mmu.wait_for_writers();
        let waited = begun.elapsed();
        let time = self.harvest(range, pages);
        HarvestTime { wait: waited + time.wait, ..time }
    }

    /// Takes the bits of pages, and protects each page whose bit it took.
    fn take(&self, start: u64, end: u64, pages: &mut Pages) {
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

    /// Returns the part of a range that is in the slot.
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

    /// Returns the slot's first address.
    pub fn gpa(&self) -> Gpa {
        self.state.slot.gpa()
    }

    /// Bytes of guest memory that a word of [`Pages::words`] stands for.
    pub const WORD_BYTES: u64 = WORD_BYTES;

    /// Turns the log off, and forgets writes that were not harvested. Joins split leaves again and frees
    /// their tables.
    pub fn disable(self) {}
}

impl Drop for Harvester {
    fn drop(&mut self) {
        let mmu = &self.mmu;
        let _turn = lock(&mmu.harvests);
        let mut control = lock(&mmu.control);
        // From here on, no writer checks whether a leaf of this slot is writable.
        mmu.slots[self.index].log.store(null_mut(), Ordering::Release);
        let mut garbage = Garbage::default();
        if self.log.protects() {
            let restore = |at: &AtomicU64, _| {
                // SAFETY: the lock for changes is held, and listed entries are mappings.
                let leaf = unsafe { unsplit(Entry(at.load(Ordering::Acquire))) };
                let whole = Entry::leaf(leaf.gpa().0, leaf.slot(), leaf.may_write());
                // A writer may be splitting the entry at the same time.
                if let Some(node) = Entry(at.swap(whole.0, Ordering::AcqRel)).node() {
                    garbage.push(node);
                }
            };
            // SAFETY: the lock for changes is held.
            unsafe { self.state.each_mapping(restore) };
        }
        mmu.epochs.wait();
        // SAFETY: all writers were waited for just now.
        unsafe { garbage.give_back(&mmu.nodes) };
        // SAFETY: as above; its tables were put there before the wait.
        unsafe { std::mem::take(&mut control.garbage).give_back(&mmu.nodes) };
        // SAFETY: harvests take turns, and this thread is not walking.
        unsafe { mmu.nodes.trim() };
    }
}

impl std::fmt::Debug for Harvester {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Harvester").field("gpa", &self.gpa()).finish_non_exhaustive()
    }
}
