//! Where our mappings are, so that a signal handler can ask.
//!
//! A list that only grows, of entries that are never freed and are used again: as many as there were mappings at once at
//! the most. Who adds and removes takes a lock; the handler takes none, waits for nobody and tries nothing twice.
//!
//! # Why one look at each entry is enough
//! The handler runs on a thread that was about to touch a mapping, and so holds a reference to it: *its* entry was
//! filled before the thread could have the mapping, and stays as it is at least until the handler returns. Any other entry may
//! change under the handler's eyes. A version in each entry, odd while it changes, tells: an entry whose version is odd,
//! or not the same before and after its fields were read, is not the one that is looked for, and is passed over.
//!
//! The orders: a writer makes the version odd, stores the fields, each with release (F), and makes the version even with release
//! (V). A reader loads the version with acquire, whose partner is V: the fields are at least those of that version. It loads
//! the fields with acquire, whose partner is F: if one of them is newer, so is the version that is loaded after them.
//!
//! An entry is emptied before its range is unmapped, and filled after it was mapped. So what an entry says is never about somebody
//! else's memory.

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
    first: AtomicPtr<Entry>,
    /// Entries without a mapping.
    spare: Mutex<Vec<&'static Entry>>,
}

/// A place for one mapping.
#[derive(Debug)]
pub(crate) struct Entry {
    /// Odd while the others change.
    version: AtomicUsize,
    start: AtomicUsize,
    /// Zero: there is no mapping.
    len: AtomicUsize,
    page: AtomicUsize,
    /// How many of its pages were missed.
    misses: AtomicUsize,
    /// Never changes once the entry is in the list.
    next: AtomicPtr<Entry>,
}

/// The range of a mapping, and the size of its pages, of which both ends are multiples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) start: usize,
    pub(crate) len: usize,
    pub(crate) page: usize,
}

impl Registry {
    /// Takes a mapping in, after it was made.
    pub(crate) fn add(&self, range: Range) -> &'static Entry {
        let mut spare = lock(&self.spare);
        if let Some(entry) = spare.pop() {
            entry.set(range);
            return entry;
        }
        let entry: &'static Entry = Box::leak(Box::new(Entry::new()));
        entry.set(range);
        entry.next.store(self.first.load(Ordering::Relaxed), Ordering::Relaxed);
        // Release: the entry is whole before it is in the list. Its partner is the load in `find`.
        self.first.store(ptr::from_ref(entry).cast_mut(), Ordering::Release);
        entry
    }

    /// Takes a mapping out that nobody uses any more, before it is unmapped.
    pub(crate) fn remove(&self, entry: &'static Entry) {
        entry.set(Range { start: 0, len: 0, page: 1 });
        lock(&self.spare).push(entry);
    }

    /// The mapping that holds `address`, which the caller is in the middle of using: async-signal-safe.
    pub(crate) fn find(&self, address: usize) -> Option<(&'static Entry, Range)> {
        let mut next = self.first.load(Ordering::Acquire);
        loop {
            // SAFETY: null, or an entry, which is never freed and only ever shared.
            let entry: &'static Entry = unsafe { next.as_ref()? };
            if let Some(range) = entry.look()
                && address.checked_sub(range.start).is_some_and(|offset| offset < range.len)
            {
                return Some((entry, range));
            }
            next = entry.next.load(Ordering::Relaxed);
        }
    }
}

impl Entry {
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

    /// Only one thread at a time: the one that makes or unmakes the mapping.
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

    /// What it says; `None` if that is changing.
    fn look(&self) -> Option<Range> {
        let version = self.version.load(Ordering::Acquire);
        let range = Range {
            start: self.start.load(Ordering::Acquire),
            len: self.len.load(Ordering::Acquire),
            page: self.page.load(Ordering::Acquire),
        };
        (version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version).then_some(range)
    }

    /// Counts a page that is missing; how many there were before.
    pub(crate) fn miss(&self) -> usize {
        self.misses.fetch_add(1, Ordering::AcqRel)
    }

    /// Pages that were missing.
    pub(crate) fn misses(&self) -> usize {
        self.misses.load(Ordering::Acquire)
    }
}
