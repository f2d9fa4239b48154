//! A file between two owners, which may be on two hosts.

use super::disk::FileDisk;
use crate::image_file::file_type;
use crate::{Error, SECTOR};
use kickless_opener::status;
use rustix::fs::{Advice, FileType, fadvise, fstat};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process;
use std::sync::atomic::Ordering;

impl FileDisk {
    /// Drops the host's cache of the file, because another host may have written since.
    ///
    /// Pages that this host has changed and not written yet stay. Nothing is newer: an owner writes its own
    /// back before it gives the file up.
    pub(crate) fn drop_cache(&self) {
        if self.direct.is_none()
            && let Err(error) = fadvise(&self.file, 0, None, Advice::DontNeed)
        {
            tracing::warn!(parent: &self.span, %error, "the host's cache may have old data of the image");
        }
    }

    /// Takes the length of the file as it is, longer or shorter than before, because another program may have
    /// changed it while no guest used the disk.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(crate) fn accept_size(&self) -> io::Result<()> {
        let bytes = self.bytes()?;
        let size = bytes - bytes % self.unit();
        self.size.store(size, Ordering::Relaxed);
        self.accessible_size.store(size, Ordering::Relaxed);
        Ok(())
    }

    /// Takes the length of a raw image, as [`FileDisk::accept_size`] does.
    ///
    /// # Errors
    /// The kernel refuses, or the file has less than a block. The size is as before then.
    pub(super) fn accept_disk_size(&self) -> io::Result<()> {
        if self.bytes()? < self.unit().max(SECTOR) {
            let path = self.named().unwrap_or("the file".as_ref()).to_owned();
            return Err(io::Error::other(Error::Empty { path }));
        }
        self.accept_size()
    }

    /// Returns the path that named the file when it was opened. `None` if it came as a descriptor.
    pub(crate) fn named(&self) -> Option<&Path> {
        self.origin.path.as_deref()
    }

    /// Opens the file that the path names now, if it is another one.
    ///
    /// # Errors
    /// It cannot be used.
    pub(crate) fn replacement(&self) -> Result<Option<Self>, Error> {
        match self.named() {
            Some(path) if self.is_replaced() => {
                self.span.in_scope(|| Self::open(path, &self.origin.options)).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Returns whether the path names another file now. A file without a path has no other one. If the path
    /// names none, or cannot be followed, the file is still the one to use.
    pub(crate) fn is_replaced(&self) -> bool {
        let Some(path) = self.named() else { return false };
        let (named, open) = match (status(path), fstat(&self.file).map_err(io::Error::from)) {
            (Ok(named), Ok(open)) => (named, open),
            (Err(error), Ok(open)) if open.st_nlink == 0 => {
                let copy_from = format!("/proc/{}/fd/{}", process::id(), self.file.as_raw_fd());
                tracing::warn!(
                    parent: &self.span, path = %path.display(), %error, copy_from,
                    "the image was deleted, and its data will be lost when this program ends: copy it first"
                );
                return false;
            }
            (Err(error), _) | (_, Err(error)) => {
                tracing::warn!(
                    parent: &self.span, path = %path.display(), %error,
                    "nothing can be found at the path of the image: the image that was opened there is used"
                );
                return false;
            }
        };
        // Several nodes can stand for one block device.
        match (named.file_type(), file_type(&open)) {
            (FileType::BlockDevice, FileType::BlockDevice) => named.special != open.st_rdev,
            _ => (named.device, named.inode) != (open.st_dev, open.st_ino),
        }
    }
}
