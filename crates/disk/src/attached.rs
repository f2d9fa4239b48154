//! A disk in one worker's engine.

use kickless_io::{Engine, FileId};

/// Tokens of operations that a queue carries out for the disk itself have slots from here on. A queue has at
/// most 32768 slots of its own.
pub const OWN_SLOTS: u32 = 1 << 31;

/// The registration of a disk with one engine, for one queue. Also holds the operations that the queue
/// carries out for the disk itself.
#[derive(Debug, Default)]
pub struct Attached {
    pub(crate) file: Option<FileId>,
}

impl Attached {
    /// Returns the registration of a disk with one file.
    pub(crate) fn of_file(file: FileId) -> Self {
        Self { file: Some(file) }
    }

    /// Returns the file of the disk. `None` if it has no operations in the engine.
    #[inline]
    pub fn file(&self) -> Option<FileId> {
        self.file
    }

    /// Returns the number of operations for the disk itself that this queue has begun and not ended.
    #[inline]
    pub fn in_flight(&self) -> usize {
        0
    }

    /// Returns whether [`Disk::submit_own`](crate::Disk::submit_own) has something to do.
    #[inline]
    pub fn is_due(&self) -> bool {
        false
    }

    pub(crate) fn unregister(self, engine: &mut Engine) {
        if let Some(file) = self.file {
            engine.unregister(file);
        }
    }
}
