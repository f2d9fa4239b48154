//! The directory of a socket, which another user may own and change at any time.
//!
//! The directory is opened once. A name in it is looked up once, without following symbolic links, and what
//! was found is used by its descriptor. So whatever its owner puts in place of a name or of the directory,
//! nothing of another directory is changed or removed.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{
    AtFlags, CWD, FileType, FlockOperation, Gid, Mode, OFlags, Stat, chmod, chownat, flock, fstat, openat,
    readlink, unlinkat,
};
use rustix::io::Errno;
use tracing::warn;

use crate::file::path_of;

/// The interval at which a locked directory is tried.
const LOCK_EVERY: Duration = Duration::from_millis(5);

/// An open directory.
#[derive(Debug)]
pub(crate) struct Directory(OwnedFd);

impl Directory {
    /// Opens the directory of `path`.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub(crate) fn of(path: &Path) -> Result<Self, Errno> {
        let open = |access| {
            openat(CWD, directory_of(path), access | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        };
        // A lock needs the right to read it, and names do not.
        open(OFlags::RDONLY).or_else(|_| open(OFlags::PATH)).map(Self)
    }

    /// Locks the directory until it is dropped, or continues without the lock.
    ///
    /// The lock makes processes that start on the same path at the same time take turns. The process with the
    /// lock checks the path, removes a stale socket, binds and listens. Another process then finds no socket,
    /// a socket that answers, or a stale one. Without the lock, it could take a socket that is bound and does
    /// not listen yet for a stale one, and remove it.
    ///
    /// The process continues without the lock if it has no permission to read the directory, if the file
    /// system has no such locks, or if the directory is still locked at the deadline. Each user who can read
    /// the directory can lock it, such as a hypervisor. That must not keep the daemon from serving the disks
    /// of others.
    ///
    /// Returns whether it is still locked at the deadline.
    pub(crate) fn lock(&self, deadline: Instant) -> bool {
        loop {
            match flock(&self.0, FlockOperation::NonBlockingLockExclusive) {
                Err(Errno::WOULDBLOCK) if Instant::now() < deadline => thread::sleep(LOCK_EVERY),
                Err(Errno::WOULDBLOCK) => return true,
                Err(Errno::INTR) => {}
                Ok(()) | Err(_) => return false,
            }
        }
    }

    /// Returns its canonical path.
    ///
    /// # Errors
    /// There is no /proc.
    pub(crate) fn real_path(&self) -> Result<PathBuf, Errno> {
        real_path_of(self.0.as_fd())
    }

    /// Looks a name up. Returns `None` if there is none.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub(crate) fn find(&self, name: &OsStr) -> Result<Option<Found>, Errno> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match openat(&self.0, name, flags, Mode::empty()) {
            Ok(fd) => Ok(Some(Found { status: fstat(&fd)?, fd })),
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Removes the name of a socket if it still stands for the one of this identity. Returns whether it did.
    /// No other file is removed, whoever knows its identity.
    ///
    /// Between the look and the removal, the name can get another meaning. Only a user who may remove names
    /// from this directory can do that.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub(crate) fn remove(&self, name: &OsStr, identity: Identity) -> Result<bool, Errno> {
        match self.find(name)? {
            Some(found) if found.identity() == identity && found.file_type() == FileType::Socket => {
                unlinkat(&self.0, name, AtFlags::empty()).map(|()| true)
            }
            _ => Ok(false),
        }
    }
}

impl AsFd for Directory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The permissions and the owner of the name of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketRights {
    /// The permissions.
    pub mode: u32,
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

impl SocketRights {
    /// Returns those of the socket with this path, by a call in this process. `None` if it has gone.
    pub fn of(path: &Path) -> Option<Self> {
        let name = path.file_name()?;
        Directory::of(path).and_then(|directory| directory.find(name)).ok()?.map(|found| found.rights())
    }
}

/// The device and the inode of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity(pub(crate) u64, pub(crate) u64);

/// A file that a name stood for. It stays the same file when the name gets another meaning.
#[derive(Debug)]
pub(crate) struct Found {
    fd: OwnedFd,
    status: Stat,
}

impl Found {
    pub(crate) fn identity(&self) -> Identity {
        Identity(self.status.st_dev, self.status.st_ino)
    }

    pub(crate) fn file_type(&self) -> FileType {
        FileType::from_raw_mode(self.status.st_mode)
    }

    /// Returns its permissions at the time of the look.
    pub(crate) fn mode(&self) -> Mode {
        Mode::from_raw_mode(self.status.st_mode)
    }

    /// Returns its permissions and its owner at the time of the look.
    pub(crate) fn rights(&self) -> SocketRights {
        let Stat { st_mode, st_uid, st_gid, .. } = self.status;
        SocketRights { mode: st_mode & 0o7777, uid: st_uid, gid: st_gid }
    }

    /// Returns a path that stands for this file only, whatever its name stands for.
    pub(crate) fn path(&self) -> PathBuf {
        path_of(self.fd.as_fd())
    }

    /// Sets its group.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub(crate) fn set_group(&self, group: u32) -> io::Result<()> {
        Ok(chownat(&self.fd, "", None, Some(Gid::from_raw(group)), AtFlags::EMPTY_PATH)?)
    }

    /// Sets its permissions.
    ///
    /// # Errors
    /// There is no /proc, or the kernel refuses it.
    pub(crate) fn set_mode(&self, mode: Mode) -> io::Result<()> {
        // Only a recent kernel changes them by the descriptor itself.
        Ok(chmod(self.path(), mode)?)
    }
}

/// Warns that a socket was made while its directory was locked.
pub(crate) fn warn_of_lock(path: &Path) {
    warn!(socket = %path.display(), "another process keeps the socket's directory locked; the socket is made without the lock");
}

/// Returns the canonical path of a file by its descriptor. A file without a name has one that does not exist.
///
/// # Errors
/// There is no /proc.
pub(crate) fn real_path_of(file: BorrowedFd<'_>) -> Result<PathBuf, Errno> {
    let link = readlink(format!("/proc/self/fd/{}", file.as_raw_fd()), Vec::new())?;
    Ok(OsString::from_vec(link.into_bytes()).into())
}

/// Returns the directory of `path`.
pub(crate) fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|directory| !directory.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
