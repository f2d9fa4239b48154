//! A writer's own cache of translations. Emptied at the first quiescent point after something was taken away
//! ([`crate::epoch`]), and used by its owner only, so nothing in it is atomic.

use crate::level::{PAGE, PAGE_BITS, size};
use crate::log::Log;
use std::ptr::NonNull;

/// Pages that it holds.
const PAGES: usize = if cfg!(loom) { 4 } else { 512 };
/// Larger pieces that it holds.
const EXTENTS: usize = 4;
const NOTHING: u64 = u64::MAX;

/// A piece of a space, contiguous in guest memory and on the host.
#[derive(Clone, Copy)]
pub(crate) struct Extent {
    pub(crate) start: u64,
    pub(crate) len: u64,
    pub(crate) gpa: u64,
    pub(crate) host: NonNull<u8>,
    pub(crate) writable: bool,
    /// Where writes are to be marked, if they are.
    pub(crate) marks: Option<NonNull<Log>>,
}

/// Where an address leads: so many bytes.
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
            // It is in the piece: the same as `add`.
            host: self.host.map_addr(|host| host.saturating_add(offset as usize)),
            room: self.len - offset,
            gpa: self.gpa + offset,
            marks: self.marks,
        })
    }
}

/// A page's place in the cache, apart from its tag.
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
    /// The number of the page, and whether it is writable in the lowest bit.
    tags: Box<[u64; PAGES]>,
    pages: Box<[Page; PAGES]>,
}

impl Tlb {
    pub(crate) fn new() -> Self {
        let page = Page { gpa: 0, host: NonNull::dangling(), marks: None };
        Self {
            extents: [None; EXTENTS],
            oldest: 0,
            tags: Box::new([NOTHING; PAGES]),
            pages: Box::new([page; PAGES]),
        }
    }

    #[cold]
    pub(crate) fn flush(&mut self) {
        self.extents = [None; EXTENTS];
        self.tags.fill(NOTHING);
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
