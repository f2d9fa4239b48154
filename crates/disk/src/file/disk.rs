//! A disk in a file, and what direct I/O demands there.

use super::lacks::Lacks;
use crate::buffer_pool::BufferPool;
use crate::range::Ranges;
use crate::writeback::Writeback;
use crate::{Error, Limits, SECTOR};
use kickless_io::{BackingFile, Engine, FileId};
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tracing::Span;

/// A disk in a file.
#[derive(Debug)]
pub struct FileDisk {
    pub(super) file: Arc<File>,
    /// The same file, as engines know it.
    pub(super) backing: BackingFile,
    pub(super) identity: String,
    pub(super) limits: Limits,
    /// Bytes; a multiple of 512, and of what direct I/O needs. Only grows.
    pub(super) size: AtomicU64,
    /// Bytes that requests may reach: `size`, or less while the file is known to be shorter.
    pub(super) reach: AtomicU64,
    pub(super) device: bool,
    pub(super) merge: bool,
    pub(super) direct: Option<Direct>,
    /// Bounce buffers, and those that zeroes are written from.
    pub(super) pool: Arc<BufferPool>,
    /// Present if writes can be in the host's cache that are not in the file.
    pub(super) writeback: Option<Writeback>,
    /// Calls that the kernel has turned out to lack here.
    pub(super) lacks: Lacks,
    /// Names the disk in the log. Workers serve many.
    pub(super) span: Span,
}

/// What O_DIRECT demands, and what helps to meet it.
#[derive(Debug)]
pub(super) struct Direct {
    /// Offsets and lengths are multiples of this; a power of two, at least 512.
    pub(super) block: u64,
    /// Addresses are multiples of this; a power of two.
    pub(super) address: usize,
    /// Where a block is larger than a sector.
    pub(super) ranges: Option<Arc<Ranges>>,
}

impl FileDisk {
    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Relaxed: who hears of another size hears of it by a message that orders it.
    #[inline]
    pub(crate) fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    /// Returns what offsets and lengths of operations are multiples of.
    pub(crate) fn unit(&self) -> u64 {
        self.direct.as_ref().map_or(SECTOR, |direct| direct.block)
    }

    /// Returns the ranges that are being written, where a block is larger than a sector.
    pub(super) fn ranges(&self) -> Option<&Arc<Ranges>> {
        self.direct.as_ref()?.ranges.as_ref()
    }

    pub(crate) fn attach(&self, engine: &mut Engine) -> Result<FileId, Error> {
        let file = engine.register(&self.backing)?;
        engine.merge(file, self.merge);
        Ok(file)
    }
}
