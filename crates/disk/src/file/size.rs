//! The size of a file that changes.
//!
//! A file that becomes shorter under a guest has lost the data beyond its new end. Reads there would find the
//! end of the file. A write would make the file longer again, with zeroes in the gap that look like data. So
//! once the loss is known, all requests beyond the end fail, until the file is as long as the disk again.
//!
//! The loss becomes known when a read finds the end, or when the size is read. A write before that makes the
//! file longer. To prevent this, each write would have to read the size first.
//!
//! The file of an image in a format may be shorter than its last cluster, and grows with the image. Its size
//! here is the largest length that it has had since the image was opened, rounded down.

use super::disk::FileDisk;
use crate::{IoError, Resized, SECTOR};
use kickless_io::Errno;
use std::io::{self, Seek, SeekFrom};
use std::sync::atomic::Ordering;

/// The parts of a range of an image's file that is to be zeroed.
pub(crate) struct ZeroParts {
    /// The bytes from its start on that are in the file.
    pub(crate) inside: u64,
    /// The part to write with zeroes after the rest, so that the file reaches the end of the range: offset,
    /// length. `None` if the file reaches it.
    pub(crate) last: Option<(u64, u64)>,
}

impl FileDisk {
    /// Reads the length of the file. If it has grown, the disk grows too.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(super) fn read_size(&self) -> io::Result<Resized> {
        let bytes = (&*self.file).seek(SeekFrom::End(0))?;
        let to = bytes - bytes % self.unit().max(SECTOR);
        let from = self.size.fetch_max(to, Ordering::Relaxed);
        // Two threads may read the size at different times and store it in the wrong order. If a smaller,
        // older size is stored last, the next request reads it again. If it is a larger one, the next read
        // finds the end.
        self.accessible_size.store(if bytes < from { to } else { from.max(to) }, Ordering::Relaxed);
        Ok(match to {
            _ if to > from => Resized::Grown { from, to },
            _ if bytes < from => Resized::Shrunk { from, to: bytes },
            _ => Resized::Same,
        })
    }

    /// Returns the size in bytes that requests may access: that of the disk, or of the file if this is known
    /// to be shorter.
    #[inline]
    pub(super) fn accessible_size(&self) -> u64 {
        self.accessible_size.load(Ordering::Relaxed)
    }

    /// Handles a read that found the end of the file before that of the disk.
    #[cold]
    pub(super) fn found_end(&self) {
        let before = self.accessible_size();
        if let Ok(Resized::Shrunk { from, to }) = self.read_size()
            && self.accessible_size() < before
        {
            tracing::warn!(
                parent: &self.span,
                from,
                to,
                "the file of the disk has become shorter; requests beyond its end fail until the file is as long again"
            );
        }
    }

    /// Returns whether a read that found the end of an image's file at `end` has lost bytes: the file was
    /// longer before.
    #[cold]
    pub(super) fn has_lost(&self, end: u64) -> bool {
        end < self.size() && self.is_cut()
    }

    /// Reads the length of an image's file. Returns whether the file was longer before.
    pub(crate) fn is_cut(&self) -> bool {
        // The size is read first. The file had this length before `reached` noted it.
        let size = self.size();
        let is_cut = self.bytes().is_ok_and(|bytes| bytes < size);
        if is_cut {
            self.found_end();
        }
        is_cut
    }

    /// Splits a range of an image's file that is to be zeroed. Call [`FileDisk::reached`] with the end of the
    /// range after that.
    ///
    /// # Errors
    /// The range goes beyond the end of a device, or of a file that was longer before. Such a file must not
    /// look as if it had all its bytes.
    pub(crate) fn split_zeroes(&self, at: u64, len: u64) -> Result<ZeroParts, Errno> {
        let inside = self.bytes()?.saturating_sub(at).min(len);
        if inside == len {
            return Ok(ZeroParts { inside, last: None });
        }
        if self.is_device() {
            return Err(Errno::NOSPC);
        }
        if self.is_cut() {
            return Err(Errno::IO);
        }
        let last = self.unit().min(len);
        Ok(ZeroParts { inside, last: Some((at + len - last, last)) })
    }

    /// Notes that an image's file reaches `end`. Called after a write there has completed.
    pub(crate) fn reached(&self, end: u64) {
        let end = end - end % self.unit();
        // In this order, so that the file never looks shorter than it was.
        if self.accessible_size() >= self.size() {
            self.accessible_size.fetch_max(end, Ordering::Relaxed);
        }
        self.size.fetch_max(end, Ordering::Relaxed);
    }

    /// Checks the size before a request that is within the disk, but beyond the known end of the file.
    #[cold]
    pub(super) fn recheck_size(&self) -> Result<(), IoError> {
        match self.read_size() {
            Ok(Resized::Shrunk { .. }) | Err(_) => Err(IoError::Shrunk),
            Ok(Resized::Same | Resized::Grown { .. }) => {
                tracing::info!(
                    parent: &self.span,
                    bytes = self.size(),
                    "the file of the disk is as long as the disk again"
                );
                Ok(())
            }
        }
    }
}
