//! One `mmap` of a file that the front-end shares.
#![expect(unsafe_code, reason = "island: mmap and munmap")]

use crate::error::Failure;
use crate::fault::{self, Entry, MAPPINGS, Range};
use crate::mapper::Mapper;
use crate::quota::{Charge, MAPPINGS_MAX};
use rustix::fs::{FileType, fstat, fstatfs};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// `HUGETLBFS_MAGIC` of statfs(2).
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// How many mappings there are in this process, counted for a device or not.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// One of [`COUNT`].
#[derive(Debug)]
struct Counted;

impl Counted {
    fn new() -> io::Result<Self> {
        // Relaxed: it bounds, and orders nothing. What is one too many is given back at once.
        let (before, counted) = (COUNT.fetch_add(1, Ordering::Relaxed), Self);
        if before as u64 >= MAPPINGS_MAX {
            let why = format!(
                "there are {MAPPINGS_MAX} mappings already, the most in one process: serve fewer devices by one process"
            );
            return Err(io::Error::new(io::ErrorKind::OutOfMemory, why));
        }
        Ok(counted)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        COUNT.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Which part of which file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) device: u64,
    pub(crate) inode: u64,
    /// Only of a regular file do the two name the bytes: anonymous inodes of devices share one number.
    pub(crate) regular: bool,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl Part {
    /// Whether mappings of both hold the same bytes, as far as that can be told.
    pub(crate) fn is_same(&self, other: &Part) -> bool {
        self.regular && self == other
    }
}

/// A shared, writable mapping of a part of a file. Unmapped when the last reference to it goes.
#[derive(Debug)]
pub struct Mapping {
    /// Where `mmap` put it, and how long that is; wider than the part where the offset is not aligned.
    whole: NonNull<u8>,
    whole_len: usize,
    /// First byte of the part.
    base: NonNull<u8>,
    part: Part,
    /// Where [`crate::fault`] knows it from.
    entry: &'static Entry,
    /// Somebody was told that it is damaged.
    told: AtomicBool,
    released: Released,
    _counted: Counted,
    /// Its part of its device's share.
    _charge: Option<Charge>,
}

/// Returns why the kernel maps no more. For several reasons it says the same, that there is no memory.
#[cold]
fn why_not(error: Errno) -> Failure {
    // Counted without a buffer of its size, for which there would be no mapping either.
    let count_lines = || {
        let (mut maps, mut lines, mut part) = (File::open("/proc/self/maps")?, 0, [0; 4096]);
        loop {
            match maps.read(&mut part)? {
                0 => return io::Result::Ok(lines),
                len => lines += part[..len].iter().filter(|byte| **byte == b'\n').count(),
            }
        }
    };
    let limit = || fs::read_to_string("/proc/sys/vm/max_map_count").ok()?.trim().parse::<usize>().ok();
    match (error, limit()) {
        (Errno::NOMEM, Some(limit)) if count_lines().is_ok_and(|lines| lines >= limit) => {
            let why = format!(
                "this process has {limit} mappings, all that the kernel allows: raise the sysctl vm.max_map_count, or serve \
                 fewer devices by one process"
            );
            Failure::Os(io::Error::new(io::ErrorKind::OutOfMemory, why))
        }
        _ => error.into(),
    }
}

impl Mapping {
    /// The part of `file` that a mapping of `len` bytes from `offset` would show.
    pub(crate) fn part_of(mapper: &Mapper, file: impl AsFd, offset: u64, len: u64) -> Result<Part, Failure> {
        mapper.admit(&file)?;
        let stat = fstat(&file)?;
        let needs = offset.checked_add(len).ok_or(Failure::Wraps)?;
        // Only a regular file (memfd, tmpfs, hugetlbfs) has a size that tells; a device's mmap checks for itself.
        let has = stat.st_size as u64;
        let regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        if regular && has < needs {
            return Err(Failure::TooShort { needs, has });
        }
        Ok(Part { device: stat.st_dev, inode: stat.st_ino, regular, offset, len })
    }

    /// Maps `part`, which [`Mapping::part_of`] found in `file`.
    pub(crate) fn new(mapper: &Mapper, file: impl AsFd, part: Part) -> Result<Self, Failure> {
        let counted = Counted::new().map_err(Failure::Os)?;
        // The front-end's offset need not be aligned; hugetlbfs wants both ends on huge pages.
        let fs = fstatfs(&file)?;
        let huge = fs.f_type as u64 == HUGETLBFS_MAGIC;
        let page = if huge { fs.f_bsize as u64 } else { rustix::param::page_size() as u64 };
        let head = part.offset % page;
        let len = part
            .len
            .checked_add(head)
            .and_then(|l| l.checked_next_multiple_of(page))
            .ok_or(Failure::Wraps)?;
        let whole_len =
            usize::try_from(len).ok().filter(|&l| isize::try_from(l).is_ok()).ok_or(Failure::Wraps)?;
        let charge = mapper.charge(len)?;
        // SAFETY: a null hint, so that the kernel chooses a place that nobody uses.
        let whole = unsafe {
            mmap(
                std::ptr::null_mut(),
                whole_len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                file,
                part.offset - head,
            )
        }
        .map_err(why_not)?;
        let Some(whole) = NonNull::new(whole.cast::<u8>()) else {
            return Err(Failure::Os(io::Error::from(io::ErrorKind::OutOfMemory)));
        };
        // A core dump of ours is no place for the guest's memory; where the kernel cannot leave it out, nothing breaks.
        // SAFETY: the range was mapped above, and DONTDUMP changes no byte of it.
        let _ = unsafe { madvise(whole.as_ptr().cast(), whole_len, Advice::LinuxDontDump) };
        // SAFETY: `head` < `whole_len`, for `part.len` is added to it.
        let base = unsafe { whole.add(head as usize) };
        let start = whole.as_ptr().expose_provenance();
        let entry = MAPPINGS.add(Range { start, len: whole_len, page: page as usize });
        Ok(Self {
            whole,
            whole_len,
            base,
            part,
            entry,
            told: AtomicBool::new(false),
            released: Released::default(),
            _counted: counted,
            _charge: charge,
        })
    }

    /// First byte. Valid for [`Mapping::len`] bytes as long as this mapping lives.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(crate) fn part(&self) -> Part {
        self.part
    }

    /// Bytes of the file that are mapped.
    #[expect(clippy::len_without_is_empty, reason = "a mapping is never empty")]
    pub fn len(&self) -> u64 {
        self.part.len
    }

    /// Whether pages of it were missing when somebody touched them: [`crate::fault`].
    pub fn is_damaged(&self) -> bool {
        self.entry.misses() > 0
    }

    /// Whether nobody has asked this before.
    pub(crate) fn tell(&self) -> bool {
        !self.told.swap(true, Ordering::Relaxed)
    }

    /// Lets the caller wait until this mapping is gone.
    pub fn released(&self) -> Released {
        self.released.clone()
    }
}

// SAFETY: the pointers are to shared memory that any thread may access, by copies only, while the mapping lives.
unsafe impl Send for Mapping {}
// SAFETY: as above; what changes in it are atomics.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // First, for what comes to lie there next is not ours.
        fault::remove(self.entry);
        // SAFETY: exactly the range that `mmap` returned, also where parts of it were replaced since; all users hold a reference, so this was the last.
        let unmapped = unsafe { munmap(self.whole.as_ptr().cast(), self.whole_len) };
        debug_assert!(unmapped.is_ok());
        self.released.set();
    }
}

/// Tells when a [`Mapping`] is gone: nobody uses the memory any more.
#[derive(Clone, Debug, Default)]
pub struct Released(Arc<(Mutex<bool>, Condvar)>);

impl Released {
    fn set(&self) {
        let (gone, change) = &*self.0;
        *gone.lock().unwrap_or_else(PoisonError::into_inner) = true;
        change.notify_all();
    }

    /// Waits up to `timeout`; whether the mapping is gone.
    pub fn wait(&self, timeout: Duration) -> bool {
        let (gone, change) = &*self.0;
        let gone = gone.lock().unwrap_or_else(PoisonError::into_inner);
        *change.wait_timeout_while(gone, timeout, |gone| !*gone).unwrap_or_else(PoisonError::into_inner).0
    }
}
