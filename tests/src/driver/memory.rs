//! Memory of a guest that there is none of: memfds that the back-end maps, and that are mapped here too.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use anyhow::{Context, Result};
use kickless_memory::{Area, Gpa, Map, Slot, UserAddr};
use kickless_vhost_user::MemoryRegion;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

/// The memfds' name, by which a back-end's mappings of them can be told from its own memory.
pub const MEMFD_NAME: &str = "kickless-test-guest";

/// The memory's bytes do not begin where its file does: who forgets the offset is found out.
const FILE_OFFSET: u64 = 0x3000;
/// What separates front-end addresses from guest-physical ones: who takes one for the other is found out too.
const USER_BASE: u64 = 0x7e00_0000_0000;

/// One region of guest memory, given out from its start.
pub struct Ram {
    file: OwnedFd,
    region: MemoryRegion,
    map: Arc<Map>,
    taken: u64,
}

impl Ram {
    /// `len` bytes at `gpa`.
    ///
    /// # Errors
    /// The kernel has no memory, or the range wraps.
    pub fn new(gpa: u64, len: u64) -> Result<Ram> {
        let file = memfd_create(MEMFD_NAME, MemfdFlags::CLOEXEC)?;
        ftruncate(&file, FILE_OFFSET + len)?;
        let user_addr = USER_BASE + gpa;
        let region =
            MemoryRegion { guest_addr: gpa, size: len, user_addr, mmap_offset: FILE_OFFSET, xen: None };
        let slot = Slot::map(&file, FILE_OFFSET, Gpa(gpa), UserAddr(user_addr), len)?;
        Ok(Ram { file, region, map: Arc::new(Map::new(vec![slot])?), taken: 0 })
    }

    /// Takes `len` bytes of it, aligned to `align`.
    ///
    /// # Errors
    /// There is not that much left.
    pub fn take(&mut self, len: usize, align: u64) -> Result<Gpa> {
        let start = self.taken.next_multiple_of(align);
        let end = start + len as u64;
        anyhow::ensure!(end <= self.region.size, "guest memory of {} bytes is too small", self.region.size);
        self.taken = end;
        Ok(Gpa(self.region.guest_addr + start))
    }

    /// Direct access to `len` bytes at `gpa`, which must be aligned to `align`.
    ///
    /// # Errors
    /// They are not all in this memory.
    pub fn area(&self, gpa: Gpa, len: usize, align: usize) -> Result<Area> {
        self.map.area(UserAddr(self.user(gpa)), len, align).context("not in this memory")
    }

    /// The front-end's address of `gpa`.
    pub fn user(&self, gpa: Gpa) -> u64 {
        USER_BASE + gpa.0
    }

    /// For reading and writing it.
    pub fn map(&self) -> &Arc<Map> {
        &self.map
    }

    /// As messages tell of it in two regions, of which the second begins at `gpa`.
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
                xen: None,
            };
            Ok((region, self.file.try_clone()?))
        };
        Ok(vec![part(0, first)?, part(first, size - first)?])
    }

    /// Cuts the file off at `gpa`: what comes from there on is no memory any more, on either side.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn truncate(&self, gpa: Gpa) -> Result<()> {
        Ok(ftruncate(&self.file, FILE_OFFSET + (gpa.0 - self.region.guest_addr))?)
    }

    /// As messages tell of it.
    pub fn region(&self) -> MemoryRegion {
        self.region
    }

    /// The first address after it.
    pub fn end(&self) -> u64 {
        self.region.guest_addr + self.region.size
    }

    /// As messages tell of it, with its file.
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
