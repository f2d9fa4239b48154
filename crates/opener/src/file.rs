//! Files.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags, fstat, openat, statx};

use crate::answers::{Alignment, FileStatus};
use crate::client::{Answer, client, mismatch, without_refusal};
use crate::name::name_here;
use crate::reason::{Want, explained};
use crate::wire::{Reply, Request};

/// The most bytes of a [`text`].
const TEXT_BYTES_MAX: u64 = 64 << 10;
/// The flags of a capture beside those of all files.
const CAPTURE_FLAGS: OFlags = OFlags::NOCTTY.union(OFlags::NONBLOCK).union(OFlags::NOFOLLOW);

/// The use of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileUse {
    Read,
    Image { writes: bool, is_direct: bool },
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
                CAPTURE_FLAGS
            }
        };
        options.custom_flags(flags.bits() as i32);
        options
    }
}

/// A file that is open for reading and perhaps writing.
#[derive(Debug)]
pub struct Opened {
    /// The file.
    pub file: File,
    /// The alignment that its direct I/O needs.
    pub alignment: Alignment,
}

/// Opens a file for reading in this process, whether another one opens files or not. A sandbox refuses it
/// after the start.
///
/// # Errors
/// The kernel refuses it.
pub fn file(path: &Path) -> io::Result<File> {
    file_here(path, FileUse::Read).map_err(|error| explained(path, Want::Read, error))
}

/// Opens the file of a capture for reading and writing, or makes it for its owner alone. A symbolic link is
/// refused (`ELOOP`): the owner of the directory may have put it there. The open of a pipe does not wait for
/// its other end.
///
/// # Errors
/// The kernel refuses it.
pub fn capture(path: &Path) -> io::Result<File> {
    match client() {
        Some(client) => client.descriptor(&Request::Capture { path: path.to_owned() }).map(File::from),
        None => file_here(path, FileUse::Capture),
    }
}

/// Opens an image or a block device for reading, and for writing with `writes`. With `is_direct`, transfers
/// do not use the host's page cache.
///
/// # Errors
/// The kernel refuses it.
pub fn image(path: &Path, writes: bool, is_direct: bool) -> io::Result<Opened> {
    match client() {
        Some(client) => opened(client.ask(&Request::Image { path: path.to_owned(), writes, is_direct })?),
        None => {
            let want = if writes { Want::Write } else { Want::Read };
            let opened = file_here(path, FileUse::Image { writes, is_direct });
            opened.map(with_alignment).map_err(|error| explained(path, want, error))
        }
    }
}

/// Opens the image or the block device of a descriptor again, as [`image`] does. The result has an open file
/// description of its own. It can be written only if the descriptor can.
///
/// # Errors
/// There is no /proc, or the kernel refuses it.
pub fn reopen(of: BorrowedFd<'_>, writes: bool, is_direct: bool) -> io::Result<Opened> {
    match client() {
        Some(client) => {
            let answer = client.ask_with(&Request::Reopen { writes, is_direct }, Some(of))?;
            opened(without_refusal(answer)?)
        }
        None => reopen_here(of, FileUse::Image { writes, is_direct }).map(with_alignment),
    }
}

/// Returns the status of a file. Does not open it, so a pipe or a device notices nothing.
///
/// # Errors
/// The kernel refuses it.
pub fn status(path: &Path) -> io::Result<FileStatus> {
    let Some(client) = client() else {
        return status_of(&name_here(path).map_err(|error| explained(path, Want::Read, error))?);
    };
    match client.ask(&Request::Status { path: path.to_owned() })? {
        (Reply::Status { status }, _) => Ok(status),
        _ => Err(mismatch()),
    }
}

/// Reads the configuration file that the operator named at the start, if another process opens files: this
/// one cannot name it.
pub fn config_file() -> Option<io::Result<File>> {
    client().map(|client| client.descriptor(&Request::ReadConfig {}).map(File::from))
}

fn opened(answer: Answer) -> io::Result<Opened> {
    match answer {
        (Reply::Opened { alignment }, Some(file)) => Ok(Opened { file: file.into(), alignment }),
        _ => Err(mismatch()),
    }
}

/// Reads a short file of text, such as one of /sys.
///
/// # Errors
/// The kernel refuses it, or it is not UTF-8.
pub(crate) fn text(path: &Path) -> io::Result<String> {
    io::read_to_string(file_here(path, FileUse::Read)?.take(TEXT_BYTES_MAX))
}

/// Opens a file in this process.
///
/// # Errors
/// The kernel refuses it.
pub(crate) fn file_here(path: &Path, usage: FileUse) -> io::Result<File> {
    usage.options().open(path)
}

/// Opens the file of a descriptor again in this process.
///
/// # Errors
/// There is no /proc, or the kernel refuses it.
pub(crate) fn reopen_here(of: BorrowedFd<'_>, usage: FileUse) -> io::Result<File> {
    file_here(&path_of(of), usage)
}

/// Returns a path that stands for this file only, whatever its name stands for.
pub(crate) fn path_of(file: BorrowedFd<'_>) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

/// Opens the file of a capture in this process, in a directory that is open.
///
/// # Errors
/// The kernel refuses it.
pub(crate) fn capture_here(directory: BorrowedFd<'_>, name: &OsStr) -> io::Result<File> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | CAPTURE_FLAGS;
    Ok(openat(directory, name, flags, Mode::RUSR | Mode::WUSR)?.into())
}

/// Returns the status of an open file.
///
/// # Errors
/// The kernel refuses it.
pub(crate) fn status_of(file: impl AsFd) -> io::Result<FileStatus> {
    let stat = fstat(file)?;
    Ok(FileStatus {
        device: stat.st_dev,
        inode: stat.st_ino,
        special: stat.st_rdev,
        mode: stat.st_mode,
        size: stat.st_size as u64,
    })
}

/// Asks for the alignment of an open file.
pub(crate) fn with_alignment(file: File) -> Opened {
    let alignment = match statx(&file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) {
        Ok(stat) if stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0 => {
            match (stat.stx_dio_mem_align, stat.stx_dio_offset_align) {
                (0, _) | (_, 0) => Alignment::Impossible,
                (memory, offset) => Alignment::Known { memory, offset },
            }
        }
        _ => Alignment::Unknown,
    };
    Opened { file, alignment }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::fd::AsFd;
    use std::os::unix::fs::MetadataExt;
    use std::process::Command;

    use rustix::fs::{FileType, fcntl_getfl};
    use tempfile::TempDir;

    use super::*;

    #[test]
    fn each_use_has_its_flags() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("file");
        assert_eq!(file(&path).unwrap_err().kind(), io::ErrorKind::NotFound);
        let made = capture(&path).unwrap();
        assert_eq!(made.metadata().unwrap().mode() & 0o777, 0o600);
        let access = |file: File| fcntl_getfl(file).unwrap() & OFlags::ACCMODE;
        let image = |writes| image(&path, writes, false).unwrap().file;
        let accesses = [file(&path).unwrap(), image(false), image(true), made].map(access);
        assert_eq!(accesses, [OFlags::RDONLY, OFlags::RDONLY, OFlags::RDWR, OFlags::RDWR]);
    }

    #[test]
    fn the_status_of_a_pipe_does_not_wait_for_its_other_end() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("pipe");
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        assert_eq!(status(&path).unwrap().file_type(), FileType::Fifo);
        assert!(capture(&path).is_ok());
    }

    #[test]
    fn an_image_has_a_status_and_an_alignment() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("image");
        fs::write(&path, [0; 4096]).unwrap();
        let (known, file) = (status(&path).unwrap(), fs::metadata(&path).unwrap());
        assert_eq!((known.device, known.inode, known.special), (file.dev(), file.ino(), file.rdev()));
        assert_eq!((known.mode, known.size), (file.mode(), 4096));
        let opened = image(&path, false, false).unwrap();
        let again = reopen(opened.file.as_fd(), false, false).unwrap();
        assert_eq!(again.alignment, opened.alignment);
        assert_eq!(again.file.metadata().unwrap().ino(), known.inode);
        if let Alignment::Known { memory, offset } = opened.alignment {
            assert!(memory.is_power_of_two() && offset.is_power_of_two());
        }
        assert_eq!(status(&dir.path().join("none")).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert!(config_file().is_none());
    }

    #[test]
    fn a_file_that_has_no_name_any_more_is_opened_again() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "text").unwrap();
        let first = file(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let second = reopen(first.as_fd(), false, false).unwrap().file;
        assert_eq!(second.metadata().unwrap().ino(), first.metadata().unwrap().ino());
        assert_eq!(io::read_to_string(second).unwrap(), "text");
        assert!(text(&path).is_err());
    }
}
