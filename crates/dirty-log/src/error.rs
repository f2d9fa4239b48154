//! Errors of mapping, unmapping and logging.

use kickless_memory::{Gpa, Iova, Unmapped};

/// A change of the tables or of the log that was refused. Nothing has changed then.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An address or a length that is not a multiple of 4 KiB, or no bytes.
    #[error("{len:#x} bytes at {addr:#x} are not whole pages")]
    Misaligned {
        /// The address.
        addr: u64,
        /// The length in bytes.
        len: u64,
    },
    /// A range that wraps, or ends after the last address of the tables (256 TiB).
    #[error("{len:#x} bytes at {addr:#x} end too high")]
    TooHigh {
        /// The address.
        addr: u64,
        /// The length in bytes.
        len: u64,
    },
    /// A slot that shares addresses with another.
    #[error("the slot at {gpa} overlaps the slot at {other}")]
    Overlaps {
        /// The new slot.
        gpa: Gpa,
        /// The existing slot.
        other: Gpa,
    },
    /// More than 512 slots.
    #[error("no room for one slot more")]
    TooMany,
    /// No slot begins there.
    #[error("no slot at {gpa}")]
    NoSuchSlot {
        /// The address.
        gpa: Gpa,
    },
    /// The slot is being logged. It cannot be removed or logged a second time.
    #[error("the slot at {gpa} is being logged")]
    Logged {
        /// The slot's address.
        gpa: Gpa,
    },
    /// A part of the range is mapped already. Unmap it first.
    #[error("a part of the {len:#x} bytes at {iova} is mapped already")]
    Mapped {
        /// The address.
        iova: Iova,
        /// The length in bytes.
        len: u64,
    },
    /// The target is not in guest memory.
    #[error(transparent)]
    Unmapped(#[from] Unmapped),
}
