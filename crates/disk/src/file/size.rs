//! A file that changes its length.

use super::FileDisk;
use crate::SECTOR;
use std::io::{self, Seek, SeekFrom};
use std::sync::atomic::Ordering;

/// What has become of a disk's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resized {
    /// Nothing, or less than a block.
    Same,
    /// It has become larger, and is now this long.
    Grown {
        /// Bytes before.
        from: u64,
        /// Bytes now.
        to: u64,
    },
    /// The file has become shorter. The disk has not: a guest cannot be told of that.
    Shrunk {
        /// Bytes of the disk.
        from: u64,
        /// Bytes of the file.
        to: u64,
    },
}

impl FileDisk {
    /// Looks how long the file is, and takes what has been added to it.
    ///
    /// # Errors
    /// It cannot be asked.
    pub(crate) fn look_at_size(&self) -> io::Result<Resized> {
        let bytes = (&*self.file).seek(SeekFrom::End(0))?;
        let to = bytes - bytes % self.unit().max(SECTOR);
        let from = self.size.fetch_max(to, Ordering::Relaxed);
        Ok(match to {
            _ if to > from => Resized::Grown { from, to },
            _ if bytes < from => Resized::Shrunk { from, to: bytes },
            _ => Resized::Same,
        })
    }
}
