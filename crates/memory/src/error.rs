//! What can be wrong with memory.

use crate::addr::{Gpa, UserAddr};
use crate::backing::Slow;
use crate::quota::Exhausted;
use std::io;

/// Why a slot or a map cannot be had. The front-end is to blame for each but [`Error::Mmap`].
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A region of zero bytes.
    #[error("region at {gpa} is empty")]
    Empty {
        /// Its guest-physical address.
        gpa: Gpa,
    },
    /// An end that does not fit into 64 bits.
    #[error("{field} plus size {len:#x} of the region at {gpa} wraps around")]
    Wraps {
        /// Its guest-physical address.
        gpa: Gpa,
        /// Which start wraps.
        field: &'static str,
        /// The region's size.
        len: u64,
    },
    /// The file ends before the region does.
    #[error("region at {gpa} needs {needs:#x} bytes of its file, which has {has:#x}")]
    FileTooShort {
        /// Its guest-physical address.
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
        /// How many were asked for.
        count: usize,
        /// How many there can be.
        max: usize,
    },
    /// No such region, so it cannot be removed.
    #[error("no region at {gpa} with user address {user} and size {len:#x}")]
    NoSuchSlot {
        /// The guest-physical address asked for.
        gpa: Gpa,
        /// The front-end's address asked for.
        user: UserAddr,
        /// The size asked for.
        len: u64,
    },
    /// It is too much, or its pages are not at hand.
    #[error("region at {gpa} cannot be mapped: {why}")]
    Refused {
        /// Its guest-physical address.
        gpa: Gpa,
        /// Why.
        why: Refused,
    },
    /// The kernel refused.
    #[error("region at {gpa} cannot be mapped")]
    Mmap {
        /// Its guest-physical address.
        gpa: Gpa,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Why a log cannot be had. The front-end is to blame for each but [`LogError::Mmap`].
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// A log of zero bytes.
    #[error("the log is empty")]
    Empty,
    /// Its words would not be aligned.
    #[error("the log's mmap offset {offset:#x} is no multiple of 8")]
    Misaligned {
        /// Where it begins in its file.
        offset: u64,
    },
    /// An end that does not fit into 64 bits.
    #[error("mmap offset {offset:#x} plus size {len:#x} of the log wraps around")]
    Wraps {
        /// Where it begins in its file.
        offset: u64,
        /// Its size in bytes.
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
    /// There is guest memory that it has no bits for.
    #[error("a log of {has} bytes is too small: guest memory up to {end} takes {needs} bytes")]
    TooSmall {
        /// Its size in bytes.
        has: u64,
        /// The size that would do.
        needs: u64,
        /// The last byte of guest memory.
        end: Gpa,
    },
    /// It is too much, or its pages are not at hand.
    #[error("the log cannot be mapped: {0}")]
    Refused(Refused),
    /// The kernel refused.
    #[error("the log cannot be mapped")]
    Mmap {
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Why the buffer of requests in flight cannot be had. The front-end is to blame for each but [`InflightError::Mmap`].
#[derive(Debug, thiserror::Error)]
pub enum InflightError {
    /// A buffer of zero bytes.
    #[error("the buffer of requests in flight is empty")]
    Empty,
    /// Its words would not be aligned.
    #[error("the mmap offset {offset:#x} of the buffer of requests in flight is no multiple of 8")]
    Misaligned {
        /// Where it begins in its file.
        offset: u64,
    },
    /// An end that does not fit into 64 bits.
    #[error("mmap offset {offset:#x} plus size {len:#x} of the buffer of requests in flight wraps around")]
    Wraps {
        /// Where it begins in its file.
        offset: u64,
        /// Its size in bytes.
        len: u64,
    },
    /// The file ends before the buffer does.
    #[error("the buffer of requests in flight needs {needs:#x} bytes of its file, which has {has:#x}")]
    FileTooShort {
        /// Offset plus size.
        needs: u64,
        /// The file's size.
        has: u64,
    },
    /// It is too much, or its pages are not at hand.
    #[error("the buffer of requests in flight cannot be mapped: {0}")]
    Refused(Refused),
    /// The kernel refused.
    #[error("the buffer of requests in flight cannot be mapped")]
    Mmap {
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Why a file is not mapped that could be. The front-end is to blame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(transparent)]
pub enum Refused {
    /// The device has too much mapped.
    Exhausted(#[from] Exhausted),
    /// A thread that touches it may wait for ever.
    Slow(#[from] Slow),
}

/// What went wrong with a mapping: its caller knows what the mapping is for.
#[derive(Debug)]
pub(crate) enum Failure {
    Wraps,
    TooShort { needs: u64, has: u64 },
    Refused(Refused),
    Os(io::Error),
}

impl From<rustix::io::Errno> for Failure {
    fn from(e: rustix::io::Errno) -> Self {
        Self::Os(e.into())
    }
}

/// A range that is not, or not wholly, in the memory that the front-end shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{len:#x} bytes at {addr:#x} are not in guest memory")]
pub struct Unmapped {
    /// Start of the range, in the space it was asked for in.
    pub addr: u64,
    /// Its length in bytes.
    pub len: u64,
}
