//! A raw image or a block device.

mod extents;
mod open;
mod request;
mod size;
mod topology;

use crate::bounce::Pool;
use crate::range::Ranges;
use crate::{Error, Limits};
use extents::Lacks;
use kickless_io::{Engine, FileId};
pub use size::Resized;
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A disk in a file.
#[derive(Debug)]
pub struct FileDisk {
    file: Arc<File>,
    identity: String,
    limits: Limits,
    /// Bytes; a multiple of 512, and of what direct I/O needs. Only grows.
    size: AtomicU64,
    device: bool,
    direct: Option<Direct>,
    /// Bounce buffers, and those that zeroes are written from.
    pool: Arc<Pool>,
    /// Calls that the kernel has turned out to lack here.
    lacks: Lacks,
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

    pub(crate) fn identity(&self) -> &str {
        &self.identity
    }

    /// What offsets and lengths of operations are multiples of.
    pub(crate) fn unit(&self) -> u64 {
        self.direct.as_ref().map_or(crate::SECTOR, |direct| direct.block)
    }

    pub(crate) fn attach(&self, engine: &mut Engine) -> Result<FileId, Error> {
        Ok(engine.register(self.file.clone())?)
    }
}
