//! A disk in a file, and the requirements of direct I/O.

use super::missing_syscalls::MissingSyscalls;
use crate::buffer_pool::BufferPool;
use crate::range::Ranges;
use crate::writeback::Writeback;
use crate::{Error, Limits, Options, SECTOR};
use kickless_io::Errno;
use kickless_io::{BackingFile, Engine, FileId};
use rustix::fs::{SeekFrom, seek};
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tracing::Span;

/// A disk in a file.
#[derive(Debug)]
pub struct FileDisk {
    pub(super) file: Arc<File>,
    pub(super) origin: Box<Origin>,
    /// The same file, in the form that engines use.
    pub(super) backing: BackingFile,
    pub(super) limits: Limits,
    /// The size in bytes: a multiple of 512 and of the block of direct I/O. It only grows while a guest uses
    /// the disk.
    pub(super) size: AtomicU64,
    /// The bytes that requests may access: `size`, or less while the file is known to be shorter.
    pub(super) accessible_size: AtomicU64,
    pub(super) device: bool,
    pub(super) direct: Option<Direct>,
    /// Bounce buffers, also for writing zeroes.
    pub(super) pool: Arc<BufferPool>,
    /// `None` if no writes can be in the host's cache.
    pub(super) writeback: Option<Writeback>,
    /// The calls that the kernel does not support for this file.
    pub(super) missing_syscalls: MissingSyscalls,
    /// Identifies the disk in the log, because workers serve many disks.
    pub(super) span: Span,
}

/// The source of a file. Requests do not need it.
#[derive(Debug)]
pub(super) struct Origin {
    /// The path that named the file. `None` if it came as a descriptor.
    pub(super) path: Option<PathBuf>,
    pub(super) options: Options,
    pub(super) identity: String,
}

/// The requirements of O_DIRECT, and the means to meet them.
#[derive(Debug)]
pub(super) struct Direct {
    /// The alignment of offsets and lengths: a power of two, at least 512.
    pub(super) block: u64,
    /// The alignment of addresses: a power of two.
    pub(super) address: usize,
    /// The ranges of current writes, if a block is larger than a sector.
    pub(super) ranges: Option<Arc<Ranges>>,
}

impl FileDisk {
    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Returns the size in bytes. The order is relaxed, because the message that announces a new size orders
    /// it.
    #[inline]
    pub(crate) fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    /// Returns the alignment of the offsets and lengths of operations.
    pub(crate) fn unit(&self) -> u64 {
        self.direct.as_ref().map_or(SECTOR, |direct| direct.block)
    }

    /// Returns the file for blocking calls.
    pub(crate) fn os_file(&self) -> &File {
        &self.file
    }

    /// Returns whether this is a block device.
    pub(crate) fn is_device(&self) -> bool {
        self.device
    }

    /// Returns the present length in bytes.
    pub(crate) fn bytes(&self) -> Result<u64, Errno> {
        seek(&*self.file, SeekFrom::End(0))
    }

    /// Returns the final result of a flush, given its result in the kernel.
    pub(crate) fn flushed<T>(&self, result: Result<T, Errno>) -> Result<T, Errno> {
        match &self.writeback {
            Some(writeback) => writeback.flushed(result),
            None => result,
        }
    }

    /// Returns the ranges of current writes, if a block is larger than a sector.
    pub(super) fn ranges(&self) -> Option<&Arc<Ranges>> {
        self.direct.as_ref()?.ranges.as_ref()
    }

    pub(crate) fn attach(&self, engine: &mut Engine) -> Result<FileId, Error> {
        let file = engine.register(&self.backing)?;
        engine.merge(file);
        Ok(file)
    }
}
