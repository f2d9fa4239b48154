//! Guest memory that the kernel has pinned (`IORING_REGISTER_BUFFERS`), so that it need not be looked up and pinned for each
//! operation.
//!
//! # Memory that comes and goes
//! A range of the table stands for host addresses, not for memory: if others came to be mapped there, an operation would go to pages
//! that are not in the guest any more. So as long as a range can be used for a new operation, the table holds a view that has it
//! mapped, and nothing else can come to its addresses. A queue takes hold of the view that it works with, and lets go of it when it gets
//! another ([`Registered::release`]). A range that no view holds any more serves no new operation. It is taken back
//! from the kernel at once, or, where operations use it, when the last of them is over: each of those owns its buffers, and
//! with them the view that keeps the memory mapped, so the table need not hold it for them. Until then the range's index stays taken: the kernel may
//! look at it late, when a submission waits in the ring.
#![expect(unsafe_code, reason = "island: memory handed to the kernel")]

use io_uring::Submitter;
use kickless_memory::View;
use std::io;
use std::sync::Arc;
use tracing::warn;

/// Ranges that the kernel can know: as many GiB of memory, unless it is in small pieces.
const RANGES_MAX: u32 = 4096;
/// Bytes of one at most (io_uring_register(2)).
const RANGE_BYTES_MAX: usize = 1 << 30;

/// A part of a mapping.
#[derive(Debug)]
struct Range {
    at: usize,
    len: usize,
    index: u16,
    /// Views that have it.
    views: usize,
    /// Operations that the kernel was told to use it for.
    ops: usize,
}

/// The table.
#[derive(Debug)]
pub(super) struct Registered {
    /// By address; none overlap, for all of them are mapped.
    ranges: Vec<Range>,
    free: Vec<u16>,
    /// Views that somebody holds, and how many do.
    views: Vec<(Arc<View>, usize)>,
    /// It was said that memory cannot be registered.
    told: bool,
}

impl Registered {
    pub(super) fn new(submitter: &Submitter<'_>) -> io::Result<Self> {
        submitter.register_buffers_sparse(RANGES_MAX)?;
        let free = (0..RANGES_MAX as u16).rev().collect();
        Ok(Self { ranges: Vec::new(), free, views: Vec::new(), told: false })
    }

    /// Operations on memory of this view can use it from now on. What cannot be registered is used as if it were not asked for.
    pub(super) fn hold(&mut self, submitter: &Submitter<'_>, view: &Arc<View>) {
        if let Some((_, users)) = self.views.iter_mut().find(|(held, _)| Arc::ptr_eq(held, view)) {
            *users += 1;
            return;
        }
        self.views.push((view.clone(), 1));
        each_part(view, |at, len| self.add(submitter, at, len));
    }

    fn add(&mut self, submitter: &Submitter<'_>, at: usize, len: usize) {
        let place = match self.ranges.binary_search_by_key(&at, |range| range.at) {
            Ok(place) => {
                // The same mapping: it is held, or an operation's.
                self.ranges[place].views += 1;
                return;
            }
            Err(place) => place,
        };
        let Some(index) = self.free.pop() else { return self.tell(&"there are too many pieces of it") };
        let iovec = libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(at), iov_len: len };
        // SAFETY: a part of a mapping of a view that `views` holds; it is taken back before the view is let go of, or the
        // operation that the kernel uses it for is over.
        match unsafe { submitter.register_buffers_update(u32::from(index), &[iovec], None) } {
            Ok(()) => self.ranges.insert(place, Range { at, len, index, views: 1, ops: 0 }),
            Err(error) => {
                self.free.push(index);
                self.tell(&error);
            }
        }
    }

    /// Who took hold of this view is done with it.
    pub(super) fn release(&mut self, submitter: &Submitter<'_>, view: &Arc<View>) {
        let Some(place) = self.views.iter().position(|(held, _)| Arc::ptr_eq(held, view)) else { return };
        self.views[place].1 -= 1;
        if self.views[place].1 > 0 {
            return;
        }
        each_part(view, |at, _| {
            if let Ok(place) = self.ranges.binary_search_by_key(&at, |range| range.at) {
                self.ranges[place].views -= 1;
                self.settle(submitter, place);
            }
        });
        // Last: nothing of it is in the table any more.
        self.views.swap_remove(place);
    }

    /// The registered buffer that holds all of a segment, which is an operation's from now on.
    #[inline]
    pub(super) fn take(&mut self, at: *mut u8, len: usize) -> Option<u16> {
        let at = at.addr();
        let before = self.ranges.partition_point(|range| range.at <= at);
        let range = self.ranges.get_mut(before.checked_sub(1)?)?;
        let fits = range.views > 0 && len <= range.len.saturating_sub(at - range.at);
        fits.then(|| {
            range.ops += 1;
            range.index
        })
    }

    /// An operation that used it is over.
    #[inline]
    pub(super) fn done(&mut self, submitter: &Submitter<'_>, index: u16) {
        if let Some(place) = self.ranges.iter().position(|range| range.index == index) {
            self.ranges[place].ops -= 1;
            self.settle(submitter, place);
        }
    }

    /// Takes a range back that nobody needs.
    fn settle(&mut self, submitter: &Submitter<'_>, place: usize) {
        let Range { views: 0, ops: 0, index, .. } = self.ranges[place] else { return };
        self.ranges.remove(place);
        let none = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        // SAFETY: no memory is passed.
        match unsafe { submitter.register_buffers_update(u32::from(index), &[none], None) } {
            Ok(()) => self.free.push(index),
            // Its place is lost, which harms nobody.
            Err(error) => self.tell(&error),
        }
    }

    fn tell(&mut self, error: &dyn std::fmt::Display) {
        if !std::mem::replace(&mut self.told, true) {
            warn!(%error, "not all guest memory can be registered; the rest is used without");
        }
    }

    #[cfg(test)]
    pub(super) fn counts(&self) -> (usize, usize) {
        (self.views.len(), self.ranges.len())
    }
}

/// The host memory of a view, in parts that can be registered. A mapping that two slots share comes twice.
fn each_part(view: &View, mut each: impl FnMut(usize, usize)) {
    view.map().each_mapping(|base, len| {
        let base = base.as_ptr().expose_provenance();
        for start in (0..len).step_by(RANGE_BYTES_MAX) {
            each(base + start, (len - start).min(RANGE_BYTES_MAX));
        }
    });
}
