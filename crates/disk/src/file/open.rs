//! Opening a file, and finding out what direct I/O needs there.

use super::disk::{Direct, FileDisk};
use super::lacks::Lacks;
use super::topology;
use crate::buffer_pool::{BUFFER_BYTES, BufferPool};
use crate::image_file::{check_type, identity, open_file};
use crate::writeback::Writeback;
use crate::{Error, Limits, Options, SECTOR};
use kickless_io::{AlignedBuf, BackingFile, Owner};
use rustix::fs::{AtFlags, FallocateFlags, StatxFlags, fallocate, ioctl_blksszget, statx};
use rustix::io::{Errno, pread};
use std::fs::{File, Metadata};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use tracing::Span;

/// What direct I/O needs, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Alignment {
    /// Of addresses.
    memory: u64,
    /// Of offsets and lengths.
    offset: u64,
}

impl FileDisk {
    /// Opens an image or a block device.
    ///
    /// On tmpfs and ramfs, where there is no cache to avoid, [`Cache::None`](crate::Cache::None) does not insist on direct I/O.
    ///
    /// # Errors
    /// One sentence for the operator.
    pub fn open(path: &Path, options: &Options) -> Result<Self, Error> {
        let (file, direct) = open_file(path, options)?;
        let failed = |source| Error::Open { path: path.to_owned(), source };
        let meta = file.metadata().map_err(failed)?;
        // Once more, for the path may name another file by now.
        check_type(path, &meta)?;
        // The kernel lets a write-protected device be opened for writing, and fails the writes.
        if meta.file_type().is_block_device() && !options.read_only && topology::is_protected(meta.rdev()) {
            return Err(Error::OpenForWriting { path: path.to_owned(), source: Errno::ROFS.into() });
        }
        // For a device too this tells the size.
        let bytes = (&file).seek(SeekFrom::End(0)).map_err(failed)?;
        let size = bytes - bytes % SECTOR;
        if size == 0 {
            return Err(Error::Empty { path: path.to_owned() });
        }
        if size < bytes {
            tracing::warn!(
                path = %path.display(), bytes, size,
                "the length of the image is no multiple of 512; the guest cannot reach the last part of a sector"
            );
        }
        Self::warn_of_format(path, &file, size);
        let direct = if direct { Some(demands(path, &file, &meta, size)?) } else { None };
        let block = direct.as_ref().map(|direct| direct.block);
        let plain = Limits::plain(options.read_only);
        let device = meta.file_type().is_block_device();
        let limits = if device {
            topology::of_device(meta.rdev(), plain, size, block.or_else(|| logical_block(&file)))
        } else {
            topology::of_image(meta.blksize(), !options.read_only && punches(&file, size), plain)
        };
        // A page at least: what the kernel says suffices, but a transfer that crosses fewer pages is cheaper.
        let address = direct.as_ref().map_or(1, |direct| direct.address).max(rustix::param::page_size());
        let file = Arc::new(file);
        Ok(Self {
            identity: identity(&meta),
            writeback: (direct.is_none() && !options.read_only).then(|| Writeback::watch(&file)),
            backing: BackingFile::new(file.clone(), Owner::unique()),
            file,
            limits,
            size: AtomicU64::new(size),
            reach: AtomicU64::new(size),
            device,
            merge: options.merge,
            direct,
            pool: Arc::new(BufferPool::new(address)),
            lacks: Lacks::default(),
            span: Span::current(),
        })
    }
}

fn logical_block(file: &File) -> Option<u64> {
    ioctl_blksszget(file).ok().map(u64::from)
}

/// What direct I/O demands of requests to `file`.
fn demands(path: &Path, file: &File, meta: &Metadata, size: u64) -> Result<Direct, Error> {
    let device = meta.file_type().is_block_device();
    let found = match told(file) {
        Some(Ok(alignment)) => Some(alignment),
        Some(Err(())) => None,
        None => {
            let offset = if device { logical_block(file) } else { tried(file) };
            // What an address needs is not known then; an offset's need has been enough everywhere.
            offset.map(|offset| Alignment { memory: offset, offset })
        }
    };
    let Some(Alignment { memory, offset }) = found else {
        return Err(Error::NoDirect { path: path.to_owned() });
    };
    let block = offset.max(SECTOR);
    let most = BUFFER_BYTES as u64;
    if !block.is_power_of_two() || block > most || !memory.is_power_of_two() || memory > most {
        return Err(Error::HugeBlock { path: path.to_owned(), block: block.max(memory), max: most });
    }
    if !size.is_multiple_of(block) {
        return Err(Error::PartialBlock { path: path.to_owned(), size, block });
    }
    Ok(Direct { block, address: memory as usize, ranges: (block > SECTOR).then(Arc::default) })
}

/// Whether the file system gives the space of holes back: tried behind the end, where there is nothing to lose.
fn punches(file: &File, size: u64) -> bool {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(file, flags, size.next_multiple_of(1 << 20), 1 << 20).is_ok()
}

/// What the kernel says (from 6.1 on, where the file system does); `Err` where it says that direct I/O is
/// impossible.
fn told(file: &File) -> Option<Result<Alignment, ()>> {
    let stat = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    if stat.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return None;
    }
    let (memory, offset) = (u64::from(stat.stx_dio_mem_align), u64::from(stat.stx_dio_offset_align));
    Some(if memory == 0 || offset == 0 { Err(()) } else { Ok(Alignment { memory, offset }) })
}

/// The smallest length that a read accepts, by trying.
fn tried(file: &File) -> Option<u64> {
    let mut buffer = AlignedBuf::new(64 << 10, 64 << 10).ok()?;
    [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536].into_iter().find_map(|len| {
        loop {
            match pread(file, &mut buffer[..len], 0) {
                Err(Errno::INTR) => {}
                Err(_) => break None,
                Ok(_) => break Some(len as u64),
            }
        }
    })
}
