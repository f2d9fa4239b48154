//! Guest memory that the kernel has pinned (`IORING_REGISTER_BUFFERS`), so that it need not look up and pin
//! memory for each operation.
//!
//! # Changing memory
//! A range of the table stands for host addresses, not for memory. If other memory were mapped there, an
//! operation would use pages that no longer belong to the guest. So while a range can be used for new
//! operations, the table holds a view that has it mapped, and no other memory can be mapped there.
//!
//! A queue holds its view, and releases it when it gets another ([`Registered::release`]). A range that no
//! held view has serves no new operations. It is unregistered at once or, if operations use it, when the last
//! of them ends. Each of those owns its buffers, and with them the view that keeps the memory mapped, so the
//! table need not hold it for them. Until then the range's index stays in use, because the kernel may read it
//! late, when a submission waits in the ring.
#![expect(unsafe_code, reason = "island: memory handed to the kernel")]

use io_uring::Submitter;
use kickless_memory::View;
use std::io;
use std::sync::Arc;
use tracing::warn;

/// The number of ranges that the kernel can know: this many GiB of memory, unless it is in small pieces.
const RANGES_MAX: u32 = 4096;
/// The most bytes of a range (io_uring_register(2)).
const RANGE_BYTES_MAX: usize = 1 << 30;

/// A part of a mapping.
#[derive(Debug)]
struct Range {
    at: usize,
    len: usize,
    index: u16,
    /// The number of held views that have it.
    views: usize,
    /// The number of operations for which the kernel uses it.
    ops: usize,
}

/// The table of ranges.
#[derive(Debug)]
pub(super) struct Registered {
    /// By address. None overlap, because all of them are mapped.
    ranges: Vec<Range>,
    free: Vec<u16>,
    /// Held views, with the number of their holders.
    views: Vec<(Arc<View>, usize)>,
    /// The log says that memory cannot be registered.
    warned: bool,
}

impl Registered {
    pub(super) fn new(submitter: &Submitter<'_>) -> io::Result<Self> {
        submitter.register_buffers_sparse(RANGES_MAX)?;
        let free = (0..RANGES_MAX as u16).rev().collect();
        Ok(Self { ranges: Vec::new(), free, views: Vec::new(), warned: false })
    }

    /// Registers the memory of a view for later operations. Memory that cannot be registered is used without.
    pub(super) fn hold(&mut self, submitter: &Submitter<'_>, view: &Arc<View>) {
        if let Some((_, users)) = self.views.iter_mut().find(|(held, _)| Arc::ptr_eq(held, view)) {
            *users += 1;
            return;
        }
        self.views.push((view.clone(), 1));
        each_part(view, |at, len| self.add(submitter, at, len));
    }

    fn add(&mut self, submitter: &Submitter<'_>, at: usize, len: usize) {
        let position = match self.ranges.binary_search_by_key(&at, |range| range.at) {
            Ok(position) => {
                // The same mapping: a view or an operation holds it.
                self.ranges[position].views += 1;
                return;
            }
            Err(position) => position,
        };
        let Some(index) = self.free.pop() else { return self.warn_once(&"there are too many pieces of it") };
        let iovec = libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(at), iov_len: len };
        // SAFETY: this is a part of a mapping of a view that `views` holds. It is unregistered before the
        // view is released, or the operation that uses it has ended.
        match unsafe { submitter.register_buffers_update(u32::from(index), &[iovec], None) } {
            Ok(()) => self.ranges.insert(position, Range { at, len, index, views: 1, ops: 0 }),
            Err(error) => {
                self.free.push(index);
                self.warn_once(&error);
            }
        }
    }

    /// Releases a view for one holder.
    pub(super) fn release(&mut self, submitter: &Submitter<'_>, view: &Arc<View>) {
        let Some(position) = self.views.iter().position(|(held, _)| Arc::ptr_eq(held, view)) else { return };
        self.views[position].1 -= 1;
        if self.views[position].1 > 0 {
            return;
        }
        each_part(view, |at, _| {
            if let Ok(position) = self.ranges.binary_search_by_key(&at, |range| range.at) {
                self.ranges[position].views -= 1;
                self.unregister_if_unused(submitter, position);
            }
        });
        // Last, when none of its ranges is in the table.
        self.views.swap_remove(position);
    }

    /// Returns the registered buffer that contains a whole segment, and counts an operation for it.
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

    /// Counts an operation less for a buffer.
    #[inline]
    pub(super) fn done(&mut self, submitter: &Submitter<'_>, index: u16) {
        if let Some(position) = self.ranges.iter().position(|range| range.index == index) {
            self.ranges[position].ops -= 1;
            self.unregister_if_unused(submitter, position);
        }
    }

    /// Unregisters a range that no view and no operation needs.
    fn unregister_if_unused(&mut self, submitter: &Submitter<'_>, position: usize) {
        let Range { views: 0, ops: 0, index, .. } = self.ranges[position] else { return };
        self.ranges.remove(position);
        let none = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        // SAFETY: no memory is passed.
        match unsafe { submitter.register_buffers_update(u32::from(index), &[none], None) } {
            Ok(()) => self.free.push(index),
            // Its index is lost, which does no harm.
            Err(error) => self.warn_once(&error),
        }
    }

    fn warn_once(&mut self, error: &dyn std::fmt::Display) {
        if !std::mem::replace(&mut self.warned, true) {
            warn!(%error, "not all guest memory can be registered; the rest is used without");
        }
    }

    #[cfg(test)]
    pub(super) fn counts(&self) -> (usize, usize) {
        (self.views.len(), self.ranges.len())
    }
}

/// Calls `each` for the host memory of a view, in parts that can be registered. A mapping that two slots
/// share comes twice.
fn each_part(view: &View, mut each: impl FnMut(usize, usize)) {
    view.map().each_mapping(|base, len| {
        let base = base.as_ptr().expose_provenance();
        for start in (0..len).step_by(RANGE_BYTES_MAX) {
            each(base + start, (len - start).min(RANGE_BYTES_MAX));
        }
    });
}
