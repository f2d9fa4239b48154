//! Memory of this process that O_DIRECT accepts.
#![expect(unsafe_code, reason = "island: aligned allocation")]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;

/// Zeroed bytes at an aligned address. An operation transfers the *window*, which is all of it at first.
#[derive(Debug)]
pub struct AlignedBuf {
    at: NonNull<u8>,
    layout: Layout,
    window: Range<usize>,
}

impl AlignedBuf {
    /// Allocates `len` bytes at a multiple of `align`, which must be a power of two.
    ///
    /// # Errors
    /// `len` is 0, `align` is no power of two, or there is no memory.
    pub fn new(len: usize, align: usize) -> io::Result<Self> {
        let layout = Layout::from_size_align(len, align)
            .ok()
            .filter(|layout| layout.size() > 0)
            .ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: the size is not zero.
        let at = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { at, layout, window: 0..len })
    }

    /// Chooses the window that the next operation transfers: a range of the buffer, cut off at its end.
    pub fn set_window(&mut self, window: Range<usize>) {
        let end = window.end.min(self.layout.size());
        self.window = window.start.min(end)..end;
    }

    /// Returns the window that the next operation transfers.
    pub fn window(&self) -> Range<usize> {
        self.window.clone()
    }

    /// Returns the window's address and length, valid while the buffer lives.
    pub(crate) fn raw_window(&mut self) -> (*mut u8, usize) {
        // SAFETY: `set_window` keeps the start within the allocation, or at its end.
        (unsafe { self.at.add(self.window.start) }.as_ptr(), self.window.len())
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];

    /// Returns all bytes, independent of the window.
    fn deref(&self) -> &[u8] {
        // SAFETY: allocated with this size, initialised then, and owned. While the kernel writes here, an
        // engine has the buffer, so it cannot be borrowed.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.layout.size()) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes it the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.layout.size()) }
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and dropped once.
        unsafe { dealloc(self.at.as_ptr(), self.layout) }
    }
}

// SAFETY: it owns its bytes, as a `Vec<u8>` does.
unsafe impl Send for AlignedBuf {}
// SAFETY: shared references only read.
unsafe impl Sync for AlignedBuf {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aligned_zeroed_and_windowed() {
        let mut buf = AlignedBuf::new(8192, 4096).unwrap();
        assert!(buf.as_ptr().addr().is_multiple_of(4096));
        assert!(buf.iter().all(|&b| b == 0));
        buf[5000] = 7;
        buf.set_window(4096..9000);
        assert_eq!(buf.window(), 4096..8192);
        let (at, len) = buf.raw_window();
        assert_eq!((at.addr() - buf.as_ptr().addr(), len), (4096, 4096));
        buf.set_window(9000..9001);
        assert_eq!(buf.raw_window().1, 0);
    }

    #[test]
    fn nothing_and_odd_alignment_are_refused() {
        assert!(AlignedBuf::new(0, 4096).is_err());
        assert!(AlignedBuf::new(512, 3).is_err());
        assert!(AlignedBuf::new(usize::MAX, 4096).is_err());
    }
}
