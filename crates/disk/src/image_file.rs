//! Opens the files of images of any format.

use crate::handed_image::HandedImage;
use crate::spec::foreign;
use crate::{Cache, Error, Options};
use kickless_opener::{Alignment, descriptor_name, image, is_same_description, reopen, status};
use kickless_sync::lock;
use rustix::fs::{FileType, OFlags, Stat, fcntl_getfl, fcntl_setfl, fstat, fstatfs};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, Weak};

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
    /// The file of another process, and the path of the disk.
    Handed(&'a Path, &'a HandedImage),
}

impl<'a> Source<'a> {
    /// Returns the path, for sentences.
    pub(crate) fn path(self) -> &'a Path {
        match self {
            Self::Path(path) | Self::Descriptor(path, _) | Self::Handed(path, _) => path,
        }
    }

    /// Returns the path, unless it only stands for a descriptor.
    pub(crate) fn named(self) -> Option<&'a Path> {
        match self {
            Self::Path(path) => Some(path),
            Self::Handed(path, image) => {
                Some(path).filter(|_| image.is_top && descriptor_name(path).is_none())
            }
            Self::Descriptor(..) => None,
        }
    }

    /// Opens the file in the mode of the options.
    pub(crate) fn open(self, options: &Options) -> Result<ImageFile, Error> {
        match self {
            Self::Path(path) => open_file(path, options),
            Self::Descriptor(name, fd) => adopt(name, fd, options),
            Self::Handed(name, image) => {
                image.check_mode(name, options)?;
                // The other process may share this description with a third one.
                if descriptor_name(name).is_some() {
                    SHARED.add(&image.file);
                }
                Ok(ImageFile { file: image.file.clone(), direct: image.direct })
            }
        }
    }
}

/// A file that is open for an image.
#[derive(Debug)]
pub(crate) struct ImageFile {
    pub(crate) file: Arc<File>,
    /// The alignment of direct I/O, or `None` if the file is not open for it.
    pub(crate) direct: Option<Alignment>,
}

/// Uses a descriptor that another program has opened. The disk gets an open file description of its own, with
/// a lock and flags of its own, if this process may open the file. Otherwise it shares that of the other
/// program, which notices whether it uses direct I/O. No two disks share one.
fn adopt(name: &Path, fd: BorrowedFd<'_>, options: &Options) -> Result<ImageFile, Error> {
    let failed = |source: io::Error| Error::Open { path: name.to_owned(), source };
    let wrong = |why| Err(Error::Descriptor { name: name.to_owned(), why });
    let file = File::from(fd.try_clone_to_owned().map_err(failed)?);
    check_type(name, file_type(&fstat(&file).map_err(|error| failed(error.into()))?))?;
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
    match reopen(file.as_fd(), writes, is_direct) {
        Ok(opened) => {
            let direct = is_direct.then_some(opened.alignment);
            return Ok(ImageFile { file: Arc::new(opened.file), direct });
        }
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
        Ok(()) => Ok(ImageFile { file, direct: is_direct.then_some(Alignment::Unknown) }),
        Err(Errno::INVAL) if is_direct => Err(Error::NoDirect { path: name.to_owned() }),
        Err(error) => Err(failed(error.into())),
    }
}

/// The files of disks that share their open file description with the program that sent them. A file that was
/// handed over may share it too.
static SHARED: Shared = Shared(Mutex::new(Vec::new()));

/// Files with different open file descriptions.
struct Shared(Mutex<Vec<Weak<File>>>);

impl Shared {
    /// Adds a file until it is closed.
    fn add(&self, file: &Arc<File>) {
        lock(&self.0).push(Arc::downgrade(file));
    }

    /// Adds a file until it is closed. Returns `None` if there is one with its description.
    fn insert(&self, file: Arc<File>) -> Option<Arc<File>> {
        // Dropped after the lock, because the close of a file can wait.
        let mut open = Vec::new();
        let mut files = lock(&self.0);
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
    is_same_description(one, other).unwrap_or_else(|_| match (fstat(one), fstat(other)) {
        (Ok(one), Ok(other)) => (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino),
        _ => true,
    })
}

/// Opens the file in the mode of the options.
fn open_file(path: &Path, options: &Options) -> Result<ImageFile, Error> {
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem if !options.read_only => {
            match image(path, false, false) {
                Ok(_) => Error::OpenForWriting { path: path.to_owned(), source },
                Err(source) => Error::Open { path: path.to_owned(), source },
            }
        }
        _ => Error::Open { path: path.to_owned(), source },
    };
    let not_found = |source: io::Error| {
        let cure = path.to_str().filter(|_| source.kind() == io::ErrorKind::NotFound).and_then(foreign::cure);
        match cure {
            Some(cure) => Error::Foreign { path: path.to_owned(), cure },
            None => Error::Open { path: path.to_owned(), source },
        }
    };
    // This comes before the open, because the open of a FIFO would wait for its other end.
    check_type(path, status(path).map_err(not_found)?.file_type())?;
    let open = |is_direct| image(path, !options.read_only, is_direct);
    let without_direct = |file| Ok(ImageFile { file: Arc::new(file), direct: None });
    if options.cache == Cache::Writeback {
        return without_direct(open(false).map_err(failed)?.file);
    }
    match open(true) {
        // If the kernel accepts O_DIRECT on tmpfs, it accepts any alignment, so this counts as no direct I/O.
        Ok(opened) if is_cacheless(&opened.file) => without_direct(opened.file),
        Ok(opened) => Ok(ImageFile { file: Arc::new(opened.file), direct: Some(opened.alignment) }),
        Err(e) if e.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {
            let file = open(false).map_err(failed)?.file;
            if is_cacheless(&file) {
                return without_direct(file);
            }
            Err(Error::NoDirect { path: path.to_owned() })
        }
        Err(e) => Err(failed(e)),
    }
}

/// Checks that a file can be a disk: a regular file or a block device.
pub(crate) fn check_type(path: &Path, kind: FileType) -> Result<(), Error> {
    let what = match kind {
        FileType::RegularFile | FileType::BlockDevice => return Ok(()),
        FileType::Directory => "a directory",
        FileType::CharacterDevice => "a character device",
        FileType::Fifo => "a pipe",
        FileType::Socket => "a socket",
        _ => "a special file",
    };
    Err(Error::NotADisk { path: path.to_owned(), what })
}

/// Returns whether the file consists of memory. The node of a device may be on a tmpfs too, but that says
/// nothing about the device.
fn is_cacheless(file: &File) -> bool {
    fstat(file).is_ok_and(|stat| file_type(&stat) == FileType::RegularFile)
        && fstatfs(file).is_ok_and(|fs| matches!(fs.f_type as u64, TMPFS_MAGIC | RAMFS_MAGIC))
}

/// Returns the type of a file.
pub(crate) fn file_type(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

/// Returns the device and the inode of a file, or the number of a block device.
pub(crate) fn identity(stat: &Stat) -> String {
    let mut text = match file_type(stat) {
        FileType::BlockDevice => format!("dev-{:x}", stat.st_rdev),
        _ => format!("{:x}-{:x}", stat.st_dev, stat.st_ino),
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
        adopted.map(|opened| opened.file).map_err(|error| error.to_string())
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
