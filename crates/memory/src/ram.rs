//! Memory of our own, as large as a disk, for concurrent copies.
#![expect(unsafe_code, reason = "island: mmap, munmap and racing copies")]

use crate::{Iov, Marks, shared};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::io;
use std::ptr::NonNull;

/// Anonymous memory, zero at first.
///
/// A page takes memory from its first write on. It has 2 MiB where the kernel has such pages, as QEMU
/// requests for guest memory: a lookup of a page of 4 KiB takes longer than a copy of half of it.
///
/// The memory can only be copied from and to. Several threads may copy overlapping ranges at the same time.
/// Their bytes can mix then; there is no other effect.
#[derive(Debug)]
pub struct Ram {
    base: NonNull<u8>,
    len: usize,
}

impl Ram {
    /// Makes a memory of `len` bytes.
    ///
    /// # Errors
    /// No bytes, or more than the kernel has address space for.
    pub fn new(len: u64) -> io::Result<Self> {
        let len = usize::try_from(len)
            .ok()
            .filter(|&len| len > 0 && isize::try_from(len).is_ok())
            .ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: a null hint, so the kernel chooses unused addresses.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )?
        };
        let base = NonNull::new(base.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        // Keeps the guest's data out of our core dumps. A failure is harmless.
        // SAFETY: the range was mapped above, and DONTDUMP changes no byte of it.
        let _ = unsafe { madvise(base.as_ptr().cast(), len, Advice::LinuxDontDump) };
        // SAFETY: as above; HUGEPAGE changes no byte either.
        let _ = unsafe { madvise(base.as_ptr().cast(), len, Advice::LinuxHugepage) };
        Ok(Self { base, len })
    }

    /// Returns the length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// Prefetches the first cache lines that a copy from or to `offset` needs. The processor fetches further
    /// lines itself once it sees that they are consecutive.
    #[inline]
    pub fn prefetch(&self, offset: u64) {
        const LINE: usize = 64;
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(self.len);
        for at in (start..self.len.min(start.saturating_add(8 * LINE))).step_by(LINE) {
            // SAFETY: `at` is smaller than the length of the mapping.
            shared::prefetch(unsafe { self.base.add(at) });
        }
    }

    /// Copies from `offset` on into all of `to`. Returns how many bytes there were up to the end.
    #[inline]
    pub fn copy_to(&self, offset: u64, to: &mut Iov, marks: &mut Marks) -> u64 {
        self.copy_some_to(offset, to.len(), to, marks)
    }

    /// Copies from `offset` on into the first `bytes` of `to`. Returns how many bytes there were up to the
    /// end.
    #[inline]
    pub fn copy_some_to(&self, offset: u64, bytes: u64, to: &mut Iov, marks: &mut Marks) -> u64 {
        let (start, len) = self.range(offset, bytes);
        to.fill(0, len, marks, |guest, at, n| {
            // SAFETY:
            // - `at + n` is at most `len`, and `start + len` at most the length of this mapping;
            // - the bytes lie in this mapping and in a segment of `to`, both of which are alive. They are
            //   different mappings, so they do not overlap.
            unsafe { shared::copy(self.base.add(start + at), guest, n) }
        }) as u64
    }

    /// Copies all of `from` to `offset` on. Returns how many bytes there were up to the end.
    #[inline]
    pub fn copy_from(&self, offset: u64, from: &Iov) -> u64 {
        self.copy_some_from(offset, from.len(), from)
    }

    /// Copies the first `bytes` of `from` to `offset` on. Returns how many bytes there were up to the end.
    #[inline]
    pub fn copy_some_from(&self, offset: u64, bytes: u64, from: &Iov) -> u64 {
        let (start, len) = self.range(offset, bytes);
        from.pieces(0, len, |guest, at, n| {
            // SAFETY: as in `copy_to`, with the roles exchanged.
            unsafe { shared::copy(guest, self.base.add(start + at), n) }
        }) as u64
    }

    /// Zeroes `len` bytes from `offset` on. Returns how many there were up to the end. With `release`, the
    /// kernel takes back the memory of whole pages in the range.
    pub fn zero(&self, offset: u64, len: u64, release: bool) -> u64 {
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(self.len);
        let end = start + usize::try_from(len).unwrap_or(usize::MAX).min(self.len - start);
        let page = rustix::param::page_size();
        let (first, last) = (start.next_multiple_of(page), end - end % page);
        if !release || first >= last {
            self.fill(start, end);
        } else {
            // SAFETY: `first..last` lies in the mapping, which is private and anonymous, so it reads as
            // zeroes afterwards. There are no references to its bytes.
            let released =
                unsafe { madvise(self.base.add(first).as_ptr().cast(), last - first, Advice::LinuxDontNeed) };
            self.fill(start, if released.is_ok() { first } else { last });
            self.fill(last, end);
        }
        (end - start) as u64
    }

    /// Writes zeroes from `start` to `end`.
    fn fill(&self, start: usize, end: usize) {
        const ZEROES: [u8; 4096] = [0; 4096];
        for at in (start..end).step_by(ZEROES.len()) {
            let n = ZEROES.len().min(end - at);
            // SAFETY: the callers' `end` is at most the length of the mapping, to whose bytes there are no
            // references.
            unsafe { shared::write(self.base.add(at), &ZEROES[..n]) }
        }
    }

    /// Returns the start of the range of `bytes` at `offset`, and how many of them there are up to the end.
    #[inline]
    fn range(&self, offset: u64, bytes: u64) -> (usize, usize) {
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(self.len);
        (start, usize::try_from(bytes).unwrap_or(usize::MAX).min(self.len - start))
    }
}

// SAFETY: it owns its mapping, which any thread may access, by copies only.
unsafe impl Send for Ram {}
// SAFETY: as above. Racing copies are allowed, and no reference to the bytes is ever made.
unsafe impl Sync for Ram {}

impl Drop for Ram {
    fn drop(&mut self) {
        // SAFETY: exactly the range that `mmap` returned, and no copy is running.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Gpa, Map, Slot, UserAddr, View};
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use std::sync::Arc;

    #[test]
    fn copies_both_ways_and_stops_at_the_end() {
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 1 << 16).unwrap();
        let slot = Slot::map(&file, 0, Gpa(0), UserAddr(0), 1 << 16).unwrap();
        let map = Arc::new(View::new(Map::new(vec![slot]).unwrap()));
        map.write(Gpa(0), &[1; 100], &mut Marks::off()).unwrap();
        map.write(Gpa(4096), &[2; 100], &mut Marks::off()).unwrap();
        let mut iov = Iov::default();
        iov.push(&map, Gpa(0), 100).unwrap();
        iov.push(&map, Gpa(4096), 100).unwrap();

        let ram = Ram::new(8192).unwrap();
        assert_eq!(ram.copy_from(50, &iov), 200);
        iov.clear(&mut Marks::off());
        iov.push(&map, Gpa(8192), 300).unwrap();
        assert_eq!(ram.copy_to(0, &mut iov, &mut Marks::off()), 300);
        let mut seen = [9; 300];
        map.read(Gpa(8192), &mut seen).unwrap();
        assert_eq!(seen[..50], [0; 50]);
        assert_eq!(seen[50..150], [1; 100]);
        assert_eq!(seen[150..250], [2; 100]);
        assert_eq!(seen[250..], [0; 50]);

        assert_eq!(ram.copy_from(8192 - 10, &iov), 10);
        assert_eq!(ram.copy_from(8192, &iov), 0);
        assert_eq!(ram.copy_to(u64::MAX, &mut iov, &mut Marks::off()), 0);
        for (at, len, release) in
            [(60, 20, true), (100, 8000, true), (8192 - 10, 100, false), (9000, 1, true)]
        {
            iov.clear(&mut Marks::off());
            iov.push(&map, Gpa(0), 8192).unwrap();
            map.write(Gpa(0), &[7; 8192], &mut Marks::off()).unwrap();
            assert_eq!(ram.copy_from(0, &iov), 8192);
            let there = 8192u64.saturating_sub(at).min(len);
            assert_eq!(ram.zero(at, len, release), there);
            assert_eq!(ram.copy_to(0, &mut iov, &mut Marks::off()), 8192);
            let mut seen = [0; 8192];
            map.read(Gpa(0), &mut seen).unwrap();
            let zeroes = at as usize..(at + there) as usize;
            assert!(
                seen.iter().enumerate().all(|(i, &byte)| (byte == 0) == zeroes.contains(&i)),
                "{zeroes:?}"
            );
        }
        assert!(Ram::new(0).is_err());
        assert!(Ram::new(u64::MAX).is_err());
    }
}
