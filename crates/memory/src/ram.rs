//! Memory of our own, as large as a disk, for concurrent copies.
#![expect(unsafe_code, reason = "island: mmap, munmap and racing copies")]

use crate::error::Purpose;
use crate::mapping::Mapping;
use crate::{Error, Iov, Mapper, Marks, fault, shared};
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate,
    memfd_create,
};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;

/// Bytes that are copied into a file at a time.
const CHUNK: usize = 64 << 10;

/// Memory of this process, zero at first.
///
/// A page takes memory from its first write on. It has 2 MiB where the kernel has such pages, as QEMU
/// requests for guest memory: a lookup of a page of 4 KiB takes longer than a copy of half of it.
///
/// The memory is anonymous. [`Ram::share`] copies it into a file when another process is to have it. It is
/// not in a file from the start, for two reasons. By default the kernel has no pages of 2 MiB for such files
/// (`shmem_enabled`), and a copy of 4 KiB takes 1.2 to 1.3 times as long without them. And a page of a file
/// takes memory from its first read on.
///
/// The memory can only be copied from and to. Several threads may copy overlapping ranges at the same time.
/// Their bytes can mix then; there is no other effect.
#[derive(Debug)]
pub struct Ram {
    base: NonNull<u8>,
    len: usize,
    /// The file that the memory is of, unless it is anonymous.
    shared: Option<SharedRam>,
}

/// A file, and its only mapping in this process.
#[derive(Debug)]
struct SharedRam {
    file: File,
    mapping: Mapping,
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
        Ok(Self { base, len, shared: None })
    }

    /// Maps the memory that another process has shared by [`Ram::share`].
    ///
    /// # Errors
    /// The file can be resized or has no bytes, or the kernel refuses to map it.
    pub fn of_file(file: OwnedFd) -> io::Result<Self> {
        let seals = fcntl_get_seals(&file)?;
        if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let (mapper, len) = (Mapper::of_process(), fstat(&file)?.st_size as u64);
        let mapping =
            Mapping::of_words(&mapper, Purpose::Ram, &file, 0, len).map_err(|error| match error {
                Error::Mmap { source, .. } => source,
                error => io::Error::other(error),
            })?;
        // Lossless, because the mapping fits into isize.
        let (base, len) = (mapping.base(), len as usize);
        // SAFETY: the mapping has `len` bytes, and HUGEPAGE changes none of them.
        let _ = unsafe { madvise(base.as_ptr().cast(), len, Advice::LinuxHugepage) };
        Ok(Self { base, len, shared: Some(SharedRam { file: file.into(), mapping }) })
    }

    /// Returns a file with the bytes of this memory. If the memory is of a file, returns a duplicate of its
    /// descriptor. Otherwise makes a file and copies the memory into it. The bytes that were written take
    /// memory twice then, and a GiB of them up to a second.
    ///
    /// The caller makes sure that nothing writes to this memory meanwhile. A copy lacks later writes.
    ///
    /// # Errors
    /// There is no free descriptor, or too little memory.
    pub fn share(&self) -> io::Result<OwnedFd> {
        if let Some(shared) = &self.shared {
            return shared.file.try_clone().map(OwnedFd::from);
        }
        let file = memfd_create("kickless-mem", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, self.len())?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let file = File::from(file);
        let (zeroes, mut chunk) = (vec![0; CHUNK], vec![0; CHUNK]);
        for at in (0..self.len).step_by(CHUNK) {
            let n = CHUNK.min(self.len - at);
            // SAFETY: `at + n` is at most the length of this mapping, and `n` that of the chunk, which is no
            // part of it.
            unsafe { shared::copy(self.base.add(at), NonNull::from(&mut *chunk).cast(), n) };
            // Zeroes take no memory in the file.
            if chunk[..n] != zeroes[..n] {
                file.write_all_at(&chunk[..n], at as u64)?;
            }
        }
        Ok(file.into())
    }

    /// Returns whether this memory is of a file, so that [`Ram::share`] copies nothing.
    pub fn is_of_file(&self) -> bool {
        self.shared.is_some()
    }

    /// Returns whether bytes were lost, because the kernel had no memory for a page of the file.
    #[inline]
    pub fn is_damaged(&self) -> bool {
        fault::damages() != 0 && self.shared.as_ref().is_some_and(|shared| shared.mapping.is_damaged())
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
            self.fill(start, if self.release(first, last) { first } else { last });
            self.fill(last, end);
        }
        (end - start) as u64
    }

    /// Frees the whole pages from `first` to `last`, which read as zeroes then. Returns whether that worked.
    fn release(&self, first: usize, last: usize) -> bool {
        let released = match &self.shared {
            // SAFETY: `first..last` lies in the mapping, which is private and anonymous, so it reads as
            // zeroes afterwards. There are no references to its bytes.
            None => unsafe {
                madvise(self.base.add(first).as_ptr().cast(), last - first, Advice::LinuxDontNeed)
            },
            Some(SharedRam { file, .. }) => {
                let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                fallocate(file.as_fd(), hole, first as u64, (last - first) as u64)
            }
        };
        released.is_ok()
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
        // A mapping of a file unmaps itself.
        if self.shared.is_none() {
            // SAFETY: exactly the range that `mmap` returned, and no copy is running.
            let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
            debug_assert!(unmapped.is_ok());
        }
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

    /// Returns 8 KiB of guest memory.
    fn guest() -> Arc<View> {
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 8192).unwrap();
        let slot = Slot::map(&file, 0, Gpa(0), UserAddr(0), 8192).unwrap();
        Arc::new(View::new(Map::new(vec![slot]).unwrap()))
    }

    /// Writes 8 KiB of `byte` to `ram` at `at`.
    fn write(ram: &Ram, at: u64, byte: u8) {
        let (map, mut iov) = (guest(), Iov::default());
        map.write(Gpa(0), &[byte; 8192], &mut Marks::off()).unwrap();
        iov.push(&map, Gpa(0), 8192).unwrap();
        assert_eq!(ram.copy_from(at, &iov), 8192);
    }

    /// Returns 8 KiB of `ram` from `at` on.
    fn read(ram: &Ram, at: u64) -> Vec<u8> {
        let (map, mut iov, mut bytes) = (guest(), Iov::default(), vec![9; 8192]);
        iov.push(&map, Gpa(0), 8192).unwrap();
        assert_eq!(ram.copy_to(at, &mut iov, &mut Marks::off()), 8192);
        map.read(Gpa(0), &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn memory_passes_to_another_process() {
        const LEN: u64 = 3 * CHUNK as u64 + 4096;
        let ram = Ram::new(LEN).unwrap();
        write(&ram, 8192, 1);
        write(&ram, LEN - 8192, 2);
        let file = ram.share().unwrap();
        let there = fstat(&file).unwrap();
        assert_eq!((there.st_size as u64, there.st_blocks), (LEN, 2 * CHUNK as i64 / 512 + 8));
        assert!(ftruncate(&file, 4096).is_err() && ftruncate(&file, LEN + 4096).is_err());

        // The second process, and a third one to which that one gives it.
        let second = Ram::of_file(file).unwrap();
        assert_eq!(second.len(), LEN);
        assert_eq!(read(&second, 8192), [1; 8192]);
        assert_eq!(read(&second, LEN - 8192), [2; 8192]);
        assert_eq!(read(&second, 16384), [0; 8192]);
        let third = Ram::of_file(second.share().unwrap()).unwrap();
        write(&third, 16384, 3);
        assert_eq!(read(&second, 16384), [3; 8192], "the second hand-over copies nothing");
        assert_eq!(read(&ram, 16384), [0; 8192], "the memory of the first is its own");
        let blocks = || fstat(second.share().unwrap()).unwrap().st_blocks;
        let before = blocks();
        assert_eq!(third.zero(8192, 8192, true), 8192);
        assert_eq!(blocks(), before - 16, "released pages take memory");
        assert_eq!(read(&second, 8192), [0; 8192]);
    }

    #[test]
    fn files_that_can_be_resized_are_refused() {
        let file = |len, seals| {
            let file = memfd_create("lie", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
            ftruncate(&file, len).unwrap();
            fcntl_add_seals(&file, seals).unwrap();
            Ram::of_file(file).map(|ram| ram.len())
        };
        let fixed = SealFlags::SHRINK | SealFlags::GROW;
        assert_eq!(file(4096, fixed).unwrap(), 4096);
        for (len, seals) in
            [(4096, SealFlags::SHRINK), (4096, SealFlags::GROW), (4096, fixed | SealFlags::WRITE), (0, fixed)]
        {
            assert!(file(len, seals).is_err(), "{len} {seals:?}");
        }
        assert!(Ram::of_file(File::open("/dev/zero").unwrap().into()).is_err());
    }
}
