//! A writer's cache of translations.
//!
//! It is emptied at the first quiescent point after a removal ([`crate::epoch`]). Only its owner uses it, so
//! nothing in it is atomic.

use crate::level::{PAGE, PAGE_BITS, size};
use crate::log::Log;
use std::ptr::NonNull;

/// Pages in the cache.
const PAGES: usize = if cfg!(loom) { 4 } else { 512 };
/// Larger ranges in the cache.
const EXTENTS: usize = 4;
const EMPTY_TAG: u64 = u64::MAX;

/// A range of a space that is contiguous in guest memory and on the host.
#[derive(Clone, Copy)]
pub(crate) struct Extent {
    pub(crate) start: u64,
    pub(crate) len: u64,
    pub(crate) gpa: u64,
    pub(crate) host: NonNull<u8>,
    pub(crate) writable: bool,
    /// The log for marks, if writes must be marked.
    pub(crate) marks: Option<NonNull<Log>>,
}

/// The result of a lookup: a host address, and the bytes that follow it in the range.
pub(crate) struct Hit {
    pub(crate) host: NonNull<u8>,
    pub(crate) room: u64,
    pub(crate) gpa: u64,
    pub(crate) marks: Option<NonNull<Log>>,
}

impl Extent {
    #[inline]
    pub(crate) fn hit(&self, addr: u64) -> Option<Hit> {
        let offset = addr.wrapping_sub(self.start);
        if offset >= self.len {
            return None;
        }
        Some(Hit {
            // The address is in the range, so this is the same as `add`.
            host: self.host.map_addr(|host| host.saturating_add(offset as usize)),
            room: self.len - offset,
            gpa: self.gpa + offset,
            marks: self.marks,
        })
    }
}

/// A cached page without its tag.
#[derive(Clone, Copy)]
struct Page {
    gpa: u64,
    host: NonNull<u8>,
    marks: Option<NonNull<Log>>,
}

/// The cache.
pub(crate) struct Tlb {
    extents: [Option<Extent>; EXTENTS],
    oldest: usize,
    /// For each entry, the number of the page. The lowest bit says whether it is writable.
    tags: Box<[u64; PAGES]>,
    pages: Box<[Page; PAGES]>,
}

impl Tlb {
    pub(crate) fn new() -> Self {
        let page = Page { gpa: 0, host: NonNull::dangling(), marks: None };
        Self {
            extents: [None; EXTENTS],
            oldest: 0,
            tags: Box::new([EMPTY_TAG; PAGES]),
            pages: Box::new([page; PAGES]),
        }
    }

    #[cold]
    pub(crate) fn flush(&mut self) {
        self.extents = [None; EXTENTS];
        self.tags.fill(EMPTY_TAG);
    }

    #[inline]
    pub(crate) fn find(&self, addr: u64, write: bool) -> Option<Hit> {
        let page = addr >> PAGE_BITS;
        let slot = page as usize % PAGES;
        let tag = self.tags[slot];
        if tag == page << 1 | 1 || tag == page << 1 && !write {
            let found = &self.pages[slot];
            let offset = addr % PAGE;
            return Some(Hit {
                host: found.host.map_addr(|host| host.saturating_add(offset as usize)),
                room: PAGE - offset,
                gpa: found.gpa + offset,
                marks: found.marks,
            });
        }
        self.extents.iter().flatten().filter(|extent| extent.writable || !write).find_map(|e| e.hit(addr))
    }

    pub(crate) fn fill(&mut self, extent: Extent) {
        if extent.len > size(1) {
            self.extents[self.oldest] = Some(extent);
            self.oldest = (self.oldest + 1) % EXTENTS;
            return;
        }
        let page = extent.start >> PAGE_BITS;
        let slot = page as usize % PAGES;
        self.tags[slot] = page << 1 | u64::from(extent.writable);
        self.pages[slot] = Page { gpa: extent.gpa, host: extent.host, marks: extent.marks };
    }
}
