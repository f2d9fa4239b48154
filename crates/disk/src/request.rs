//! What a device asks of a disk, and how far a request has come.

use crate::IoError;

/// What the guest wants. How many bytes is what the [`Io`](crate::Io)'s buffers hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Disk to buffers.
    Read {
        /// First byte on the disk; a multiple of 512.
        offset: u64,
    },
    /// Buffers to disk.
    Write {
        /// First byte on the disk; a multiple of 512.
        offset: u64,
        /// Done only when the bytes are on stable storage.
        durable: bool,
    },
    /// All writes that are done are to be on stable storage. No buffers.
    Flush,
    /// The [`Io`](crate::Io)'s extents need not keep what they hold, nor their space.
    Discard {
        /// Done only when that is so on stable storage.
        durable: bool,
    },
    /// The [`Io`](crate::Io)'s extents read as zeroes from now on.
    WriteZeroes {
        /// Done only when that is so on stable storage.
        durable: bool,
    },
    /// What the [`Io`](crate::Io)'s extents hold is not to be had any more by any means.
    SecureErase,
}

/// A range of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First byte; a multiple of 512.
    pub offset: u64,
    /// Bytes; a multiple of 512.
    pub len: u64,
    /// Zeroes may be written to it by giving its space back.
    pub unmap: bool,
}

impl Extent {
    /// It begins so much later.
    pub(crate) fn advance(&mut self, bytes: u64) {
        let bytes = bytes.min(self.len);
        self.offset += bytes;
        self.len -= bytes;
    }
}

/// How far a request has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Step {
    /// It is over. The buffers are back in the [`Io`](crate::Io); how much is left in them says nothing.
    Done(Result<(), IoError>),
    /// An operation is in the engine; its completion goes to [`crate::Disk::resume`].
    Pending,
    /// The engine is full, or another request has what this one needs. It stays whole in the [`Io`](crate::Io);
    /// [`crate::Disk::retry`] when the engine has room again *and* when the lane's waker was signalled.
    Busy,
    /// As much of it is done as is done at a time: [`crate::Disk::step_bytes`], or what takes as long. It waits for nothing;
    /// [`crate::Disk::retry`] in its turn.
    More,
}
