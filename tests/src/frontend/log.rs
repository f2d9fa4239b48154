//! Provides a front-end's log of written pages, and a copy of guest memory that the log updates, as in a
//! migration.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use anyhow::{Context, Result, ensure};
use kickless_memory::{Gpa, Log, UserAddr};
use kickless_spec::features::Features;
use kickless_vhost_user::{FrontendMessage as Message, LogBase, VringAddr};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::driver::Queue;
use crate::driver::memory::Ram;
use crate::frontend::{Frontend, addresses};

/// Bytes of a page.
pub const PAGE: u64 = 4096;
/// Name of the memfds. It tells a back-end's mappings of them from its other memory.
pub const MEMFD_NAME: &str = "kickless-test-log";
/// Offset of the log in its file. It is not 0, so that a back-end that ignores the offset fails.
const FILE_OFFSET: u64 = 8 * 21;

/// A dirty log that the front-end shares with a back-end.
pub struct Bitmap {
    file: OwnedFd,
    log: Log,
}

impl Bitmap {
    /// Creates a log of `len` zero bytes.
    ///
    /// # Errors
    /// The kernel has no memory.
    pub fn new(len: u64) -> Result<Bitmap> {
        let file = memfd_create(MEMFD_NAME, MemfdFlags::CLOEXEC)?;
        ftruncate(&file, FILE_OFFSET + len)?;
        let log = Log::map(file.as_fd(), FILE_OFFSET, len)?;
        Ok(Bitmap { file, log })
    }

    /// Creates a log that is just large enough for `ram`.
    ///
    /// # Errors
    /// The kernel has no memory.
    pub fn covering(ram: &Ram) -> Result<Bitmap> {
        Bitmap::new((ram.end() - 1) / PAGE / 8 + 1)
    }

    /// Returns a SET_LOG_BASE message with this log.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn message(&self) -> Result<Message> {
        let fd = Some(self.file.try_clone()?);
        Ok(Message::SetLogBase(LogBase::Shared { mmap_size: self.log.len(), mmap_offset: FILE_OFFSET, fd }))
    }

    /// Returns the length of the log and its offset in its file.
    pub fn extent(&self) -> (u64, u64) {
        (self.log.len(), FILE_OFFSET)
    }

    /// Truncates the file to no bytes. The log must not be read afterwards.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn truncate(&self) -> Result<()> {
        Ok(ftruncate(&self.file, 0)?)
    }

    /// Takes all marks and returns their page numbers.
    pub fn harvest(&self) -> BTreeSet<u64> {
        let mut pages = BTreeSet::new();
        self.log.harvest(|page| {
            pages.insert(page);
        });
        pages
    }
}

impl Frontend {
    /// Sends SET_LOG_BASE.
    ///
    /// # Errors
    /// The back-end refuses it.
    pub fn set_log(&mut self, bitmap: &Bitmap) -> Result<()> {
        self.order(&bitmap.message()?)
    }

    /// Sets or clears VHOST_F_LOG_ALL.
    ///
    /// # Errors
    /// The back-end refuses it.
    pub fn set_logging(&mut self, on: bool) -> Result<()> {
        let mut features = self.features();
        features.set(Features::LOG_ALL, on);
        self.set_features(features)
    }

    /// Sets or clears VHOST_VRING_F_LOG of a queue.
    ///
    /// # Errors
    /// The back-end refuses it.
    pub fn set_ring_logging(&mut self, ram: &Ram, queue: &Queue, on: bool) -> Result<()> {
        let addresses = addresses(queue);
        let used = ram.map().gpa_of(UserAddr(addresses.used_addr)).context("no such ring")?;
        self.order(&Message::SetVringAddr(VringAddr { log: on, log_guest_addr: used.0, ..addresses }))
    }
}

impl AsFd for Bitmap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// The destination's copy of guest memory: all of it once, then each page again that the log names.
pub struct Replica {
    start: u64,
    bytes: Vec<u8>,
    /// Pages that the device may write.
    allowed: BTreeSet<u64>,
    /// Number of pages copied.
    pub copied: u64,
}

impl Replica {
    /// Creates a copy of this memory without any content yet.
    pub fn new(ram: &Ram) -> Replica {
        let start = ram.region().guest_addr;
        let bytes = vec![0; (ram.end() - start) as usize];
        Replica { start, bytes, allowed: BTreeSet::new(), copied: 0 }
    }

    /// Allows the device to write these bytes.
    pub fn allow(&mut self, gpa: Gpa, len: u64) {
        self.allowed.extend(gpa.0 / PAGE..=(gpa.0 + len - 1) / PAGE);
    }

    /// Copies all memory. The log marks the pages that the device writes after that.
    ///
    /// # Errors
    /// The memory is not there any more.
    pub fn copy_all(&mut self, ram: &Ram) -> Result<()> {
        Ok(ram.map().read(Gpa(self.start), &mut self.bytes)?)
    }

    /// Copies the pages that the log names.
    ///
    /// # Errors
    /// The log names a page that the device must not write.
    pub fn take(&mut self, ram: &Ram, bitmap: &Bitmap) -> Result<()> {
        for page in bitmap.harvest() {
            ensure!(
                self.allowed.contains(&page),
                "page {page:#x} is marked, but the device must not write it"
            );
            let (gpa, at) = (page * PAGE, (page * PAGE - self.start) as usize);
            ram.map().read(Gpa(gpa), &mut self.bytes[at..at + PAGE as usize])?;
            self.copied += 1;
        }
        Ok(())
    }

    /// Compares bytes that the device does not write any more.
    ///
    /// # Errors
    /// The copy is out of date.
    pub fn compare(&self, ram: &Ram, gpa: Gpa, len: usize) -> Result<()> {
        let mut now = vec![0; len];
        ram.map().read(gpa, &mut now)?;
        let at = (gpa.0 - self.start) as usize;
        let differs = now.iter().zip(&self.bytes[at..]).position(|(now, then)| now != then);
        match differs {
            None => Ok(()),
            Some(offset) => anyhow::bail!(
                "byte {offset} of {len} at {gpa} was written after the last mark of its page: {:#x}, copied {:#x}",
                now[offset],
                self.bytes[at + offset]
            ),
        }
    }
}
