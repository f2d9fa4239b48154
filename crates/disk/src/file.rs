//! A raw image or a block device.

mod extents;
mod magic;
mod open;
mod request;
mod size;
mod topology;

use crate::buffer_pool::BufferPool;
use crate::range::Ranges;
use crate::writeback::Writeback;
use crate::{Error, Limits};
use extents::Lacks;
use kickless_io::{BackingFile, Engine, FileId};
use rustix::fs::fdatasync;
use rustix::io::retry_on_intr;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tracing::Span;

/// A disk in a file.
#[derive(Debug)]
pub struct FileDisk {
    file: Arc<File>,
    /// The same file, as engines know it.
    backing: BackingFile,
    identity: String,
    limits: Limits,
    /// Bytes; a multiple of 512, and of what direct I/O needs. Only grows.
    size: AtomicU64,
    /// Bytes that requests may reach: `size`, or less while the file is known to be shorter.
    reach: AtomicU64,
    device: bool,
    merge: bool,
    direct: Option<Direct>,
    /// Bounce buffers, and those that zeroes are written from.
    pool: Arc<BufferPool>,
    /// Present if writes can be in the host's cache that are not in the file.
    writeback: Option<Writeback>,
    /// Calls that the kernel has turned out to lack here.
    lacks: Lacks,
    /// Names the disk in the log. Workers serve many.
    span: Span,
}

/// What O_DIRECT demands, and what helps to meet it.
#[derive(Debug)]
struct Direct {
    /// Offsets and lengths are multiples of this; a power of two, at least 512.
    block: u64,
    /// Addresses are multiples of this; a power of two.
    address: usize,
    /// Where a block is larger than a sector.
    ranges: Option<Arc<Ranges>>,
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

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Puts what the host's cache holds of the file into the file. Waits until it is there.
    pub(crate) fn hand_over(&self) -> io::Result<()> {
        let Some(writeback) = &self.writeback else { return Ok(()) };
        Ok(writeback.flushed(retry_on_intr(|| fdatasync(&self.file)))?)
    }

    /// Lets go of what the host's cache holds of the file: it may have been written elsewhere since.
    pub(crate) fn take_over(&self) {
        if self.writeback.is_some()
            && let Err(error) = rustix::fs::fadvise(&self.file, 0, None, rustix::fs::Advice::DontNeed)
        {
            tracing::warn!(%error, "the host may have old data of the image in its cache");
        }
    }

    pub(crate) fn identity(&self) -> &str {
        &self.identity
    }

    /// What offsets and lengths of operations are multiples of.
    pub(crate) fn unit(&self) -> u64 {
        self.direct.as_ref().map_or(crate::SECTOR, |direct| direct.block)
    }

    pub(crate) fn attach(&self, engine: &mut Engine) -> Result<FileId, Error> {
        let file = engine.register(&self.backing)?;
        engine.merge(file, self.merge);
        Ok(file)
    }
}
