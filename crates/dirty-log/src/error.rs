//! What cannot be mapped, unmapped or logged.

use kickless_memory::{Gpa, Iova, Unmapped};

/// Why a change of the tables, or of the log, cannot be had. Nothing has changed then.
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
    /// A range that ends behind the last address that tables can hold (256 TiB), or wraps.
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
        /// The newcomer.
        gpa: Gpa,
        /// The one that is there.
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
    /// The slot is being logged: it cannot be removed, nor logged a second time.
    #[error("the slot at {gpa} is being logged")]
    Logged {
        /// Its address.
        gpa: Gpa,
    },
    /// Something is mapped there; it is to be unmapped first.
    #[error("something is mapped among the {len:#x} bytes at {iova}")]
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
