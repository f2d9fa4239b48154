//! One `mmap` of a file that the front-end shares.
#![expect(unsafe_code, reason = "island: mmap, and a mapping's address shared by threads")]

use crate::error::{Error, Purpose};
use crate::fault::{MAPPINGS, MappingEntry, Range};
use crate::files::Identity;
use crate::mapper::Mapper;
use crate::unmapper::{Item, Released, Remains};
use rustix::fs::{FileType, fstat, fstatfs};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, LazyLock};

/// `HUGETLBFS_MAGIC` of statfs(2).
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// A part of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FilePart {
    pub(crate) device: u64,
    pub(crate) inode: u64,
    /// Device and inode identify the bytes of regular files only. Anonymous inodes of devices share one
    /// number.
    pub(crate) regular: bool,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl FilePart {
    /// Returns whether mappings of both parts are known to hold the same bytes.
    pub(crate) fn is_same(&self, other: &FilePart) -> bool {
        self.regular && self == other
    }

    /// Returns the identity of the file if its bytes are known by it.
    fn identity(&self) -> Option<Identity> {
        self.regular.then_some((self.device, self.inode))
    }
}

/// A shared, writable mapping of a part of a file. When the last reference is gone, a thread of its device
/// unmaps it, and closes the file if it was the last mapping of it.
#[derive(Debug)]
pub struct Mapping {
    /// The first byte of the part.
    base: NonNull<u8>,
    part: FilePart,
    /// Its entry in the registry of [`crate::fault`].
    entry: &'static MappingEntry,
    /// Whether its damage was reported.
    reported: AtomicBool,
    released: Released,
    /// The whole `mmap`, which is larger than the part if the offset is not aligned. `None` while it is
    /// dropped.
    remains: Option<Remains>,
    /// The thread that unmaps it, if it is not the one that drops it.
    unmapper: Option<Sender<Item>>,
}

/// Files of /proc about the mappings of this process, which stay open.
struct MappingFiles {
    /// The list of all mappings.
    list: io::Result<File>,
    /// The largest number of mappings.
    limit: io::Result<File>,
}

static MAPPING_FILES: LazyLock<MappingFiles> = LazyLock::new(MappingFiles::open);

/// Opens the files that tell why a mapping is refused now, instead of at the first refusal. A sandbox can
/// take /proc from the process afterwards.
pub fn prepare_to_explain() {
    LazyLock::force(&MAPPING_FILES);
}

impl MappingFiles {
    #[expect(clippy::disallowed_methods, reason = "the list of mappings is that of this process")]
    fn open() -> Self {
        Self { list: File::open("/proc/self/maps"), limit: File::open("/proc/sys/vm/max_map_count") }
    }

    /// Returns the largest number of mappings. Returns `None` if it cannot be read.
    fn limit(&self) -> Option<usize> {
        let (mut text, file) = ([0; 32], self.limit.as_ref().ok()?);
        let len = file.read_at(&mut text, 0).ok()?;
        str::from_utf8(&text[..len]).ok()?.trim().parse().ok()
    }

    /// Returns the number of mappings. Returns `None` if they cannot be counted.
    fn count(&self) -> Option<usize> {
        // Counts without a buffer of the file's size, because the kernel would not map that either.
        let (mut at, mut lines, mut part, file) = (0, 0, [0; 4096], self.list.as_ref().ok()?);
        loop {
            match file.read_at(&mut part, at).ok()? {
                0 => return Some(lines),
                len => {
                    at += len as u64;
                    lines += part[..len].iter().filter(|byte| **byte == b'\n').count();
                }
            }
        }
    }
}

/// Returns why the kernel refused a mapping. The kernel reports several reasons as lack of memory.
#[cold]
fn explain_refusal(error: Errno) -> io::Error {
    match (error, MAPPING_FILES.limit()) {
        (Errno::NOMEM, Some(limit)) if MAPPING_FILES.count().is_some_and(|count| count >= limit) => {
            let why = format!(
                "this process has {limit} mappings, all that the kernel allows: raise the sysctl vm.max_map_count, or serve \
                 fewer devices by one process"
            );
            io::Error::new(io::ErrorKind::OutOfMemory, why)
        }
        _ => error.into(),
    }
}

impl Mapping {
    /// Maps `len` bytes of `file` from `offset` on, for words that are no guest memory.
    pub(crate) fn of_words(
        mapper: &Mapper,
        purpose: Purpose,
        file: impl AsFd,
        offset: u64,
        len: u64,
    ) -> Result<Self, Error> {
        if len == 0 {
            return Err(Error::Empty { purpose });
        }
        if !offset.is_multiple_of(size_of::<u64>() as u64) {
            return Err(Error::Misaligned { purpose, offset });
        }
        let part = Self::part_of(mapper, purpose, &file, offset, len)?;
        Self::new(mapper, purpose, file, part)
    }

    /// Returns the part of `file` that a mapping of `len` bytes from `offset` on would show.
    pub(crate) fn part_of(
        mapper: &Mapper,
        purpose: Purpose,
        file: impl AsFd,
        offset: u64,
        len: u64,
    ) -> Result<FilePart, Error> {
        mapper.admit(purpose, &file)?;
        let stat = fstat(&file).map_err(|error| Error::Mmap { purpose, source: error.into() })?;
        let wraps = Error::Wraps { purpose, field: "mmap offset", start: offset, len };
        let needs = offset.checked_add(len).ok_or(wraps)?;
        // Only a regular file (memfd, tmpfs, hugetlbfs) has a meaningful size. The mmap of a device checks
        // for itself.
        let has = stat.st_size as u64;
        let regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        if regular && has < needs {
            return Err(Error::FileTooShort { purpose, needs, has });
        }
        Ok(FilePart { device: stat.st_dev, inode: stat.st_ino, regular, offset, len })
    }

    /// Maps `part`, which [`Mapping::part_of`] found in `file`.
    pub(crate) fn new(
        mapper: &Mapper,
        purpose: Purpose,
        file: impl AsFd,
        part: FilePart,
    ) -> Result<Self, Error> {
        let failed = |source| Error::Mmap { purpose, source };
        // The front-end's offset need not be aligned. hugetlbfs requires that both ends lie on huge pages.
        let fs = fstatfs(&file).map_err(|error| failed(error.into()))?;
        let huge = fs.f_type as u64 == HUGETLBFS_MAGIC;
        let page = if huge { fs.f_bsize as u64 } else { rustix::param::page_size() as u64 };
        let head = part.offset % page;
        let len = part.len.checked_add(head).and_then(|len| len.checked_next_multiple_of(page));
        let len = len.filter(|len| isize::try_from(*len).is_ok());
        let len =
            len.ok_or(Error::Wraps { purpose, field: "mmap offset", start: part.offset, len: part.len })?;
        // Lossless, because it fits into isize.
        let whole_len = len as usize;
        let charges = mapper.charge(purpose, len)?;
        let unmapper = mapper.unmapper().map_err(failed)?;
        // SAFETY: a null hint, so the kernel chooses unused addresses.
        let whole = unsafe {
            mmap(
                std::ptr::null_mut(),
                whole_len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                &file,
                part.offset - head,
            )
        }
        .map_err(|error| failed(explain_refusal(error)))?;
        let whole = NonNull::new(whole.cast::<u8>());
        let whole = whole.ok_or_else(|| failed(io::ErrorKind::OutOfMemory.into()))?;
        // Keeps the guest's memory out of our core dumps. A failure is harmless.
        // SAFETY: the range was mapped above, and DONTDUMP changes no byte of it.
        let _ = unsafe { madvise(whole.as_ptr().cast(), whole_len, Advice::LinuxDontDump) };
        // SAFETY: `head` is less than `whole_len`, which is at least `head + part.len`.
        let base = unsafe { whole.add(head as usize) };
        let (start, page) = (whole.as_ptr().expose_provenance(), page as usize);
        let entry = MAPPINGS.add(Range { start, len: whole_len, page });
        let released = Released::default();
        let remains = Some(Remains {
            whole,
            whole_len,
            page,
            entry,
            file: mapper.keep(&file, part.identity()),
            charges: Some(charges),
            released: released.clone(),
        });
        Ok(Self { base, part, entry, reported: AtomicBool::new(false), released, remains, unmapper })
    }

    /// Returns the first byte. Valid for [`Mapping::len`] bytes as long as this mapping lives.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(crate) fn part(&self) -> FilePart {
        self.part
    }

    /// Returns the file. Mappings of one device have the same descriptor if their files are the same.
    ///
    /// Returns `None` if the mapper keeps no files, or has no descriptor for one more
    /// ([`files_max`](crate::quota::files_max)).
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        Some(self.remains.as_ref()?.file.as_ref()?.as_fd())
    }

    /// Returns the offset in the file of the first byte.
    pub fn offset(&self) -> u64 {
        self.part.offset
    }

    /// Returns the number of bytes of the file that are mapped.
    #[expect(clippy::len_without_is_empty, reason = "a mapping is never empty")]
    pub fn len(&self) -> u64 {
        self.part.len
    }

    /// Returns whether pages of the mapping were missing at an access: see [`crate::fault`].
    pub fn is_damaged(&self) -> bool {
        self.entry.misses() > 0
    }

    /// Returns true at the first call only. The caller then reports the damage.
    pub(crate) fn report_once(&self) -> bool {
        !self.reported.swap(true, Ordering::Relaxed)
    }

    /// Returns a handle with which the caller can wait until this mapping is unmapped.
    pub fn released(&self) -> Released {
        self.released.clone()
    }
}

// SAFETY: the pointers are to shared memory that any thread may access, by copies only, while the mapping
// lives.
unsafe impl Send for Mapping {}
// SAFETY: as above; all fields that change are atomics.
unsafe impl Sync for Mapping {}

/// A mapping with its address and length beside it, so that a look-up of a guest address follows no pointer.
#[derive(Clone, Debug)]
pub(crate) struct MappedRange {
    base: NonNull<u8>,
    len: u64,
    mapping: Arc<Mapping>,
}

impl MappedRange {
    pub(crate) fn new(mapping: Arc<Mapping>) -> Self {
        Self { base: mapping.base(), len: mapping.len(), mapping }
    }

    /// Returns the address of the first byte. Valid for [`MappedRange::len`] bytes as long as `self`.
    #[inline]
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Returns the length in bytes.
    #[inline]
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    pub(crate) fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }
}

// SAFETY: `base` is the pointer of `mapping`, which may be sent and shared.
unsafe impl Send for MappedRange {}
// SAFETY: as above.
unsafe impl Sync for MappedRange {}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.released.set_unused();
        // Without a send, the drop of the remains unmaps them here. loom does not know the unmapping thread,
        // which lives longer than a model.
        let Some(unmapper) = self.unmapper.as_ref().filter(|_| !cfg!(loom)) else { return };
        let Some(remains) = self.remains.take() else { return };
        // The thread runs as long as there is a sender, so this succeeds. Otherwise, the remains are dropped.
        let _ = unmapper.send(Item::Unmap(remains));
    }
}
