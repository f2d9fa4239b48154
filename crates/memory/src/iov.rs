//! The translated buffers of a request.
#![expect(unsafe_code, reason = "island: pointers into slots, handed to the kernel")]

mod segments;

use crate::{Gpa, Marks, Unmapped, View, fault, shared};
use segments::Segments;
use std::ptr::NonNull;
use std::sync::Arc;

/// The buffers of one request as the kernel takes them (`struct iovec`), in order.
///
/// An `Iov` holds the view that it was translated with, so that its addresses stay valid. A request slot
/// keeps its `Iov` from request to request. It takes a new reference only when the view has changed, not for
/// each request. An engine must keep the `Iov` of an operation until the operating system has finished with
/// it.
///
/// # Marks
/// A copy into the `Iov` is marked at once. If the kernel writes to it ([`Iov::segments_to_fill`]),
/// [`Iov::advance`] marks the bytes that it takes off the front. If the operation failed, the kernel may have
/// written to the rest; the rest is marked when the `Iov` is emptied, unless it was sealed ([`Iov::seal`]).
#[derive(Debug, Default)]
pub struct Iov {
    /// The segments. Those from `first` on are not used up.
    segments: Segments,
    first: usize,
    len: u64,
    pin: Option<Arc<View>>,
    /// Whether the kernel was given the remaining segments to write to.
    exposed: bool,
}

/// Largest number of segments in a request. A disk's largest request needs 126 * 257 of them behind a vIOMMU:
/// 126 buffers of 1 MiB in pages of 4 KiB, none of which is contiguous with the next, and no buffer begins at
/// the start of a page.
const SEGMENTS_MAX: usize = 1 << 15;

impl Iov {
    /// Empties the `Iov` for the next request.
    #[inline]
    pub fn clear(&mut self, marks: &mut Marks) {
        if self.exposed {
            self.mark_exposed(marks);
        }
        self.segments.clear();
        self.first = 0;
        self.len = 0;
    }

    /// Marks what the kernel may have written to.
    #[inline(never)]
    fn mark_exposed(&mut self, marks: &mut Marks) {
        self.exposed = false;
        if self.len > 0 {
            self.mark(self.len, marks);
        }
    }

    /// Empties the `Iov`, and releases its view unless that is `current`.
    ///
    /// The marks are committed first. So a session that waits for removed memory finds all writes to it in
    /// the log.
    #[inline]
    pub fn unpin_unless(&mut self, current: &Arc<View>, marks: &mut Marks) {
        self.clear(marks);
        View::unpin_unless(&mut self.pin, current, marks);
    }

    /// Adds `len` bytes at `gpa`. Joins ranges that are adjacent in host memory to one segment.
    ///
    /// # Errors
    /// A part of the range is not guest memory; or the `Iov` has bytes of another view; or the range crosses
    /// from one slot to another and there are too many segments already. The `Iov` is unchanged then.
    #[inline(always)]
    pub fn push(&mut self, view: &Arc<View>, gpa: Gpa, len: u32) -> Result<(), Unmapped> {
        let unmapped = Unmapped { addr: gpa.0, len: u64::from(len) };
        if !View::is_pinned(&self.pin, view) && !self.pin(view) {
            return Err(unmapped);
        }
        // The usual case, without the loop: one slot holds the whole range.
        match view.map().contiguous(gpa, u64::from(len)) {
            Some(host) => {
                self.add(host, len as usize);
                Ok(())
            }
            None => self.push_pieces(view, gpa, len),
        }
    }

    /// Holds `view` from now on. Returns `false` if there are bytes of another view.
    #[inline(never)]
    fn pin(&mut self, view: &Arc<View>) -> bool {
        let is_empty = self.count() == 0;
        if is_empty {
            self.pin = Some(view.clone());
        }
        is_empty
    }

    /// Adds a range that crosses from slot to slot.
    #[inline(never)]
    fn push_pieces(&mut self, view: &Arc<View>, gpa: Gpa, len: u32) -> Result<(), Unmapped> {
        let (map, unmapped) = (view.map(), Unmapped { addr: gpa.0, len: u64::from(len) });
        // Only ranges in several pieces are limited here. The chain limits the number of the others.
        if self.count() >= SEGMENTS_MAX || !map.contains(gpa, u64::from(len)) {
            return Err(unmapped);
        }
        map.pieces(gpa, u64::from(len), |host, len| self.add(host, len))
    }

    #[inline]
    fn add(&mut self, host: NonNull<u8>, len: usize) {
        if len == 0 {
            return;
        }
        self.len += len as u64;
        // A used-up segment must not grow: it would not be read again.
        if !self.segments.is_empty()
            && let Some(last) = self.segments.as_mut_slice().get_mut(self.first..).and_then(<[_]>::last_mut)
            && last.iov_base.addr() + last.iov_len == host.as_ptr().addr()
        {
            last.iov_len += len;
            return;
        }
        self.segments.push(libc::iovec { iov_base: host.as_ptr().cast(), iov_len: len });
    }

    /// Returns the number of segments, including those that are used up.
    #[inline]
    pub fn count(&self) -> usize {
        self.segments.as_slice().len()
    }

    /// Returns the number of segments that fit without an allocation.
    pub fn capacity(&self) -> usize {
        self.segments.capacity()
    }

    /// Frees memory that neither this many segments nor the present ones need.
    pub fn shrink_to(&mut self, segments: usize) {
        self.segments.shrink_to(segments);
    }

    /// Returns the number of bytes that are left.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns whether no bytes are left.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the segments that are left.
    ///
    /// The addresses in them are valid for reading and writing until this `Iov` is changed or dropped. The
    /// guest can write there at any time. The array of segments may be inside of this `Iov`, so it is at
    /// another address after a move.
    pub fn segments(&self) -> &[libc::iovec] {
        &self.segments.as_slice()[self.first..]
    }

    /// Returns the segments that are left, for the kernel to write to.
    pub fn segments_to_fill(&mut self) -> &[libc::iovec] {
        self.exposed = true;
        self.segments()
    }

    /// Declares that the kernel has finished with the segments to fill, and wrote none of the bytes that are
    /// left. They are not marked when the `Iov` is emptied.
    #[inline]
    pub fn seal(&mut self) {
        self.exposed = false;
    }

    /// Marks the first `bytes` that are left as written.
    #[inline]
    fn mark(&self, bytes: u64, marks: &mut Marks) {
        if marks.is_on() {
            self.mark_logged(bytes, marks);
        }
    }

    #[cold]
    fn mark_logged(&self, bytes: u64, marks: &mut Marks) {
        if let Some(pin) = &self.pin {
            let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
            self.pieces(0, bytes, |host, _, n| marks.wrote_host(pin.map(), host, n));
        }
    }

    /// Returns whether each segment begins at a multiple of `align` and has a length that is a multiple of
    /// `align_len`.
    pub fn is_aligned(&self, align: usize, align_len: usize) -> bool {
        self.segments()
            .iter()
            .all(|s| s.iov_base.addr().is_multiple_of(align) && s.iov_len.is_multiple_of(align_len))
    }

    /// Returns whether memory of its view has lost pages, so that bytes copied from it may be wrong: see
    /// [`crate::fault`].
    #[inline]
    pub fn is_damaged(&self) -> bool {
        fault::damages() != 0 && self.pin.as_ref().is_some_and(|pin| pin.map().is_damaged())
    }

    /// Reads a byte of each page of the first `bytes` bytes that are left, so that lost pages are found: see
    /// [`crate::fault`]. This is for system calls that report success although a page was missing, as reads
    /// from a TAP do.
    pub fn touch_pages(&self, bytes: u64) {
        /// No page is smaller.
        const PAGE: usize = 4096;
        self.pieces(0, usize::try_from(bytes).unwrap_or(usize::MAX), |host, _, n| {
            let mut byte = [0];
            // Each page of the piece has a byte at one of these offsets, or is that of the last byte.
            for at in (0..n).step_by(PAGE).chain(n.checked_sub(1)) {
                // SAFETY: the piece lies in a segment, whose slot `pin` keeps mapped, and `at` in the piece.
                unsafe { shared::read(host.add(at), &mut byte) }
                std::hint::black_box(&byte);
            }
        });
    }

    /// Takes `bytes` off the front, after a transfer of that many. Takes everything if fewer are left.
    #[inline]
    pub fn advance(&mut self, bytes: u64, marks: &mut Marks) {
        let mut left = bytes.min(self.len);
        if self.exposed {
            self.mark(left, marks);
        }
        self.len -= left;
        while left > 0 {
            let segment = &mut self.segments.as_mut_slice()[self.first];
            let here = left.min(segment.iov_len as u64) as usize;
            segment.iov_base = segment.iov_base.cast::<u8>().wrapping_add(here).cast();
            segment.iov_len -= here;
            left -= here as u64;
            if segment.iov_len == 0 {
                self.first += 1;
            }
        }
    }

    /// Moves the first `len` bytes that are left to `front`, which is emptied first. Moves everything if
    /// fewer are left.
    ///
    /// This allocates nothing if `front` has the capacity, and takes a reference to the view only if `front`
    /// has another one.
    pub fn split_to(&mut self, len: u64, front: &mut Self, marks: &mut Marks) {
        front.clear(marks);
        if !matches!((&front.pin, &self.pin), (Some(a), Some(b)) if Arc::ptr_eq(a, b)) {
            front.pin.clone_from(&self.pin);
        }
        front.exposed = self.exposed;
        let mut left = len.min(self.len);
        self.len -= left;
        front.len = left;
        while left > 0 {
            let segment = &mut self.segments.as_mut_slice()[self.first];
            let here = left.min(segment.iov_len as u64) as usize;
            front.segments.push(libc::iovec { iov_base: segment.iov_base, iov_len: here });
            segment.iov_base = segment.iov_base.cast::<u8>().wrapping_add(here).cast();
            segment.iov_len -= here;
            left -= here as u64;
            if segment.iov_len == 0 {
                self.first += 1;
            }
        }
    }

    /// Replaces the segments by those that are left in `other`. Takes a reference to the view only if this
    /// `Iov` has another one.
    pub fn copy_from(&mut self, other: &Self, marks: &mut Marks) {
        self.clear(marks);
        if !matches!((&self.pin, &other.pin), (Some(a), Some(b)) if Arc::ptr_eq(a, b)) {
            self.pin.clone_from(&other.pin);
        }
        other.segments().iter().for_each(|segment| self.segments.push(*segment));
        self.len = other.len;
    }

    /// Empties the `Iov`, and releases its view. Another `Iov` of the request must still hold that view, so
    /// that it stays mapped until the marks are committed.
    pub fn release(&mut self, marks: &mut Marks) {
        self.clear(marks);
        self.pin = None;
    }

    /// Fills up to `bytes` with zeroes.
    pub fn zero(&mut self, bytes: u64, marks: &mut Marks) {
        const ZEROES: [u8; 4096] = [0; 4096];
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        self.fill(0, bytes, marks, |host, _, n| {
            for at in (0..n).step_by(ZEROES.len()) {
                let here = (n - at).min(ZEROES.len());
                // SAFETY: the piece lies in a segment, whose slot `pin` keeps mapped, and `at` in the piece.
                unsafe { shared::write(host.add(at), &ZEROES[..here]) }
            }
        });
    }

    /// Calls `each` with the host pieces of up to `len` bytes from `offset` on. Returns the number of bytes.
    pub(crate) fn pieces(
        &self,
        offset: u64,
        len: usize,
        mut each: impl FnMut(NonNull<u8>, usize, usize),
    ) -> usize {
        let (mut skip, mut done) = (offset, 0);
        for segment in self.segments() {
            let here = segment.iov_len as u64;
            if skip >= here {
                skip -= here;
                continue;
            }
            if done == len {
                break;
            }
            let n = (here - skip).min((len - done) as u64) as usize;
            if let Some(base) = NonNull::new(segment.iov_base.cast::<u8>()) {
                // SAFETY: `skip` is smaller than the segment's length.
                each(unsafe { base.add(skip as usize) }, done, n);
            }
            done += n;
            skip = 0;
        }
        done
    }

    /// Copies bytes from `offset` on to `into`. Returns their number, at most `into.len()`.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> usize {
        self.pieces(offset, into.len(), |host, at, n| {
            // SAFETY: the piece lies in a segment, whose slot `pin` keeps mapped.
            unsafe { shared::read(host, &mut into[at..at + n]) }
        })
    }

    /// Copies `from` into the buffers from `offset` on. Returns how many bytes fitted.
    pub fn write(&mut self, offset: u64, from: &[u8], marks: &mut Marks) -> usize {
        self.fill(offset, from.len(), marks, |host, at, n| {
            // SAFETY: the piece lies in a segment, whose slot `pin` keeps mapped.
            unsafe { shared::write(host, &from[at..at + n]) }
        })
    }

    /// Calls `each` as [`Iov::pieces`] does, and marks the pieces. `each` writes all of each piece.
    #[inline]
    pub(crate) fn fill(
        &mut self,
        offset: u64,
        len: usize,
        marks: &mut Marks,
        mut each: impl FnMut(NonNull<u8>, usize, usize),
    ) -> usize {
        self.pieces(offset, len, |host, at, n| {
            each(host, at, n);
            if let Some(pin) = &self.pin {
                marks.wrote_host(pin.map(), host, n);
            }
        })
    }
}

// SAFETY: the pointers are to shared memory that any thread may access, by copies only, and `pin` keeps it
// mapped.
unsafe impl Send for Iov {}
