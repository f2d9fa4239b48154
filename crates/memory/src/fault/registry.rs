//! A list of our mappings that a signal handler can search.
//!
//! The list only grows. Its entries are never freed but used again, so it is as long as the largest number of
//! mappings at any one time. Threads that add and remove mappings take a lock. The handler takes no lock,
//! does not wait, and does not retry.
//!
//! # One look at each entry is enough
//! The handler runs on a thread that was about to touch a mapping and so holds a reference to it. The entry
//! of *that mapping* was filled before the thread could have the mapping. It does not change until the
//! handler returns. Any other entry may change while the handler reads it. Each entry has a version, which is
//! odd while the entry changes. The handler skips an entry if its version is odd, or if the version is not
//! the same before and after it has read the fields. Such an entry cannot be the one that it looks for.
//!
//! The memory orders are these:
//! * A writer makes the version odd, stores each field with release (F), and makes the version even with
//!   release (V).
//! * A reader loads the version with acquire, whose partner is V. So the fields that it loads are of that
//!   version or newer.
//! * The reader loads the fields with acquire, whose partner is F. If one of them is newer, the version that
//!   the reader loads after them is newer too.
//!
//! An entry is filled after its range is mapped, and emptied before the range is unmapped. So an entry never
//! describes memory of another owner.

#[cfg(all(test, loom))]
mod model;

use kickless_sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use kickless_sync::{Mutex, lock};
use std::ptr;

kickless_sync::process_wide! {
    /// The mappings of this process.
    pub(crate) static MAPPINGS: Registry =
        Registry { first: AtomicPtr::new(ptr::null_mut()), spare: Mutex::new(Vec::new()) };
}

/// All mappings.
#[derive(Debug)]
pub(crate) struct Registry {
    /// The newest entry.
    first: AtomicPtr<MappingEntry>,
    /// Entries without a mapping.
    spare: Mutex<Vec<&'static MappingEntry>>,
}

/// An entry for one mapping.
#[derive(Debug)]
pub(crate) struct MappingEntry {
    /// Odd while the other fields change.
    version: AtomicUsize,
    start: AtomicUsize,
    /// Zero if the entry has no mapping.
    len: AtomicUsize,
    page: AtomicUsize,
    /// Number of missing pages.
    misses: AtomicUsize,
    /// Never changes after the entry is in the list.
    next: AtomicPtr<MappingEntry>,
}

/// The range of a mapping, and the size of its pages. Both ends are multiples of that size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) start: usize,
    pub(crate) len: usize,
    pub(crate) page: usize,
}

impl Registry {
    /// Adds a mapping, after it is mapped.
    pub(crate) fn add(&self, range: Range) -> &'static MappingEntry {
        let mut spare = lock(&self.spare);
        if let Some(entry) = spare.pop() {
            entry.set(range);
            return entry;
        }
        let entry: &'static MappingEntry = Box::leak(Box::new(MappingEntry::new()));
        entry.set(range);
        entry.next.store(self.first.load(Ordering::Relaxed), Ordering::Relaxed);
        // Release: the entry is whole before it is in the list. Its partner is the load in `find`.
        self.first.store(ptr::from_ref(entry).cast_mut(), Ordering::Release);
        entry
    }

    /// Removes an unused mapping, before it is unmapped.
    pub(crate) fn remove(&self, entry: &'static MappingEntry) {
        entry.set(Range { start: 0, len: 0, page: 1 });
        lock(&self.spare).push(entry);
    }

    /// Returns the mapping that holds `address`. The caller must be using that mapping. Async-signal-safe.
    pub(crate) fn find(&self, address: usize) -> Option<(&'static MappingEntry, Range)> {
        let mut next = self.first.load(Ordering::Acquire);
        loop {
            // SAFETY: null, or an entry. Entries are never freed, and there are only shared references to
            // them.
            let entry: &'static MappingEntry = unsafe { next.as_ref()? };
            if let Some(range) = entry.read()
                && address.checked_sub(range.start).is_some_and(|offset| offset < range.len)
            {
                return Some((entry, range));
            }
            next = entry.next.load(Ordering::Relaxed);
        }
    }
}

impl MappingEntry {
    fn new() -> Self {
        let zero = || AtomicUsize::new(0);
        Self {
            version: zero(),
            start: zero(),
            len: zero(),
            page: zero(),
            misses: zero(),
            next: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Fills the entry. Only the thread that maps or unmaps the range may call this.
    fn set(&self, range: Range) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version.wrapping_add(1), Ordering::Relaxed);
        // F.
        self.start.store(range.start, Ordering::Release);
        self.len.store(range.len, Ordering::Release);
        self.page.store(range.page, Ordering::Release);
        self.misses.store(0, Ordering::Release);
        // V.
        self.version.store(version.wrapping_add(2), Ordering::Release);
    }

    /// Reads the entry. Returns `None` if it is changing.
    fn read(&self) -> Option<Range> {
        let version = self.version.load(Ordering::Acquire);
        let range = Range {
            start: self.start.load(Ordering::Acquire),
            len: self.len.load(Ordering::Acquire),
            page: self.page.load(Ordering::Acquire),
        };
        (version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version).then_some(range)
    }

    /// Counts a missing page. Returns the count before.
    pub(crate) fn count_miss(&self) -> usize {
        self.misses.fetch_add(1, Ordering::AcqRel)
    }

    /// Returns the number of missing pages.
    pub(crate) fn misses(&self) -> usize {
        self.misses.load(Ordering::Acquire)
    }
}
