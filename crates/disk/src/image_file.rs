//! Opens the files of images of any format.

use crate::{Cache, Error, Options};
use kickless_opener::{FileUse, file, is_same_description, reopen, status};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl, fstatfs};
use rustix::io::Errno;
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, Weak};

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

    /// Returns the path, unless it only stands for a descriptor.
    pub(crate) fn named(self) -> Option<&'a Path> {
        match self {
            Self::Path(path) => Some(path),
            Self::Descriptor(..) => None,
        }
    }

    /// Opens the file in the mode of the options. Returns whether it is open for direct I/O.
    pub(crate) fn open(self, options: &Options) -> Result<(Arc<File>, bool), Error> {
        match self {
            Self::Path(path) => open_file(path, options).map(|(file, is_direct)| (Arc::new(file), is_direct)),
            Self::Descriptor(name, fd) => adopt(name, fd, options),
        }
    }
}

/// Uses a descriptor that another program has opened. The disk gets an open file description of its own, with
/// a lock and flags of its own, if this process may open the file. Otherwise it shares that of the other
/// program, which notices whether it uses direct I/O. No two disks share one.
fn adopt(name: &Path, fd: BorrowedFd<'_>, options: &Options) -> Result<(Arc<File>, bool), Error> {
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
    let is_direct = options.cache == Cache::None && !is_cacheless(&file);
    // It never opens more than the descriptor allows, which was checked above.
    match reopen(file.as_fd(), FileUse::Image { writes, is_direct }) {
        Ok(file) => return Ok((Arc::new(file), is_direct)),
        Err(error) if is_direct && error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {
            return Err(Error::NoDirect { path: name.to_owned() });
        }
        Err(_) => {}
    }
    let file = Arc::new(file);
    // Before its flags change, which another disk of this description would notice.
    let Some(file) = SHARED.insert(file) else {
        return wrong("is used by another disk already: open the file once more for each disk");
    };
    let mut wanted = flags - OFlags::DIRECT - OFlags::NONBLOCK;
    wanted.set(OFlags::DIRECT, is_direct);
    match fcntl_setfl(&*file, wanted) {
        Ok(()) => Ok((file, is_direct)),
        Err(Errno::INVAL) if is_direct => Err(Error::NoDirect { path: name.to_owned() }),
        Err(error) => Err(failed(error.into())),
    }
}

/// The files of disks that share their open file description with the program that sent them.
static SHARED: Shared = Shared(Mutex::new(Vec::new()));

/// Files with different open file descriptions.
struct Shared(Mutex<Vec<Weak<File>>>);

impl Shared {
    /// Adds a file until it is closed. Returns `None` if there is one with its description.
    fn insert(&self, file: Arc<File>) -> Option<Arc<File>> {
        // Dropped after the lock, because the close of a file can wait.
        let mut open = Vec::new();
        let mut files = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        files.retain(|other| other.strong_count() > 0);
        open.extend(files.iter().filter_map(Weak::upgrade));
        if open.iter().any(|other| may_share(&file, other)) {
            return None;
        }
        files.push(Arc::downgrade(&file));
        Some(file)
    }
}

/// Returns whether two files have the same open file description. If the kernel does not tell, those of the
/// same inode have.
fn may_share(one: &File, other: &File) -> bool {
    is_same_description(one, other).unwrap_or_else(|_| match (one.metadata(), other.metadata()) {
        (Ok(one), Ok(other)) => (one.dev(), one.ino()) == (other.dev(), other.ino()),
        _ => true,
    })
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

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::os::unix::fs::OpenOptionsExt;
    use std::thread;

    use nix::unistd::{Uid, setfsuid};
    use tempfile::TempDir;

    use super::*;

    fn adopted(fd: &File, cache: Cache) -> Result<Arc<File>, String> {
        let options = Options { read_only: true, cache, ..Options::default() };
        let adopted = adopt("fd:a".as_ref(), fd.as_fd(), &options);
        adopted.map(|(file, _)| file).map_err(|error| error.to_string())
    }

    /// Makes an image that only its owner may open.
    fn image() -> (TempDir, impl Fn() -> File) {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("image");
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        (dir, move || options.open(&path).unwrap())
    }

    #[test]
    fn each_disk_has_a_description_of_its_own() {
        let (_dir, open) = image();
        let sent = open();
        let before = fcntl_getfl(&sent).unwrap();
        let [one, other] = [Cache::None, Cache::Writeback].map(|cache| adopted(&sent, cache).unwrap());
        for (one, other) in [(&*one, &*other), (&one, &sent), (&other, &sent)] {
            assert_eq!(is_same_description(one, other).ok().filter(|is_same| *is_same), None);
        }
        assert_eq!(fcntl_getfl(&sent).unwrap(), before);
    }

    #[test]
    fn a_description_that_cannot_be_opened_again_serves_one_disk() {
        let (_dir, open) = image();
        let (sent, second) = (open(), open());
        // Only root can take another user's rights on files, for this thread.
        if !Uid::effective().is_root() {
            return;
        }
        let served = move || {
            setfsuid(Uid::from_raw(65534));
            let first = adopted(&sent, Cache::Writeback).unwrap();
            let before = fcntl_getfl(&first).unwrap();
            // The same description as the sender's, if the kernel tells.
            assert_ne!(is_same_description(&first, &sent).ok(), Some(false));
            let refused = adopted(&sent.try_clone().unwrap(), Cache::None).unwrap_err();
            assert!(refused.contains("is used by another disk already"), "{refused}");
            assert_eq!(fcntl_getfl(&first).unwrap(), before);
            if is_same_description(&first, &second).is_ok() {
                adopted(&second, Cache::Writeback).unwrap();
            }
            drop(first);
            adopted(&sent, Cache::Writeback).unwrap();
        };
        thread::spawn(served).join().unwrap();
    }
}
