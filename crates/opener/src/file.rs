//! Files.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

/// The most bytes of a [`text`].
const TEXT_BYTES_MAX: u64 = 64 << 10;

/// The use of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileUse {
    /// It is read.
    Read,
    /// It is an image or a block device.
    Image {
        /// It is also written.
        writes: bool,
        /// It is read and written without the host's page cache.
        is_direct: bool,
    },
    /// It is read and written, and made for its owner alone if it does not exist. A symbolic link is refused
    /// (`ELOOP`): the owner of the directory may have put it there. The open of a pipe does not wait for its
    /// other end.
    Capture,
}

impl FileUse {
    fn options(self) -> OpenOptions {
        let mut options = OpenOptions::new();
        options.read(true);
        let flags = match self {
            Self::Read => OFlags::empty(),
            Self::Image { writes, is_direct } => {
                options.write(writes);
                if is_direct { OFlags::DIRECT } else { OFlags::empty() }
            }
            Self::Capture => {
                options.write(true).create(true).mode(0o600);
                OFlags::NOCTTY | OFlags::NONBLOCK | OFlags::NOFOLLOW
            }
        };
        options.custom_flags(flags.bits() as i32);
        options
    }
}

/// Opens a file.
///
/// # Errors
/// The kernel refuses it.
pub fn file(path: &Path, usage: FileUse) -> io::Result<File> {
    usage.options().open(path)
}

/// Returns the status of a file. Does not open it, so a pipe or a device notices nothing.
///
/// # Errors
/// The kernel refuses it.
pub fn status(path: &Path) -> io::Result<Metadata> {
    // The descriptor could pass through a socket, and the status is read from it.
    let named = OpenOptions::new().read(true).custom_flags(OFlags::PATH.bits() as i32).open(path)?;
    named.metadata()
}

/// Reads a short file of text, such as one of /sys.
///
/// # Errors
/// The kernel refuses it, or it is not UTF-8.
pub fn text(path: &Path) -> io::Result<String> {
    io::read_to_string(file(path, FileUse::Read)?.take(TEXT_BYTES_MAX))
}

/// Returns the target of a symbolic link of /sys.
///
/// # Errors
/// The kernel refuses it.
pub fn link(path: &Path) -> io::Result<PathBuf> {
    path.read_link()
}

/// Opens the file of a descriptor again, for this use. The result has an open file description of its own.
///
/// # Errors
/// There is no /proc, or the kernel refuses it.
pub fn reopen(of: BorrowedFd<'_>, usage: FileUse) -> io::Result<File> {
    file(Path::new(&format!("/proc/self/fd/{}", of.as_raw_fd())), usage)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::fd::AsFd;
    use std::os::unix::fs::{FileTypeExt, MetadataExt};
    use std::process::Command;

    use rustix::fs::fcntl_getfl;
    use tempfile::TempDir;

    use super::*;

    #[test]
    fn each_use_has_its_flags() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("file");
        assert_eq!(file(&path, FileUse::Read).unwrap_err().kind(), io::ErrorKind::NotFound);
        let made = file(&path, FileUse::Capture).unwrap();
        assert_eq!(made.metadata().unwrap().mode() & 0o777, 0o600);
        let access = |usage| fcntl_getfl(file(&path, usage).unwrap()).unwrap() & OFlags::ACCMODE;
        assert_eq!(access(FileUse::Read), OFlags::RDONLY);
        assert_eq!(access(FileUse::Image { writes: false, is_direct: false }), OFlags::RDONLY);
        assert_eq!(access(FileUse::Image { writes: true, is_direct: false }), OFlags::RDWR);
    }

    #[test]
    fn the_status_of_a_pipe_does_not_wait_for_its_other_end() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("pipe");
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        assert!(status(&path).unwrap().file_type().is_fifo());
        assert!(file(&path, FileUse::Capture).is_ok());
    }

    #[test]
    fn a_file_that_has_no_name_any_more_is_opened_again() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "text").unwrap();
        let first = file(&path, FileUse::Read).unwrap();
        fs::remove_file(&path).unwrap();
        let second = reopen(first.as_fd(), FileUse::Read).unwrap();
        assert_eq!(second.metadata().unwrap().ino(), first.metadata().unwrap().ino());
        assert_eq!(io::read_to_string(second).unwrap(), "text");
        assert!(text(&path).is_err());
    }
}
