//! Opens an image and its backing images.

use super::blocking::BlockingFile;
use super::budget::cache_sizes;
use super::decoder::Decoder;
use super::layer::{Chain, Layer, RawLayer};
use super::opened::{OpenedImage, OpenedLayer};
use crate::image_file::Source;
use crate::lock::{ImageLock, LockError, REPLACED_MAX};
use crate::{Cache, FileDisk, Options, SECTOR};
use kickless_opener::descriptor_name;
use kickless_qcow2::{
    Backing, BackingFormat, BadImage, Header, HeaderChange, ReadImage, WINDOW, WriteImage, read_table,
    repair, snapshot_tables, used_bytes,
};
use rustix::fs::fstat;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// The largest number of images under the image.
const BACKING_MAX: usize = 64;
/// The largest number of bytes of all L1 tables of a chain. One image has at most 32 MiB.
const L1_BYTES_MAX: u64 = 256 << 20;
/// The time between two lines in the log about a repair.
const PROGRESS: Duration = Duration::from_secs(10);

/// The error of a backing image.
#[derive(Debug, thiserror::Error)]
#[error("its backing image {name:?}: {error}")]
struct BackingError {
    name: String,
    error: io::Error,
}

/// The error of a backing image that another program uses.
#[derive(Debug, thiserror::Error)]
#[error("it cannot be locked: {0}")]
struct CannotBeLocked(LockError);

impl BackingError {
    /// Makes the error. Only the innermost image is named.
    fn said(name: &str, error: io::Error) -> io::Error {
        if error.get_ref().is_some_and(|inner| inner.is::<Self>()) {
            return error;
        }
        io::Error::other(Self { name: name.to_owned(), error })
    }
}

fn bad(error: BadImage) -> io::Error {
    io::Error::other(error)
}

/// Reads the header of an image. Returns its first cluster too.
pub(super) fn header(file: &FileDisk) -> io::Result<(Header, Vec<u8>)> {
    let blocking = BlockingFile(file);
    let bytes = file.bytes()?;
    let mut first = vec![0; bytes.min(SECTOR) as usize];
    blocking.read(0, &mut first)?;
    if first.len() < 24 {
        return Err(bad(if first.starts_with(b"QFI\xfb") { BadImage::Short } else { BadImage::Magic }));
    }
    let cluster = Header::first_cluster(&first).map_err(bad)?;
    first.resize(cluster.min(bytes) as usize, 0);
    blocking.read(0, &mut first)?;
    let header = Header::parse(&first, bytes).map_err(bad)?;
    Ok((header, first))
}

/// Opens the file of an image, and reads its header. What the host's cache has of it is not believed, because
/// another host may have written since.
///
/// A file with clusters or subclusters that are smaller than a block of direct I/O is opened through the page
/// cache. So tables and data never share a block.
pub(super) fn open_file(source: Source<'_>, options: &Options) -> io::Result<(FileDisk, Header)> {
    let file = FileDisk::open_image(source, options).map_err(io::Error::other)?;
    file.drop_cache();
    let (header, _) = header(&file)?;
    if is_fit(&file, &header) {
        return Ok((file, header));
    }
    tracing::info!(
        path = %source.path().display(), cluster = header.geometry.cluster(), block = file.unit(),
        "the image has smaller clusters than direct I/O can transfer: the host's cache is used"
    );
    let options = Options { cache: Cache::Writeback, ..*options };
    Ok((FileDisk::open_image(source, &options).map_err(io::Error::other)?, header))
}

/// Returns whether the file transfers units that are small enough for the image in it.
pub(super) fn is_fit(file: &FileDisk, header: &Header) -> bool {
    header.geometry.subcluster() >= file.unit()
}

/// The images under an image.
#[derive(Clone, Copy, Debug)]
pub(super) enum Under<'a> {
    /// The images that have the names now. Another program or host may have written to each image of the
    /// chain. `locks`: each is locked before it is read.
    Named { locks: bool },
    /// These files, the upper ones first. Nothing was written to the chain since a process of this host
    /// closed it, and nothing is to be written.
    Open(&'a [Arc<FileDisk>]),
}

/// Opens the image in `file`, and its backing images.
///
/// Nothing of images that are found by name is read from the host's cache as it was before, and the locks of
/// backing images are returned. A writable image is prepared then: repaired if that is necessary, and without
/// the features that its writer must keep up.
pub(super) fn chain(
    path: &Path,
    file: &Arc<FileDisk>,
    options: &Options,
    under: Under<'_>,
    decoder: &Arc<Decoder>,
) -> io::Result<(Chain, Vec<ImageLock>)> {
    let due = Arc::new(AtomicBool::new(false));
    match under {
        Under::Named { .. } => {
            file.drop_cache();
            if !options.read_only {
                prepare(path, file)?;
            }
        }
        Under::Open(_) if options.read_only => {}
        Under::Open(_) => check_closed(file)?,
    }
    let (layers, seen, locks) = (Vec::new(), Vec::new(), Vec::new());
    let mut opening = Opening { options, layers, under, locks, seen, l1_bytes: 0 };
    let mut backing = opening.image(file.clone(), !options.read_only)?;
    let mut path = path.to_owned();
    while let Some(under) = backing {
        let name = String::from_utf8_lossy(&under.name).into_owned();
        (path, backing) = opening.backing(&path, &under).map_err(|error| BackingError::said(&name, error))?;
    }
    let Opening { layers, under, locks, .. } = opening;
    if let Under::Open([_, ..]) = under {
        return Err(io::Error::other("it has fewer backing images than before"));
    }
    let tables: Vec<_> = layers.iter().filter_map(OpenedLayer::tables).collect();
    let mut cache_sizes = cache_sizes(options.cache_size, &tables).into_iter();
    let layers = layers.into_iter().map(|layer| match layer {
        OpenedLayer::Raw(raw) => Layer::Raw(raw),
        OpenedLayer::Qcow2(image) => Layer::Qcow2(image.layer(cache_sizes.next().unwrap_or(0), &due)),
    });
    Ok((Chain { layers: layers.collect(), due, decoder: decoder.clone() }, locks))
}

/// Checks that a process of this program has closed the image.
fn check_closed(file: &FileDisk) -> io::Result<()> {
    let (header, _) = header(file)?;
    if header.is_corrupt() {
        return Err(bad(BadImage::Corrupt));
    }
    match header.is_dirty() || header.autoclear != 0 {
        true => Err(io::Error::other("it was not closed before it was handed over")),
        false => Ok(()),
    }
}

/// Repairs an image that was not closed, and gives up features that this program does not keep up.
fn prepare(path: &Path, file: &FileDisk) -> io::Result<()> {
    let (mut header, mut first) = self::header(file)?;
    if header.is_corrupt() {
        return Err(bad(BadImage::Corrupt));
    }
    let blocking = BlockingFile(file);
    let path = path.display();
    if header.is_dirty() {
        tracing::info!(%path, "the image was not closed: its reference counts are repaired");
        let mut said = Instant::now();
        let report = repair(&blocking, WINDOW, &mut |done, all| {
            if said.elapsed() >= PROGRESS {
                said = Instant::now();
                tracing::info!(%path, done, all, "repairing the reference counts of the image");
            }
        })
        .map_err(io::Error::other)?;
        tracing::info!(%path, ?report, "the reference counts of the image are repaired");
        if report.bad + report.overlaps > 0 {
            tracing::warn!(
                %path, entries = report.bad, overlaps = report.overlaps,
                "some entries of the image's tables cannot be true, and requests that need them fail: repair it \
                 with `qemu-img check -r all`"
            );
        }
        (header, first) = self::header(file)?;
    }
    if header.autoclear != 0 {
        if let Some(bitmaps) = header.bitmaps {
            tracing::warn!(
                %path, bitmaps = bitmaps.count,
                "the dirty bitmaps of the image are given up, because they are not kept up"
            );
        }
        HeaderChange::ClearAutoclear.apply(&mut first);
        blocking.write(0, &first[..first.len().min(SECTOR as usize)])?;
        blocking.sync()?;
    }
    Ok(())
}

/// A chain while it is opened.
struct Opening<'a> {
    options: &'a Options,
    layers: Vec<OpenedLayer>,
    /// The images that are still to be opened.
    under: Under<'a>,
    /// The locks of the backing images.
    locks: Vec<ImageLock>,
    /// The device and the inode of each file.
    seen: Vec<(u64, u64)>,
    /// The bytes of the L1 tables so far.
    l1_bytes: u64,
}

impl Opening<'_> {
    /// Adds the image in `file`. Returns its backing image.
    fn image(&mut self, file: Arc<FileDisk>, writable: bool) -> io::Result<Option<Backing>> {
        self.check_loop(&file)?;
        let (header, first) = header(&file)?;
        if !is_fit(&file, &header) {
            return Err(io::Error::other("its clusters have just become smaller: try again"));
        }
        let first = if writable { first } else { Vec::new() };
        self.l1_bytes += header.l1.entries * 8;
        if self.l1_bytes > L1_BYTES_MAX {
            return Err(io::Error::other("the L1 tables of the chain are too large together"));
        }
        let blocking = BlockingFile(&file);
        file.accept_size()?;
        let file_bytes = file.bytes()?;
        let others = snapshot_tables(&blocking, &header)?;
        let refcount_table = if writable { read_table(&blocking, header.refcounts)? } else { Vec::new() };
        // A device is longer than its image.
        let used_bytes = match file.is_device() && writable {
            true => used_bytes(&blocking, &header, &refcount_table)?.min(file_bytes),
            false => file_bytes,
        };
        let l1 = read_table(&blocking, header.l1)?;
        let backing = header.backing.clone();
        self.layers.push(OpenedLayer::Qcow2(Box::new(OpenedImage {
            file,
            header,
            writable,
            first,
            l1,
            refcount_table,
            file_bytes,
            used_bytes,
            others,
        })));
        Ok(backing)
    }

    /// Adds the backing image of the image at `path`. Returns its path, and its own backing image.
    fn backing(&mut self, path: &Path, backing: &Backing) -> io::Result<(PathBuf, Option<Backing>)> {
        if self.layers.len() > BACKING_MAX {
            return Err(io::Error::other("the chain of backing images is too long"));
        }
        let format = backing.known_format().map_err(bad)?;
        let path = resolve(path, &backing.name)?;
        let options = Options { read_only: true, ..*self.options };
        match format {
            BackingFormat::Raw => {
                let open = || FileDisk::open_image(Source::Path(&path), &options).map_err(io::Error::other);
                let file = self.take(open)?;
                self.check_loop(&file)?;
                let size = file.bytes()?.next_multiple_of(SECTOR);
                self.layers.push(OpenedLayer::Raw(Box::new(RawLayer { file, size })));
                Ok((path, None))
            }
            BackingFormat::Qcow2 => {
                let file = self.take(|| open_file(Source::Path(&path), &options).map(|(file, _)| file))?;
                let backing = self.image(file, false)?;
                Ok((path, backing))
            }
        }
    }

    /// Opens a backing image and locks it. Drops what was read of it before.
    fn take(&mut self, open: impl Fn() -> io::Result<FileDisk>) -> io::Result<Arc<FileDisk>> {
        let locks = match &mut self.under {
            Under::Named { locks } => *locks,
            Under::Open(files) => {
                let (file, rest) =
                    files.split_first().ok_or_else(|| io::Error::other("it was not handed over"))?;
                *files = rest;
                return Ok(file.clone());
            }
        };
        for _ in 0..REPLACED_MAX {
            let file = open()?;
            if locks {
                let lock = ImageLock::wait_for(file.os_file(), true);
                self.locks.push(lock.map_err(|error| io::Error::other(CannotBeLocked(error)))?);
            }
            // Another file may have got its name before it was locked.
            if !file.is_replaced() {
                file.drop_cache();
                return Ok(Arc::new(file));
            }
            if locks {
                self.locks.pop();
            }
        }
        Err(io::Error::other("it is replaced by other files all the time"))
    }

    /// Checks that no other image of the chain is in this file.
    fn check_loop(&mut self, file: &FileDisk) -> io::Result<()> {
        let stat = fstat(file.os_file())?;
        let identity = if file.is_device() { (u64::MAX, stat.st_rdev) } else { (stat.st_dev, stat.st_ino) };
        if self.seen.contains(&identity) {
            return Err(io::Error::other("the chain of backing images is a loop"));
        }
        self.seen.push(identity);
        Ok(())
    }
}

/// Returns the path of the image that the one at `path` calls `name`.
fn resolve(path: &Path, name: &[u8]) -> io::Result<PathBuf> {
    // QEMU has a protocol of this name. With it, a relative name begins at QEMU's own working directory.
    let name = match name.strip_prefix(b"file:") {
        Some(name) if !name.starts_with(b"/") => {
            return Err(io::Error::other("a name with file: needs the whole path, from / on"));
        }
        whole => whole.unwrap_or(name),
    };
    // As in QEMU, a name with a colon before any slash is a protocol.
    if name.iter().find(|&&byte| matches!(byte, b':' | b'/')) == Some(&b':') {
        return Err(io::Error::other("it is not a file"));
    }
    let name = Path::new(OsStr::from_bytes(name));
    if descriptor_name(path).is_some() && name.is_relative() {
        return Err(io::Error::other(
            "its name begins at the directory of the image, which a descriptor has not",
        ));
    }
    Ok(path.parent().unwrap_or(Path::new("")).join(name))
}
