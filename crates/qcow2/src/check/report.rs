//! The result of a check.

use crate::format::bad_image::BadImage;
use std::io;

/// The numbers of faults in an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Clusters whose refcount is above the number of references.
    pub leaks: u64,
    /// Clusters whose refcount is below the number of references.
    pub low: u64,
    /// Active entries whose flag COPIED contradicts the refcount.
    pub copied: u64,
    /// Entries that cannot be true, or refer to a place beyond the end of the file.
    pub bad: u64,
    /// References to a table by anything but its only owner.
    pub overlaps: u64,
}

impl Report {
    /// Returns whether there are no faults but leaks.
    pub fn is_sound(&self) -> bool {
        Self { leaks: 0, ..*self } == Self::default()
    }
}

/// The reason why an image cannot be checked or repaired.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// A read, write or sync of the file failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The header or the snapshot table is not valid.
    #[error(transparent)]
    Bad(#[from] BadImage),
    /// The tables refer to wrong places.
    #[error("its tables are damaged: repair it with `qemu-img check -r all`")]
    Damaged,
    /// The memory and the time for the check have bounds.
    #[error("it is too large to be checked here: repair it with `qemu-img check -r all`")]
    TooLarge,
}
