//! Errors of mapping guest memory, logs and in-flight buffers.

use crate::addr::{Gpa, UserAddr};
use crate::backing::SlowFile;
use crate::quota::Exhausted;
use std::io;

/// A slot or a map that cannot be made. The front-end is to blame, except for [`Error::Mmap`].
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A region of zero bytes.
    #[error("region at {gpa} is empty")]
    Empty {
        /// The region's guest-physical address.
        gpa: Gpa,
    },
    /// An end that does not fit into 64 bits.
    #[error("{field} plus size {len:#x} of the region at {gpa} wraps around")]
    Wraps {
        /// The region's guest-physical address.
        gpa: Gpa,
        /// The name of the address or offset that wraps.
        field: &'static str,
        /// The region's size.
        len: u64,
    },
    /// The file ends before the region does.
    #[error("region at {gpa} needs {needs:#x} bytes of its file, which has {has:#x}")]
    FileTooShort {
        /// The region's guest-physical address.
        gpa: Gpa,
        /// Offset plus size.
        needs: u64,
        /// The file's size.
        has: u64,
    },
    /// Two regions share guest-physical addresses.
    #[error("region at {gpa} overlaps the region at {other}")]
    Overlaps {
        /// The later region.
        gpa: Gpa,
        /// The earlier one.
        other: Gpa,
    },
    /// More regions than [`crate::SLOTS_MAX`].
    #[error("{count} regions, at most {max} are possible")]
    TooMany {
        /// Number of regions.
        count: usize,
        /// Largest number of regions.
        max: usize,
    },
    /// The region to remove does not exist.
    #[error("no region at {gpa} with user address {user} and size {len:#x}")]
    NoSuchSlot {
        /// The requested guest-physical address.
        gpa: Gpa,
        /// The requested front-end's address.
        user: UserAddr,
        /// The requested size.
        len: u64,
    },
    /// The mapping would exceed a limit, or its file is slow.
    #[error("region at {gpa} cannot be mapped: {why}")]
    Refused {
        /// The region's guest-physical address.
        gpa: Gpa,
        /// The reason.
        why: MappingRefused,
    },
    /// The kernel refused.
    #[error("region at {gpa} cannot be mapped")]
    Mmap {
        /// The region's guest-physical address.
        gpa: Gpa,
        /// The reason.
        #[source]
        source: io::Error,
    },
}

/// A log that cannot be mapped. The front-end is to blame, except for [`LogError::Mmap`].
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// A log of zero bytes.
    #[error("the log is empty")]
    Empty,
    /// Its words would not be aligned.
    #[error("the log's mmap offset {offset:#x} is no multiple of 8")]
    Misaligned {
        /// Offset of the log in its file.
        offset: u64,
    },
    /// An end that does not fit into 64 bits.
    #[error("mmap offset {offset:#x} plus size {len:#x} of the log wraps around")]
    Wraps {
        /// Offset of the log in its file.
        offset: u64,
        /// Length of the log in bytes.
        len: u64,
    },
    /// The file ends before the log does.
    #[error("the log needs {needs:#x} bytes of its file, which has {has:#x}")]
    FileTooShort {
        /// Offset plus size.
        needs: u64,
        /// The file's size.
        has: u64,
    },
    /// The log has no bits for some of the guest memory.
    #[error("a log of {has} bytes is too small: guest memory up to {end} takes {needs} bytes")]
    TooSmall {
        /// Length of the log in bytes.
        has: u64,
        /// The length that is needed.
        needs: u64,
        /// The last byte of guest memory.
        end: Gpa,
    },
    /// The mapping would exceed a limit, or its file is slow.
    #[error("the log cannot be mapped: {0}")]
    Refused(MappingRefused),
    /// The kernel refused.
    #[error("the log cannot be mapped")]
    Mmap {
        /// The reason.
        #[source]
        source: io::Error,
    },
}

/// An in-flight buffer that cannot be mapped. The front-end is to blame, except for [`InflightError::Mmap`].
#[derive(Debug, thiserror::Error)]
pub enum InflightError {
    /// A buffer of zero bytes.
    #[error("the in-flight buffer is empty")]
    Empty,
    /// Its words would not be aligned.
    #[error("the mmap offset {offset:#x} of the in-flight buffer is no multiple of 8")]
    Misaligned {
        /// Offset of the buffer in its file.
        offset: u64,
    },
    /// An end that does not fit into 64 bits.
    #[error("mmap offset {offset:#x} plus size {len:#x} of the in-flight buffer wraps around")]
    Wraps {
        /// Offset of the buffer in its file.
        offset: u64,
        /// Length of the buffer in bytes.
        len: u64,
    },
    /// The file ends before the buffer does.
    #[error("the in-flight buffer needs {needs:#x} bytes of its file, which has {has:#x}")]
    FileTooShort {
        /// Offset plus size.
        needs: u64,
        /// The file's size.
        has: u64,
    },
    /// The mapping would exceed a limit, or its file is slow.
    #[error("the in-flight buffer cannot be mapped: {0}")]
    Refused(MappingRefused),
    /// The kernel refused.
    #[error("the in-flight buffer cannot be mapped")]
    Mmap {
        /// The reason.
        #[source]
        source: io::Error,
    },
}

/// The reason for which a file is not mapped although the kernel would map it. The front-end is to blame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(transparent)]
pub enum MappingRefused {
    /// The device would have too much mapped.
    Exhausted(#[from] Exhausted),
    /// A thread that touches the file's pages may wait for ever.
    SlowFile(#[from] SlowFile),
}

/// A mapping that failed. The caller turns it into an error that names the purpose of the mapping.
#[derive(Debug)]
pub(crate) enum MappingError {
    Wraps,
    TooShort { needs: u64, has: u64 },
    Refused(MappingRefused),
    Os(io::Error),
}

impl From<rustix::io::Errno> for MappingError {
    fn from(e: rustix::io::Errno) -> Self {
        Self::Os(e.into())
    }
}

/// An error for a range that is not, or not wholly, in guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{len:#x} bytes at {addr:#x} are not in guest memory")]
pub struct Unmapped {
    /// Start of the range, in the address space of the lookup.
    pub addr: u64,
    /// Length of the range in bytes.
    pub len: u64,
}
