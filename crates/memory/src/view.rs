//! A device's access to guest memory.

use crate::fault::Damaged;
use crate::{Error, Gpa, Iova, Log, Map, Marks, Span, Unmapped, shared};
use std::sync::Arc;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Guest memory at one moment, and the log of its writes.
///
/// A view never changes: a change makes a new view, which each worker takes when it next handles its mailbox.
/// A request in flight keeps the view that it was submitted with. A device reads and writes guest memory only
/// through a view, at the addresses of the chains that it popped.
#[derive(Debug, Default)]
pub struct View {
    map: Map,
    log: Option<Arc<Log>>,
}

impl View {
    /// Makes a view of this memory, without a log.
    pub fn new(map: Map) -> Self {
        Self { map, log: None }
    }

    /// Adds a log, if there is one, in which the writes of devices are marked. A queue marks in the log of
    /// its current view ([`Marks::set_view`]), even for a request that was submitted with an older one.
    ///
    /// # Errors
    /// The log does not have a bit for each page of this memory.
    pub fn with_log(self, log: Option<Arc<Log>>) -> Result<Self, Error> {
        if let Some(log) = &log {
            log.covers(&self.map)?;
        }
        Ok(Self { log, ..self })
    }

    /// Releases the view of a request, unless that is `current`.
    ///
    /// The marks are committed first. So a session that waits for removed memory finds all writes to it in
    /// the log.
    #[inline]
    pub fn unpin_unless(pin: &mut Option<Arc<Self>>, current: &Arc<Self>, marks: &mut Marks) {
        if !Self::is_pinned(pin, current) {
            Self::unpin(pin, marks);
        }
    }

    /// Returns whether `pin` is `current`.
    #[inline]
    pub(crate) fn is_pinned(pin: &Option<Arc<Self>>, current: &Arc<Self>) -> bool {
        // One comparison, because no view is at address 0.
        pin.as_ref().map_or(std::ptr::null(), Arc::as_ptr) == Arc::as_ptr(current)
    }

    #[inline(never)]
    fn unpin(pin: &mut Option<Arc<Self>>, marks: &mut Marks) {
        if pin.is_some() {
            marks.commit();
            *pin = None;
        }
    }

    /// Returns the log in which writes are marked. It has a bit for each page of the memory in view.
    #[inline]
    pub fn log(&self) -> Option<&Arc<Log>> {
        self.log.as_ref()
    }

    /// Returns the memory in view.
    #[inline]
    pub fn map(&self) -> &Map {
        &self.map
    }

    /// Returns the damage of memory in view that has lost pages, if there is some: see [`crate::fault`].
    pub fn damaged(&self) -> Option<Damaged> {
        self.map.damaged()
    }

    /// Returns the guest-physical address for a driver's address without an IOMMU: the same number.
    #[inline]
    pub fn direct(iova: Iova) -> Gpa {
        Gpa(iova.0)
    }

    /// Does the same as [`Map::contains`].
    #[inline]
    pub fn contains(&self, gpa: Gpa, len: u64) -> bool {
        self.map.contains(gpa, len)
    }

    /// Does the same as [`Map::span`].
    #[inline]
    pub fn span(&self, gpa: Gpa, len: u64) -> Option<Span<'_>> {
        self.map.span(gpa, len)
    }

    /// Asks the processor for the cache line at `gpa`, to write to it soon. Has no effect if that is not
    /// guest memory.
    #[inline]
    pub fn prefetch_for_write(&self, gpa: Gpa) {
        if let Some(host) = self.map.contiguous(gpa, 1) {
            shared::prefetch_for_write(host);
        }
    }

    /// Asks the processor for the first `len` bytes at `gpa`, at most two cache lines, so that no other
    /// processor keeps them. Has no effect if they are not in one slot.
    #[inline]
    pub fn prefetch_lines(&self, gpa: Gpa, len: u64) {
        let Some(host) = self.map.contiguous(gpa, len) else { return };
        shared::prefetch_lines(host, len);
    }

    /// Asks the processor for the first `len` bytes at `gpa` without those of [`View::prefetch_lines`], to
    /// read them soon. Has no effect if they are not in one slot.
    #[inline]
    pub fn prefetch_rest(&self, gpa: Gpa, len: usize) {
        if len <= shared::PREFETCHED_FIRST {
            return;
        }
        let Some(host) = self.map.contiguous(gpa, len as u64) else { return };
        shared::prefetch_rest(host, len, false);
    }

    /// Does the same as [`View::prefetch_rest`], for bytes to write soon.
    #[inline]
    pub fn prefetch_rest_for_write(&self, gpa: Gpa, len: usize) {
        let Some(host) = self.map.contiguous(gpa, len as u64) else { return };
        shared::prefetch_rest(host, len, true);
    }

    /// Does the same as [`Map::read`].
    ///
    /// # Errors
    /// A part of the range is not guest memory; `into` then holds the bytes before it.
    #[inline]
    pub fn read(&self, gpa: Gpa, into: &mut [u8]) -> Result<(), Unmapped> {
        self.map.read(gpa, into)
    }

    /// Writes as [`Map::write`] does, and marks the range.
    ///
    /// # Errors
    /// A part of the range is not guest memory; nothing is written then.
    #[inline]
    pub fn write(&self, gpa: Gpa, from: &[u8], marks: &mut Marks) -> Result<(), Unmapped> {
        self.map.write(gpa, from)?;
        marks.wrote_in(&self.map, gpa, from.len() as u64);
        Ok(())
    }

    /// Copies `len` bytes at `at` in `from` to `to`, and marks the range at `to`.
    ///
    /// The bytes pass through no memory of this process if one slot holds each range. A guest that writes
    /// them meanwhile can tear the copy. Ranges that share memory leave unspecified bytes of that memory at
    /// `to`.
    ///
    /// # Errors
    /// A part of one of the ranges is not guest memory; nothing is written then.
    #[inline]
    pub fn copy_from(
        &self,
        to: Gpa,
        from: &Self,
        at: Gpa,
        len: u64,
        marks: &mut Marks,
    ) -> Result<(), Unmapped> {
        self.map.copy_from(to, &from.map, at, len)?;
        marks.wrote_in(&self.map, to, len);
        Ok(())
    }

    /// Does the same as [`Map::read_obj`].
    ///
    /// # Errors
    /// A part of the range is not guest memory.
    #[inline]
    pub fn read_obj<T: FromBytes + IntoBytes>(&self, gpa: Gpa) -> Result<T, Unmapped> {
        self.map.read_obj(gpa)
    }

    /// Writes as [`Map::write_obj`] does, and marks the range.
    ///
    /// # Errors
    /// A part of the range is not guest memory; nothing is written then.
    #[inline]
    pub fn write_obj<T: IntoBytes + Immutable>(
        &self,
        gpa: Gpa,
        value: &T,
        marks: &mut Marks,
    ) -> Result<(), Unmapped> {
        self.map.write_obj(gpa, value)?;
        marks.wrote_in(&self.map, gpa, size_of::<T>() as u64);
        Ok(())
    }
}

impl Marks {
    /// Makes marks go to the log of this view from now on, if it has one, at the addresses that memory has in
    /// the view. Commits earlier marks to the earlier log first.
    pub fn set_view(&mut self, view: &View) {
        self.set_log(view.log(), view.map().hosts());
    }
}
