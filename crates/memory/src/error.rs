//! Errors of mapping guest memory, logs and in-flight buffers.

use crate::addr::{Gpa, UserAddr};
use crate::backing::SlowFile;
use crate::quota::Exhausted;
use std::{fmt, io};

/// The purpose of memory that a front-end shares in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The region of guest memory at this address.
    Region(Gpa),
    /// The dirty log.
    Log,
    /// The in-flight buffer.
    Inflight,
    /// The memory of a disk.
    Ram,
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Region(gpa) => write!(f, "region at {gpa}"),
            Self::Log => f.write_str("the log"),
            Self::Inflight => f.write_str("the in-flight buffer"),
            Self::Ram => f.write_str("the memory of the disk"),
        }
    }
}

/// Shared memory that cannot be mapped, or a map that cannot be made. The front-end is to blame, except for
/// [`Error::Mmap`].
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Memory of zero bytes.
    #[error("{purpose} is empty")]
    Empty {
        /// The purpose of the memory.
        purpose: Purpose,
    },
    /// Its words would not be aligned.
    #[error("{purpose}: mmap offset {offset:#x} is no multiple of 8")]
    Misaligned {
        /// The purpose of the memory.
        purpose: Purpose,
        /// Its offset in its file.
        offset: u64,
    },
    /// An end that does not fit into 64 bits.
    #[error("{purpose}: {field} {start:#x} plus size {len:#x} wraps around")]
    Wraps {
        /// The purpose of the memory.
        purpose: Purpose,
        /// The name of the address or offset that wraps.
        field: &'static str,
        /// The address or offset.
        start: u64,
        /// The size of the memory.
        len: u64,
    },
    /// The file ends before the memory does.
    #[error("{purpose} needs {needs:#x} bytes of its file, which has {has:#x}")]
    FileTooShort {
        /// The purpose of the memory.
        purpose: Purpose,
        /// Offset plus size.
        needs: u64,
        /// The file's size.
        has: u64,
    },
    /// The mapping would exceed a limit, or its file is slow.
    #[error("{purpose} cannot be mapped: {why}")]
    Refused {
        /// The purpose of the memory.
        purpose: Purpose,
        /// The reason.
        why: MappingRefused,
    },
    /// The kernel refused.
    #[error("{purpose} cannot be mapped")]
    Mmap {
        /// The purpose of the memory.
        purpose: Purpose,
        /// The reason.
        #[source]
        source: io::Error,
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
    /// The log has no bits for some of the guest memory.
    #[error("a log of {has} bytes is too small: guest memory up to {end} takes {needs} bytes")]
    LogTooSmall {
        /// Length of the log in bytes.
        has: u64,
        /// The length that is needed.
        needs: u64,
        /// The last byte of guest memory.
        end: Gpa,
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

/// An error for a range that is not, or not wholly, in guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{len:#x} bytes at {addr:#x} are not in guest memory")]
pub struct Unmapped {
    /// Start of the range, in the address space of the lookup.
    pub addr: u64,
    /// Length of the range in bytes.
    pub len: u64,
}
