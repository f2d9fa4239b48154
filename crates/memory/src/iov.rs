//! Translated ranges, and the reference that keeps them valid.
#![expect(unsafe_code, reason = "island: pointers into slots, handed to the kernel")]

use crate::{Gpa, Marks, Unmapped, View, fault, shared};
use std::ptr::NonNull;
use std::sync::Arc;

/// The buffers of one request as the kernel takes them (`struct iovec`), in order.
///
/// It holds the view that it was translated with, so that no address in it dangles. A request slot keeps its
/// `Iov` from request to request: the reference is taken when the view changed, not for each request. What the
/// operating system has not finished with must own the `Iov` until it has; that is the engines' business.
///
/// What is written to it is marked: by whoever copies into it at once, and where the kernel was given it to write to
/// ([`Iov::segments_to_fill`]), when it is taken off the front ([`Iov::advance`]). What is left then and may have been
/// written (the operation failed) is marked when it is emptied.
#[derive(Debug, Default)]
pub struct Iov {
    /// `first..` are not used up yet.
    segments: Vec<libc::iovec>,
    first: usize,
    len: u64,
    pin: Option<Arc<View>>,
    /// The kernel was given what is left, to write to it.
    exposed: bool,
}

/// A spare capacity that a request may keep for the next one; a longer one is given back.
const SEGMENTS_KEPT: usize = 256;

/// Segments of one request, at most: what a disk's largest request comes to behind a vIOMMU, 126 buffers of 1 MiB in pages of 4 KiB
/// of which no two follow one another and none begins where its buffer does, so 126 times 257.
const SEGMENTS_MAX: usize = 1 << 15;

impl Iov {
    /// Empties it for the next request.
    #[inline]
    pub fn clear(&mut self, marks: &mut Marks) {
        if std::mem::take(&mut self.exposed) && self.len > 0 {
            self.mark(self.len, marks);
        }
        self.segments.clear();
        self.segments.shrink_to(SEGMENTS_KEPT);
        self.first = 0;
        self.len = 0;
    }

    /// Empties it and lets go of its view, unless that is `current`. Who waits for memory that was removed finds all marks of what
    /// was written there in the log.
    pub fn unpin_unless(&mut self, current: &Arc<View>, marks: &mut Marks) {
        self.clear(marks);
        View::unpin_unless(&mut self.pin, current, marks);
    }

    /// Adds `len` bytes at `gpa`. Ranges that follow one another in host memory become one segment.
    ///
    /// # Errors
    /// A part of the range is not guest memory, or it was filled from another view so far, or it goes over the seam of two
    /// slots and there are too many segments already; it is unchanged then.
    #[inline]
    pub fn push(&mut self, view: &Arc<View>, gpa: Gpa, len: u32) -> Result<(), Unmapped> {
        let unmapped = Unmapped { addr: gpa.0, len: u64::from(len) };
        match &self.pin {
            Some(pin) if Arc::ptr_eq(pin, view) => {}
            _ if self.segments.is_empty() => self.pin = Some(view.clone()),
            _ => return Err(unmapped),
        }
        let map = view.map();
        // The usual case, without the loop: one slot holds it all.
        if let Some(host) = map.contiguous(gpa, u64::from(len)) {
            self.add(host, len as usize);
            return Ok(());
        }
        // Buffers that are in one piece are as many as the chain says.
        if self.segments.len() >= SEGMENTS_MAX || !map.contains(gpa, u64::from(len)) {
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
        // Not onto one that is used up: nobody would look at it again.
        if let Some(last) = self.segments.get_mut(self.first..).and_then(<[_]>::last_mut)
            && last.iov_base.addr() + last.iov_len == host.as_ptr().addr()
        {
            last.iov_len += len;
            return;
        }
        self.segments.push(libc::iovec { iov_base: host.as_ptr().cast(), iov_len: len });
    }

    /// Segments in it, those that are used up among them.
    #[inline]
    pub fn count(&self) -> usize {
        self.segments.len()
    }

    /// Segments that it has room for without taking more memory.
    pub fn capacity(&self) -> usize {
        self.segments.capacity()
    }

    /// Gives memory back that it does not need for this many segments, nor for those in it.
    pub fn shrink_to(&mut self, segments: usize) {
        self.segments.shrink_to(segments);
    }

    /// Bytes left in it.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether no bytes are left.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The segments left. The addresses are valid for reading and writing while this `Iov` is neither changed
    /// nor dropped, and others write there at any time.
    pub fn segments(&self) -> &[libc::iovec] {
        &self.segments[self.first..]
    }

    /// The segments left, for the kernel to write to.
    pub fn segments_to_fill(&mut self) -> &[libc::iovec] {
        self.exposed = true;
        self.segments()
    }

    /// The first `bytes` that are left were written.
    #[inline]
    fn mark(&self, bytes: u64, marks: &mut Marks) {
        if let Some(pin) = &self.pin
            && marks.is_on()
        {
            let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
            self.pieces(0, bytes, |host, _, n| marks.wrote_host(pin.map(), host, n));
        }
    }

    /// Whether each segment starts at a multiple of `align` and is a multiple of `align_len` long.
    pub fn is_aligned(&self, align: usize, align_len: usize) -> bool {
        self.segments()
            .iter()
            .all(|s| s.iov_base.addr().is_multiple_of(align) && s.iov_len.is_multiple_of(align_len))
    }

    /// Whether memory that it was translated with has lost pages, so that what was copied from it may be anything: see
    /// [`crate::fault`].
    #[inline]
    pub fn is_damaged(&self) -> bool {
        fault::damages() != 0 && self.pin.as_ref().is_some_and(|pin| pin.map().is_damaged())
    }

    /// Takes `bytes` off the front: a short transfer did that much.
    ///
    /// Takes all where fewer are left.
    #[inline]
    pub fn advance(&mut self, bytes: u64, marks: &mut Marks) {
        let mut left = bytes.min(self.len);
        if self.exposed {
            self.mark(left, marks);
        }
        self.len -= left;
        while left > 0 {
            let segment = &mut self.segments[self.first];
            let here = left.min(segment.iov_len as u64) as usize;
            segment.iov_base = segment.iov_base.cast::<u8>().wrapping_add(here).cast();
            segment.iov_len -= here;
            left -= here as u64;
            if segment.iov_len == 0 {
                self.first += 1;
            }
        }
    }

    /// Calls `each` with the host pieces of up to `len` bytes from `offset` on; how many bytes there were.
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

    /// Copies bytes out, from `offset` on; how many there were, at most `into.len()`.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> usize {
        self.pieces(offset, into.len(), |host, at, n| {
            // SAFETY: the piece lies in a segment, whose slot `pin` keeps mapped.
            unsafe { shared::read(host, &mut into[at..at + n]) }
        })
    }

    /// Copies bytes in, from `offset` on; how many fitted, at most `from.len()`.
    pub fn write(&mut self, offset: u64, from: &[u8], marks: &mut Marks) -> usize {
        self.fill(offset, from.len(), marks, |host, at, n| {
            // SAFETY: the piece lies in a segment, whose slot `pin` keeps mapped.
            unsafe { shared::write(host, &from[at..at + n]) }
        })
    }

    /// As [`Iov::pieces`], for an `each` that writes all of what it is given.
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
