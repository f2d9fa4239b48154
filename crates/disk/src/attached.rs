//! A disk in one worker's engine.

use crate::qcow2::attached::AttachedImages;
use kickless_io::{Engine, FileId};

/// Tokens of operations that a queue carries out for the tables of images have slots from here on. The slots
/// of its requests are below 32768.
pub const TABLE_OP_SLOTS: u32 = 1 << 31;

/// The registration of a disk with one engine, for one queue. Also holds the operations that the queue
/// carries out for the tables of images.
#[derive(Debug, Default)]
pub struct Attached {
    pub(crate) file: Option<FileId>,
    /// The files of backing images.
    pub(crate) under: Vec<FileId>,
    pub(crate) images: Option<Box<AttachedImages>>,
}

impl Attached {
    /// Returns the registration of a disk with one file.
    pub(crate) fn of_file(file: FileId) -> Self {
        Self { file: Some(file), ..Self::default() }
    }

    /// Returns the file of the disk. `None` if it has no operations in the engine.
    #[inline]
    pub fn file(&self) -> Option<FileId> {
        self.file
    }

    /// Returns the number of operations for the tables that this queue has begun and not ended.
    #[inline]
    pub fn in_flight(&self) -> usize {
        if let Some(images) = &self.images {
            return images.in_flight();
        }
        0
    }

    /// Returns whether [`Disk::submit_table_ops`](crate::Disk::submit_table_ops) has something to do.
    #[inline]
    pub fn is_due(&self) -> bool {
        if let Some(images) = &self.images {
            return images.is_due();
        }
        false
    }

    /// Returns the file of a layer: 0 is the disk's own, the others are backing images.
    #[inline]
    pub(crate) fn layer(&self, layer: usize) -> Option<FileId> {
        if layer == 0 { self.file } else { self.under.get(layer - 1).copied() }
    }

    /// Cancels the operations on all files, and those that the queue carries out for the tables.
    pub(crate) fn cancel(&mut self, engine: &mut Engine) {
        if let Some(images) = &mut self.images {
            images.cancel();
        }
        for file in self.file.iter().chain(&self.under) {
            engine.cancel(*file);
        }
    }

    pub(crate) fn unregister(self, engine: &mut Engine) {
        for file in self.file.into_iter().chain(self.under) {
            engine.unregister(file);
        }
    }
}
