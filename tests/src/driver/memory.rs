//! Provides guest memory without a guest: memfds that both the test and the back-end map.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use anyhow::{Context, Result};
use kickless_memory::{Area, Gpa, Map, Slot, UserAddr};
use kickless_vhost_user::MemoryRegion;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

/// Name of the memfds. It tells a back-end's mappings of them from its own memory.
pub const MEMFD_NAME: &str = "kickless-test-guest";

/// Offset of the memory in its file. It is not 0, so that a back-end that ignores the offset fails.
const FILE_OFFSET: u64 = 0x3000;
/// Distance of front-end addresses from guest-physical ones, so that a back-end that confuses them fails.
const USER_BASE: u64 = 0x7e00_0000_0000;

/// One region of guest memory. [`Ram::take`] allocates from its start.
pub struct Ram {
    file: OwnedFd,
    region: MemoryRegion,
    map: Arc<Map>,
    taken: u64,
}

impl Ram {
    /// Creates `len` bytes of guest memory at `gpa`.
    ///
    /// # Errors
    /// The kernel has no memory, or the range wraps.
    pub fn new(gpa: u64, len: u64) -> Result<Ram> {
        let file = memfd_create(MEMFD_NAME, MemfdFlags::CLOEXEC)?;
        ftruncate(&file, FILE_OFFSET + len)?;
        let user_addr = USER_BASE + gpa;
        let region = MemoryRegion { guest_addr: gpa, size: len, user_addr, mmap_offset: FILE_OFFSET };
        let slot = Slot::map(&file, FILE_OFFSET, Gpa(gpa), UserAddr(user_addr), len)?;
        Ok(Ram { file, region, map: Arc::new(Map::new(vec![slot])?), taken: 0 })
    }

    /// Allocates `len` bytes, aligned to `align`.
    ///
    /// # Errors
    /// The region has not enough bytes left.
    pub fn take(&mut self, len: usize, align: u64) -> Result<Gpa> {
        let start = self.taken.next_multiple_of(align);
        let end = start + len as u64;
        anyhow::ensure!(end <= self.region.size, "guest memory of {} bytes is too small", self.region.size);
        self.taken = end;
        Ok(Gpa(self.region.guest_addr + start))
    }

    /// Returns direct access to `len` bytes at `gpa`, which must be aligned to `align`.
    ///
    /// # Errors
    /// The range is not in this memory.
    pub fn area(&self, gpa: Gpa, len: usize, align: usize) -> Result<Area> {
        self.map.area(UserAddr(self.user(gpa)), len, align).context("not in this memory")
    }

    /// Returns the front-end's address of `gpa`.
    pub fn user(&self, gpa: Gpa) -> u64 {
        USER_BASE + gpa.0
    }

    /// Returns the map, which reads and writes the memory.
    pub fn map(&self) -> &Arc<Map> {
        &self.map
    }

    /// Describes the memory for a message as two regions. The second one begins at `gpa`.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn regions_and_files(&self, gpa: Gpa) -> Result<Vec<(MemoryRegion, OwnedFd)>> {
        let (first, size) = (gpa.0 - self.region.guest_addr, self.region.size);
        let part = |start: u64, size: u64| -> Result<_> {
            let MemoryRegion { guest_addr, user_addr, mmap_offset, .. } = self.region;
            let region = MemoryRegion {
                guest_addr: guest_addr + start,
                user_addr: user_addr + start,
                mmap_offset: mmap_offset + start,
                size,
            };
            Ok((region, self.file.try_clone()?))
        };
        Ok(vec![part(0, first)?, part(first, size - first)?])
    }

    /// Truncates the file at `gpa`. The range from there on stops being memory for the test and the
    /// back-end.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn truncate(&self, gpa: Gpa) -> Result<()> {
        Ok(ftruncate(&self.file, FILE_OFFSET + (gpa.0 - self.region.guest_addr))?)
    }

    /// Describes the memory for a message.
    pub fn region(&self) -> MemoryRegion {
        self.region
    }

    /// Returns the first address after the memory.
    pub fn end(&self) -> u64 {
        self.region.guest_addr + self.region.size
    }

    /// Describes the memory for a message, with its file.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn region_and_file(&self) -> Result<(MemoryRegion, OwnedFd)> {
        Ok((self.region, self.file.try_clone()?))
    }
}

impl AsFd for Ram {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
