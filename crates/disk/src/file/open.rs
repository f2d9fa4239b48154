//! Opens a file, and finds the requirements of direct I/O.

use super::disk::{Direct, FileDisk, Origin};
use super::missing_syscalls::MissingSyscalls;
use super::topology;
use crate::buffer_pool::{BUFFER_BYTES, BufferPool};
use crate::image_file::{ImageFile, Source, check_type, file_type, identity};
use crate::writeback::Writeback;
use crate::{Error, Limits, Options, SECTOR};
use kickless_io::{AlignedBuf, BackingFile, Owner};
use kickless_opener::{Alignment, block_facts};
use rustix::fs::{FallocateFlags, FileType, fallocate, fstat, ioctl_blksszget};
use rustix::io::{Errno, pread};
use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use tracing::Span;

/// The contents of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Contents {
    /// The bytes of the disk.
    Disk,
    /// An image in a format, or a backing image.
    Format,
}

impl FileDisk {
    /// Opens an image or a block device.
    ///
    /// [`Cache::None`](crate::Cache::None) does not require direct I/O on tmpfs and ramfs, which have no
    /// cache to avoid.
    ///
    /// # Errors
    /// One sentence for the operator.
    pub fn open(path: &Path, options: &Options) -> Result<Self, Error> {
        Self::open_source(Source::Path(path), options)
    }

    /// Opens an image or a block device by its path or its descriptor.
    ///
    /// # Errors
    /// One sentence for the operator.
    pub(crate) fn open_source(source: Source<'_>, options: &Options) -> Result<Self, Error> {
        Self::open_as(source, options, Contents::Disk)
    }

    /// Opens the file of an image in a format. It may have any length, and may be read and written beyond its
    /// end.
    ///
    /// # Errors
    /// One sentence for the operator.
    pub(crate) fn open_image(source: Source<'_>, options: &Options) -> Result<Self, Error> {
        Self::open_as(source, options, Contents::Format)
    }

    fn open_as(source: Source<'_>, options: &Options, contents: Contents) -> Result<Self, Error> {
        let (path, ImageFile { file, direct }) = (source.path(), source.open(options)?);
        let failed = |source| Error::Open { path: path.to_owned(), source };
        let stat = fstat(&file).map_err(|error| failed(error.into()))?;
        // This checks the type again, because the path may name another file by now.
        check_type(path, file_type(&stat))?;
        let device = file_type(&stat) == FileType::BlockDevice;
        let facts = device.then(|| block_facts(stat.st_rdev).unwrap_or_default());
        // The kernel opens a write-protected device for writing, and fails the writes.
        if !options.read_only && facts.as_ref().is_some_and(|facts| facts.is_protected) {
            return Err(Error::OpenForWriting { path: path.to_owned(), source: Errno::ROFS.into() });
        }
        // This returns the size of a device too.
        let bytes = (&*file).seek(SeekFrom::End(0)).map_err(failed)?;
        let is_disk = contents == Contents::Disk;
        let handed = if let Source::Handed(_, image) = source { Some(image) } else { None };
        let size = match handed.filter(|_| is_disk) {
            // A guest keeps the size that it knows.
            Some(image) => image.size.min(i64::MAX as u64),
            None => bytes,
        };
        let size = size - size % SECTOR;
        if size == 0 && is_disk {
            return Err(Error::Empty { path: path.to_owned() });
        }
        if is_disk && handed.is_none() {
            Self::warn_of_contents(path, &file, bytes);
        }
        let direct =
            direct.map(|alignment| direct_requirements(path, &file, device, alignment)).transpose()?;
        if let Some(Direct { block, .. }) = direct
            && is_disk
            && !size.is_multiple_of(block)
        {
            return Err(Error::PartialBlock { path: path.to_owned(), size, block });
        }
        let block = direct.as_ref().map(|direct| direct.block);
        let plain = Limits::plain(options.read_only);
        let limits = match &facts {
            Some(facts) => {
                let now = topology::of_device(facts, plain, size, block.or_else(|| logical_block(&file)));
                // The kernel forgets that a device can write zeroes when one of these calls fails. The guest
                // does not.
                let handed = handed.map(|image| !options.read_only && image.punches_holes);
                Limits { zeroes_may_unmap: handed.unwrap_or(now.zeroes_may_unmap), ..now }
            }
            None => {
                let can_punch =
                    || handed.map_or_else(|| can_punch_holes(&file, size), |image| image.punches_holes);
                let punches = !options.read_only && can_punch();
                topology::of_image(stat.st_blksize as u64, punches, plain)
            }
        };
        // The kernel's alignment would suffice, but a transfer that crosses fewer pages is cheaper. So this
        // is at least a page.
        let address = direct.as_ref().map_or(1, |direct| direct.address).max(rustix::param::page_size());
        let watch = || match handed {
            Some(image) => Writeback::of_witness(image.witness.take()),
            None => Writeback::watch(&file),
        };
        let writeback = (direct.is_none() && !options.read_only).then(watch);
        if let (Source::Descriptor(..), Some(false)) =
            (source, writeback.as_ref().map(Writeback::has_witness))
        {
            tracing::warn!(
                path = %path.display(),
                "the daemon cannot open this file itself, so of two flushes at the same time one may miss a write that the \
                 host's cache has lost: use cache=none, or give the daemon the right to read the file"
            );
        }
        Ok(Self {
            origin: Box::new(Origin {
                path: source.named().map(Path::to_owned),
                options: *options,
                identity: identity(&stat),
            }),
            writeback,
            backing: BackingFile::new(file.clone(), Owner::unique()),
            file,
            limits,
            size: AtomicU64::new(size),
            accessible_size: AtomicU64::new(size.min(bytes - bytes % SECTOR)),
            device,
            direct,
            pool: Arc::new(BufferPool::new(address)),
            missing_syscalls: MissingSyscalls::default(),
            span: Span::current(),
        })
    }
}

impl FileDisk {
    /// Warns of an image with a part of a sector at its end, or in a format.
    fn warn_of_contents(path: &Path, file: &File, bytes: u64) {
        let size = bytes - bytes % SECTOR;
        if size < bytes {
            tracing::warn!(
                path = %path.display(), bytes, size,
                "the length of the image is not a multiple of 512; the guest cannot reach the part of a sector at its end"
            );
        }
        Self::warn_of_format(path, file, size);
    }
}

fn logical_block(file: &File) -> Option<u64> {
    ioctl_blksszget(file).ok().map(u64::from)
}

/// Returns the requirements of direct I/O on `file`.
fn direct_requirements(
    path: &Path,
    file: &File,
    device: bool,
    alignment: Alignment,
) -> Result<Direct, Error> {
    let found = match alignment {
        Alignment::Known { memory, offset } => Some((u64::from(memory), u64::from(offset))),
        Alignment::Impossible => None,
        Alignment::Unknown => {
            let offset = if device { logical_block(file) } else { alignment_by_trial(file) };
            // The alignment of addresses is unknown then. That of offsets has always been enough for them.
            offset.map(|offset| (offset, offset))
        }
    };
    let Some((memory, offset)) = found else {
        return Err(Error::NoDirect { path: path.to_owned() });
    };
    let block = offset.max(SECTOR);
    let most = BUFFER_BYTES as u64;
    if !block.is_power_of_two() || block > most || !memory.is_power_of_two() || memory > most {
        return Err(Error::HugeBlock { path: path.to_owned(), block: block.max(memory), max: most });
    }
    Ok(Direct { block, address: memory as usize, ranges: (block > SECTOR).then(Arc::default) })
}

/// Returns whether the file system can punch holes. The test is far beyond the end, where there are no data
/// to lose.
///
/// The file may have space behind its end, for data to come. And another host may use the image: it writes
/// behind the end that this host knows.
fn can_punch_holes(file: &File, size: u64) -> bool {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let punch = |distance| fallocate(file, flags, size.next_multiple_of(1 << 20) + distance, 1 << 20);
    // Some file systems have no files of the first length.
    match punch(1 << 40) {
        Err(Errno::FBIG) => punch(1 << 32).is_ok(),
        punched => punched.is_ok(),
    }
}

/// Returns the smallest length that a read accepts, by trial.
fn alignment_by_trial(file: &File) -> Option<u64> {
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
