//! Images in QEMU's copy-on-write format, through the library `imago`.
//!
//! The operator says that an image has this format, never its contents. Otherwise, a guest could write the
//! beginning of such an image, with the name of any file of the host in it, to a raw disk. For the same
//! reason, an image must state the format of its backing image. Only files with images are opened because an
//! image names them.
//!
//! Before a request is answered, the tables that it has changed are written to the file, though not to stable
//! storage. So the file has the data of all answered requests if the process is killed. But the file is not
//! consistent at every moment. If a request needs a new cluster for a level 2 table, `imago` 0.2.6 writes the
//! reference to that cluster before its reference count. A process killed in between leaves an image with
//! errors (`qemu-img check`: `refcount=0 reference=1`), and later writes use the cluster a second time. So
//! opening a writable image logs a warning.

mod blocking;
mod chain;
mod check;
mod copy;
mod decode;
pub(crate) mod disk;
mod extents;
mod format;
#[cfg(fuzzing)]
pub mod fuzzing;
mod layer;
mod open;
mod own;
mod own_buffers;
#[allow(dead_code, reason = "the disk still uses the library")]
mod pins;
#[cfg(test)]
mod qemu;
mod read;
#[cfg(test)]
mod sim;
#[allow(dead_code, reason = "the disk still uses the library")]
mod slices;
#[allow(dead_code, reason = "the disk still uses the library")]
mod tables;
mod threads;
mod write;

use crate::catch::catch;
use crate::control::DiskControl;
use crate::image_file::{identity, open_file};
use crate::library::Library;
use crate::offload::{Offload, OffloadKind, OffloadOp};
use crate::writeback::Writeback;
use crate::{Error, IoError, Limits, Options, RangeLimits, SECTOR};
use chain::Access;
use imago::Mapping;
use kickless_io::Errno;
pub(crate) use read::STEP_BYTES;
use rustix::fs::{FallocateFlags, fallocate};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use threads::Threads;

/// The largest discard or write-zeroes request in bytes. No other request runs meanwhile.
const RANGE_MAX: u64 = 1 << 30;

/// The bytes of it to do at a time, because their places in the file are listed. It is a multiple of any
/// cluster, which has at most 2 MiB.
const PUNCHED_MAX: u64 = 64 << 20;

/// The number of zeroes to write at a time.
const ZEROES: usize = 16 << 10;

/// An image, and the threads for the library's blocking calls.
#[derive(Debug)]
pub(crate) struct Qcow2 {
    threads: Threads,
    image: Arc<Image>,
    identity: String,
}

/// The state that the threads share. Reads and writes share the lock; operations that change clusters hold it
/// exclusively.
#[derive(Debug)]
struct Image {
    path: PathBuf,
    file: File,
    /// The file is open for direct I/O.
    direct: bool,
    options: Options,
    /// The open image. `None` until it is needed, and while it belongs to another host.
    access: RwLock<Option<Access>>,
    /// The backing files of the last open.
    under: Mutex<Vec<File>>,
    /// `None` if no writes go through the host's cache.
    writeback: Option<Writeback>,
    /// The number of requests that may have changed tables that are not in the file yet: those in progress,
    /// and those that have failed since the image was opened.
    unwritten: AtomicUsize,
}

impl Qcow2 {
    /// Opens an image and checks it without writing to it, because another process may still use it.
    ///
    /// # Errors
    /// One sentence for the operator.
    pub(crate) fn open(path: &Path, options: &Options) -> Result<(Self, Arc<Offload>), Error> {
        let (file, direct) = open_file(path, options)?;
        let failed = |source| Error::Library { disk: format!("qcow2:{}", path.display()), source };
        let identity = identity(&file.metadata().map_err(failed)?);
        let (access, under) = (RwLock::default(), Mutex::default());
        let writeback = (!direct && !options.read_only).then(|| Writeback::watch(&file));
        let (path, options, unwritten) = (path.to_owned(), *options, AtomicUsize::new(0));
        let image = Image { path, file, direct, options, access, under, writeback, unwritten };
        let seen = image.open(false).map_err(failed)?;
        let size = seen.size() - seen.size() % SECTOR;
        if size == 0 || size > i64::MAX as u64 {
            return Err(failed(io::Error::other(Error::Size(seen.size()))));
        }
        let limits = limits(&seen, image.options.read_only);
        drop(seen);
        if !options.read_only {
            tracing::warn!(
                image = %image.path.display(),
                "a qcow2 image can become corrupt if this process is killed, or the host crashes, during a write: \
                 run `qemu-img check` before using it again, and use a raw image for data that must not be lost"
            );
        }
        let image = Arc::new(image);
        let theirs = image.clone();
        let threads = Threads::start("qcow2", move |op| theirs.perform(op)).map_err(failed)?;
        Ok((Self { threads, image, identity }, Offload::new(limits, size, false)))
    }
}

impl DiskControl for Qcow2 {
    fn identity(&self) -> &str {
        &self.identity
    }

    fn file(&self) -> Option<&File> {
        Some(&self.image.file)
    }

    /// Returns the files of the backing images, which nothing may write to.
    fn backing_files(&self) -> io::Result<Vec<File>> {
        let under = self.image.under.lock().unwrap_or_else(PoisonError::into_inner);
        under.iter().map(File::try_clone).collect()
    }

    /// Writes all tables to the file, and closes the image.
    fn write_back(&self) -> io::Result<()> {
        let mut access = self.image.access.write().unwrap_or_else(PoisonError::into_inner);
        match access.take() {
            Some(access) => self.image.flush(&access),
            None => Ok(()),
        }
    }

    /// Reads the image's tables again, because another host may have written since.
    fn reload(&self) -> io::Result<()> {
        let mut access = self.image.access.write().unwrap_or_else(PoisonError::into_inner);
        *access = None;
        *access = Some(self.image.open(!self.image.options.read_only)?);
        Ok(())
    }

    // The files are on this machine, so every request ends without help.
}

impl Library for Qcow2 {
    fn scheme(&self) -> &'static str {
        "qcow2:"
    }

    fn submit(&self, op: OffloadOp) {
        self.threads.submit(op);
    }
}

fn limits(access: &Access, read_only: bool) -> Limits {
    // Old images support neither zero clusters nor discards.
    let clusters = access.inner().zero_granularity().filter(|_| !read_only);
    let ranges = clusters.map(|cluster| RangeLimits::bytes(RANGE_MAX, cluster));
    Limits {
        discard: ranges,
        write_zeroes: ranges.map(|ranges| RangeLimits { alignment: 1, ..ranges }),
        zeroes_may_unmap: ranges.is_some(),
        ..Limits::plain(read_only)
    }
}

impl Image {
    fn open(&self, writable: bool) -> io::Result<Access> {
        let file = self.file.try_clone()?;
        // An image can contain anything. A panic of the library about it must not end the process.
        let cache = self.options.cache;
        let opened = catch(|| chain::open(&self.path, file, self.direct, writable, cache));
        let (access, under) =
            opened.unwrap_or_else(|_| Err(io::Error::other("the library panicked on it")))?;
        *self.under.lock().unwrap_or_else(PoisonError::into_inner) = under;
        self.unwritten.store(0, Ordering::Relaxed);
        Ok(access)
    }

    /// Writes everything to stable storage.
    fn flush(&self, access: &Access) -> io::Result<()> {
        access.flush()?;
        let synced = access.sync();
        match &self.writeback {
            Some(writeback) => Ok(writeback.flushed(synced.map_err(|error| errno_of(&error)))?),
            None => synced,
        }
    }

    /// Runs an operation.
    fn perform(&self, op: &mut OffloadOp) -> Result<(), IoError> {
        let (kind, at, len) = (op.kind, op.at, op.len);
        let result = match kind {
            OffloadKind::Read => self.with_shared(|access| access.read(op.bytes_mut(), at)),
            OffloadKind::Write { .. } => self.with_shared(|access| {
                if is_allocated(access, at, len)? {
                    access.write(op.bytes(), at)?;
                    // The data may be in a cluster whose table another request has still to write.
                    return if self.unwritten.load(Ordering::Acquire) == 0 { Ok(()) } else { access.flush() };
                }
                self.unwritten.fetch_add(1, Ordering::Relaxed);
                access.write(op.bytes(), at)?;
                access.flush()?;
                self.unwritten.fetch_sub(1, Ordering::Release);
                Ok(())
            }),
            OffloadKind::Flush => self.with_shared(|access| self.flush(access)),
            OffloadKind::Discard { .. } => self.deallocate(at, len, Access::discard_to_any),
            OffloadKind::Zeroes { unmap: true, .. } => self.deallocate(at, len, |access, at, len| {
                zero(access, at, len, |access, at, len| access.discard_to_zero(at, len))
            }),
            OffloadKind::Zeroes { unmap: false, .. } => self.with_exclusive(|access| {
                zero(access, at, len, |access, at, len| access.write_zeroes(at, len))?;
                access.flush()
            }),
        };
        if result.is_err() && matches!(kind, OffloadKind::Discard { .. } | OffloadKind::Zeroes { .. }) {
            self.unwritten.fetch_add(1, Ordering::Relaxed);
        }
        result.map_err(|error| {
            tracing::debug!(image = %self.path.display(), ?kind, at, len, %error, "the library fails a request");
            IoError::Os(errno_of(&error))
        })
    }

    /// Discards clusters with `discard`, and frees their space in the file. The library itself would keep
    /// that space for this image.
    fn deallocate(
        &self,
        mut at: u64,
        len: u64,
        discard: fn(&mut Access, u64, u64) -> io::Result<()>,
    ) -> io::Result<()> {
        let end = at + len;
        while at < end {
            // The pieces do not split a cluster, because neither part would be discarded.
            let here = (end - at).min(PUNCHED_MAX - at % PUNCHED_MAX);
            self.with_exclusive(|access| {
                let holes = cluster_ranges(access, at, here)?;
                discard(access, at, here)?;
                access.flush()?;
                // Nothing in the image refers to these clusters any more. The lock keeps other requests from
                // using them before it is released.
                for Range { start, end } in holes {
                    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                    // If the file system cannot punch holes, the clusters stay available to the image.
                    let _ = fallocate(&self.file, flags, start, end - start);
                }
                Ok(())
            })?;
            at += here;
        }
        Ok(())
    }

    /// Runs `work` together with other requests.
    fn with_shared(&self, mut work: impl FnMut(&Access) -> io::Result<()>) -> io::Result<()> {
        loop {
            let access = self.access.read().unwrap_or_else(PoisonError::into_inner);
            if let Some(access) = &*access {
                return work(access);
            }
            drop(access);
            self.with_exclusive(|_| Ok(()))?;
        }
    }

    /// Runs `work` while no other request runs.
    fn with_exclusive(&self, work: impl FnOnce(&mut Access) -> io::Result<()>) -> io::Result<()> {
        let mut access = self.access.write().unwrap_or_else(PoisonError::into_inner);
        let access = match &mut *access {
            Some(access) => access,
            none => none.insert(self.open(!self.options.read_only)?),
        };
        work(access)
    }
}

fn errno_of(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
}

/// Zeroes a range: whole clusters by `clusters`, and parts of clusters by writing zeroes.
///
/// The library's own method for parts fails on an image that is shorter than a cluster (`imago` 0.2.6,
/// `soft_ensure_zero`).
fn zero(
    access: &mut Access,
    at: u64,
    len: u64,
    clusters: impl FnOnce(&mut Access, u64, u64) -> io::Result<()>,
) -> io::Result<()> {
    let (cluster, end, size) =
        (access.inner().zero_granularity().unwrap_or(u64::MAX), at + len, access.size());
    let first = at.checked_next_multiple_of(cluster).unwrap_or(end).min(end);
    // The last cluster may be cut by the end of the image.
    let last = if end == size { end } else { (end - end % cluster).max(first) };
    write_zeroes(access, at..first)?;
    if first < last {
        clusters(access, first, last - first)?;
    }
    write_zeroes(access, last..end)
}

fn write_zeroes(access: &Access, range: Range<u64>) -> io::Result<()> {
    let zeroes = [0; ZEROES];
    let mut at = range.start;
    while at < range.end {
        let here = (range.end - at).min(ZEROES as u64);
        access.write(&zeroes[..here as usize], at)?;
        at += here;
    }
    Ok(())
}

/// Returns the places in the file of the whole clusters of a range, if only this range uses them.
fn cluster_ranges(access: &Access, at: u64, len: u64) -> io::Result<Vec<Range<u64>>> {
    let mut places: Vec<Range<u64>> = Vec::new();
    let Some(cluster) = access.inner().zero_granularity() else { return Ok(places) };
    let (mut at, end) = (at.next_multiple_of(cluster), (at + len) / cluster * cluster);
    while at < end {
        let (mapping, here) = access.get_mapping(at, end - at)?;
        if here == 0 {
            break;
        }
        if let Mapping::Raw { writable: true, offset, .. } = mapping {
            match places.last_mut() {
                Some(last) if last.end == offset => last.end += here,
                _ => places.push(offset..offset + here),
            }
        }
        at += here;
    }
    Ok(places)
}

/// Returns whether all of a range can be overwritten in place, so that no table of the image changes.
fn is_allocated(access: &Access, mut at: u64, len: u64) -> io::Result<bool> {
    let end = at + len;
    while at < end {
        match access.get_mapping(at, end - at)? {
            (Mapping::Raw { writable: true, .. }, here) if here > 0 => at += here,
            _ => return Ok(false),
        }
    }
    Ok(true)
}
