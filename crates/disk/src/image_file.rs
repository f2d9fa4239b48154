//! Opens the files of images of any format.

use crate::{Cache, Error, Options};
use kickless_opener::{FileUse, file, status};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl, fstatfs};
use rustix::io::Errno;
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// The magic numbers of file systems that have no cache beside their own memory (statfs(2)).
const TMPFS_MAGIC: u64 = 0x0102_1994;
const RAMFS_MAGIC: u64 = 0x8584_58f6;

/// The source of an image's file.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Source<'a> {
    /// A file with this path.
    Path(&'a Path),
    /// A descriptor with this name, which is the path `fd:NAME`.
    Descriptor(&'a Path, BorrowedFd<'a>),
}

impl<'a> Source<'a> {
    /// Returns the path, for sentences.
    pub(crate) fn path(self) -> &'a Path {
        match self {
            Self::Path(path) | Self::Descriptor(path, _) => path,
        }
    }

    /// Opens the file in the mode of the options. Returns whether it is open for direct I/O.
    pub(crate) fn open(self, options: &Options) -> Result<(File, bool), Error> {
        match self {
            Self::Path(path) => open_file(path, options),
            Self::Descriptor(name, fd) => adopt(name, fd, options),
        }
    }
}

/// Uses a descriptor that another program has opened. Changes whether its open file description uses direct
/// I/O, which its other owners notice.
fn adopt(name: &Path, fd: BorrowedFd<'_>, options: &Options) -> Result<(File, bool), Error> {
    let failed = |source: io::Error| Error::Open { path: name.to_owned(), source };
    let wrong = |why| Err(Error::Descriptor { name: name.to_owned(), why });
    let file = File::from(fd.try_clone_to_owned().map_err(failed)?);
    check_type(name, &file.metadata().map_err(failed)?)?;
    let flags = fcntl_getfl(&file).map_err(|error| failed(error.into()))?;
    let (access, writes) = (flags & OFlags::ACCMODE, !options.read_only);
    if flags.contains(OFlags::PATH) || ![OFlags::RDONLY, OFlags::RDWR].contains(&access) {
        return wrong("cannot be read: open it for reading");
    }
    if writes && access != OFlags::RDWR {
        return wrong("cannot be written: open it for reading and writing, or set read-only");
    }
    if flags.contains(OFlags::APPEND) {
        return wrong("was opened for appending, so that a write cannot choose its place");
    }
    let cacheless = is_cacheless(&file);
    let is_direct = options.cache == Cache::None && !cacheless;
    let mut wanted = flags - OFlags::DIRECT - OFlags::NONBLOCK;
    wanted.set(OFlags::DIRECT, is_direct);
    match fcntl_setfl(&file, wanted) {
        Ok(()) => Ok((file, is_direct)),
        Err(Errno::INVAL) if is_direct => Err(Error::NoDirect { path: name.to_owned() }),
        Err(error) => Err(failed(error.into())),
    }
}

/// Opens the file in the mode of the options. Returns whether it is open for direct I/O.
fn open_file(path: &Path, options: &Options) -> Result<(File, bool), Error> {
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem if !options.read_only => {
            Error::OpenForWriting { path: path.to_owned(), source }
        }
        _ => Error::Open { path: path.to_owned(), source },
    };
    // This comes before the open, because the open of a FIFO would wait for its other end.
    check_type(path, &status(path).map_err(failed)?)?;
    let open = |is_direct| file(path, FileUse::Image { writes: !options.read_only, is_direct });
    if options.cache == Cache::Writeback {
        return Ok((open(false).map_err(failed)?, false));
    }
    match open(true) {
        Ok(file) => {
            let cacheless = is_cacheless(&file);
            // If the kernel accepts O_DIRECT on tmpfs, it accepts any alignment, so this counts as no direct
            // I/O.
            Ok((file, !cacheless))
        }
        Err(e) if e.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {
            let file = open(false).map_err(failed)?;
            if is_cacheless(&file) {
                return Ok((file, false));
            }
            Err(Error::NoDirect { path: path.to_owned() })
        }
        Err(e) => Err(failed(e)),
    }
}

/// Checks that a file can be a disk: a regular file or a block device.
pub(crate) fn check_type(path: &Path, meta: &Metadata) -> Result<(), Error> {
    let kind = meta.file_type();
    let what = match () {
        () if kind.is_file() || kind.is_block_device() => return Ok(()),
        () if kind.is_dir() => "a directory",
        () if kind.is_char_device() => "a character device",
        () if kind.is_fifo() => "a pipe",
        () if kind.is_socket() => "a socket",
        () => "a special file",
    };
    Err(Error::NotADisk { path: path.to_owned(), what })
}

/// Returns whether the file consists of memory. The node of a device may be on a tmpfs too, but that says
/// nothing about the device.
fn is_cacheless(file: &File) -> bool {
    file.metadata().is_ok_and(|meta| meta.is_file())
        && fstatfs(file).is_ok_and(|fs| matches!(fs.f_type as u64, TMPFS_MAGIC | RAMFS_MAGIC))
}

/// Returns the device and the inode of a file, or the number of a block device.
pub(crate) fn identity(meta: &Metadata) -> String {
    let mut text = match meta.file_type().is_block_device() {
        true => format!("dev-{:x}", meta.rdev()),
        false => format!("{:x}-{:x}", meta.dev(), meta.ino()),
    };
    text.truncate(20);
    text
}
