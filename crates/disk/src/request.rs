//! The requests of a device to a disk, and their progress.

use crate::IoError;

/// A request. The buffers of the [`Io`](crate::Io) determine its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Read from the disk to the buffers.
    Read {
        /// The first byte on the disk; a multiple of 512.
        offset: u64,
    },
    /// Write from the buffers to the disk.
    Write {
        /// The first byte on the disk; a multiple of 512.
        offset: u64,
        /// Complete only when the bytes are on stable storage.
        durable: bool,
    },
    /// Write all completed writes to stable storage. It has no buffers.
    Flush,
    /// Discard the extents of the [`Io`](crate::Io).
    Discard {
        /// Complete only when the effect is on stable storage.
        durable: bool,
    },
    /// Make the extents of the [`Io`](crate::Io) read as zeroes.
    WriteZeroes {
        /// Complete only when the effect is on stable storage.
        durable: bool,
    },
}

/// A range of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The first byte; a multiple of 512.
    pub offset: u64,
    /// The number of bytes; a multiple of 512.
    pub len: u64,
    /// Writing zeroes may free the space.
    pub unmap: bool,
}

impl Extent {
    /// Removes `bytes` from the beginning.
    pub(crate) fn advance(&mut self, bytes: u64) {
        let bytes = bytes.min(self.len);
        self.offset += bytes;
        self.len -= bytes;
    }
}

/// The progress of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Step {
    /// The request has ended. The buffers are back in the [`Io`](crate::Io); their remaining length has no
    /// meaning.
    Done(Result<(), IoError>),
    /// An operation is in the engine; its completion goes to [`crate::Disk::resume`].
    Pending,
    /// The engine is full, or another request has something that this one needs. The request stays in the
    /// [`Io`](crate::Io). Call [`crate::Disk::retry`] when the engine has room again, *and* when the
    /// context's waker was signalled.
    Busy,
    /// The request has done one step of [`crate::Disk::step_bytes`], or of work that takes as long. It waits
    /// for nothing. Call [`crate::Disk::retry`] when it is its turn again.
    More,
}
