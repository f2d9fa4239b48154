//! A file that changes its length.
//!
//! A file that becomes shorter under a guest has lost what was cut off. Reads there would find the end of the file, and a
//! write would make it longer again, with zeroes in the gap, which nothing tells from data. So once the loss is known, all
//! requests fail that reach beyond the end, until the file is as long as the disk again. It is known when a read has found the
//! end, or when the size is looked at. A write that comes before that makes the file longer: to know better, each write would
//! have to ask for the size.

use super::disk::FileDisk;
use crate::{IoError, Resized, SECTOR};
use std::io::{self, Seek, SeekFrom};
use std::sync::atomic::Ordering;

impl FileDisk {
    /// Reads how long the file is, and takes what has been added to it.
    ///
    /// # Errors
    /// The kernel cannot be asked.
    pub(super) fn read_size(&self) -> io::Result<Resized> {
        let bytes = (&*self.file).seek(SeekFrom::End(0))?;
        let to = bytes - bytes % self.unit().max(SECTOR);
        let from = self.size.fetch_max(to, Ordering::Relaxed);
        // Two threads may have asked at different times, and the older answer may come last. If it is the shorter one, the next
        // request asks again; if it is the longer one, the next read finds the end.
        self.reach.store(if bytes < from { to } else { from.max(to) }, Ordering::Relaxed);
        Ok(match to {
            _ if to > from => Resized::Grown { from, to },
            _ if bytes < from => Resized::Shrunk { from, to: bytes },
            _ => Resized::Same,
        })
    }

    /// Bytes that requests may reach: all, unless the file is known to be shorter than the disk.
    #[inline]
    pub(super) fn reach(&self) -> u64 {
        self.reach.load(Ordering::Relaxed)
    }

    /// Called when a read has found the end of the file before that of the disk.
    #[cold]
    pub(super) fn found_end(&self) {
        let before = self.reach();
        if let Ok(Resized::Shrunk { from, to }) = self.read_size()
            && self.reach() < before
        {
            tracing::warn!(
                parent: &self.span,
                from,
                to,
                "the file behind the disk has become shorter; what is cut off fails until the file is as long again"
            );
        }
    }

    /// Called before a request that is within the disk, and beyond the end of the file as far as that is known.
    #[cold]
    pub(super) fn look_again(&self) -> Result<(), IoError> {
        match self.read_size() {
            Ok(Resized::Shrunk { .. }) | Err(_) => Err(IoError::Shrunk),
            Ok(Resized::Same | Resized::Grown { .. }) => {
                tracing::info!(
                    parent: &self.span,
                    bytes = self.size(),
                    "the file behind the disk is as long again as the disk"
                );
                Ok(())
            }
        }
    }
}
