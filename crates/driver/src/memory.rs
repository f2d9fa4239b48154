//! Memory shared with the back-end: regions, each backed by a file.

use std::ffi::CStr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kickless_memory::{Area, Gpa, Map, Slot, UserAddr};
use kickless_spec::vhost_user::MEM_TABLE_REGIONS_MAX;
use kickless_vhost_user::MemoryRegion;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use std::sync::Arc;

use crate::error::Error;

/// The alignment of regions, also of those whose files have small pages. Some back-ends register whole huge
/// pages for DMA.
pub(crate) const HUGE_PAGE: u64 = 2 << 20;
/// The device's address of the first region. It is not 0, so that a missing address causes an error.
pub(crate) const FIRST: u64 = 4 << 30;
/// The name of the memfd in `/proc/PID/maps` of either process.
const NAME: &CStr = c"kickless-driver";

/// A range of shared memory. The driver chooses its address. Messages and rings use this address both as the
/// guest-physical and as the user-space one. This process maps the region at another address.
#[derive(Debug)]
pub(crate) struct Region {
    file: OwnedFd,
    offset: u64,
    gpa: u64,
    len: u64,
    map: Map,
    /// The number of the disk that it is registered with.
    disk: u64,
    /// The [`Registered`](crate::Registered) was dropped. When no buffer of the region is left, the next
    /// registration removes it.
    abandoned: AtomicBool,
    /// The back-end does not have it any more.
    removed: AtomicBool,
}

impl Region {
    fn new(file: OwnedFd, offset: u64, gpa: u64, len: u64, disk: u64) -> Result<Self, Error> {
        let slot = Slot::map(&file, offset, Gpa(gpa), UserAddr(gpa), len).map_err(Error::Memory)?;
        let map = Map::new(vec![slot]).map_err(Error::Memory)?;
        let (abandoned, removed) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Self { file, offset, gpa, len, map, disk, abandoned, removed })
    }

    /// Makes zeroed memory of the driver's own.
    fn own(gpa: u64, len: u64, huge_pages: bool, disk: u64) -> Result<Self, Error> {
        let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        if huge_pages {
            flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        }
        let file = memfd_create(NAME, flags).map_err(Error::os("shared memory"))?;
        ftruncate(&file, len).map_err(Error::os("shared memory"))?;
        if huge_pages {
            // A missing huge page would cause an unhandled signal on the first use. So all of them are
            // allocated now.
            rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, len)
                .map_err(Error::os("huge pages"))?;
        }
        // The back-end has the file too. If it truncated the file, our next access would cause a fatal
        // signal.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(Error::os("shared memory"))?;
        Self::new(file, 0, gpa, len, disk)
    }

    /// Returns the device's address of the first byte.
    #[inline]
    pub(crate) fn gpa(&self) -> u64 {
        self.gpa
    }

    /// Returns the length in bytes.
    #[inline]
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Returns the map, for copies from and to the region.
    #[inline]
    pub(crate) fn map(&self) -> &Map {
        &self.map
    }

    /// Returns direct access to `len` bytes at the device's address `gpa`, which must be aligned to `align`.
    pub(crate) fn area(&self, gpa: u64, len: usize, align: usize) -> Result<Area, Error> {
        let source = || std::io::Error::from(std::io::ErrorKind::InvalidInput);
        self.map
            .area(UserAddr(gpa), len, align)
            .map_err(|_| Error::Os { what: "shared memory", source: source() })
    }

    /// Returns the region in the form that messages use.
    pub(crate) fn message(&self) -> MemoryRegion {
        let Self { gpa, len, offset, .. } = *self;
        MemoryRegion { guest_addr: gpa, size: len, user_addr: gpa, mmap_offset: offset }
    }

    /// Returns another descriptor of the file, for the back-end.
    pub(crate) fn duplicate(&self) -> Result<OwnedFd, Error> {
        self.file.try_clone().map_err(|source| Error::Os { what: "shared memory", source })
    }

    /// Marks the region for removal, once no buffer of it is left.
    pub(crate) fn abandon(&self) {
        self.abandoned.store(true, Ordering::Relaxed);
    }

    /// Returns whether the region was removed, so that new requests must not use it.
    #[inline]
    pub(crate) fn is_removed(&self) -> bool {
        self.removed.load(Ordering::Acquire)
    }

    /// Returns whether both regions belong to the same disk.
    #[inline]
    pub(crate) fn is_same_disk(&self, other: &Self) -> bool {
        self.disk == other.disk
    }
}

/// All regions of a disk. The first is the driver's own: rings, blocks of requests, and buffers.
#[derive(Debug)]
pub(crate) struct Regions {
    all: Vec<Arc<Region>>,
    next: u64,
    disk: u64,
}

/// The number of the next disk. It tells the buffers of one disk from those of another.
static DISKS: AtomicU64 = AtomicU64::new(0);

impl Regions {
    /// Makes the list with only the own region, of at least `len` bytes.
    pub(crate) fn new(len: u64, huge_pages: bool) -> Result<Self, Error> {
        let len = len.checked_next_multiple_of(HUGE_PAGE).ok_or(Error::NoMemory { len: usize::MAX })?;
        let disk = DISKS.fetch_add(1, Ordering::Relaxed);
        let own = Arc::new(Region::own(FIRST, len, huge_pages, disk)?);
        Ok(Self { next: next_gpa(&own), all: vec![own], disk })
    }

    /// Returns all regions, the own one first.
    pub(crate) fn all(&self) -> &[Arc<Region>] {
        &self.all
    }

    /// Adds a part of a file, at an address that was never used before.
    pub(crate) fn add(
        &mut self,
        file: impl AsFd,
        offset: u64,
        len: u64,
        max: usize,
    ) -> Result<Arc<Region>, Error> {
        if self.all.len() >= max {
            return Err(Error::TooManyRegions { max });
        }
        let file = file.as_fd().try_clone_to_owned();
        let file = file.map_err(|source| Error::Os { what: "memory to register", source })?;
        let region = Arc::new(Region::new(file, offset, self.next, len, self.disk)?);
        self.next = next_gpa(&region);
        self.all.push(region.clone());
        Ok(region)
    }

    /// Removes a region.
    pub(crate) fn remove(&mut self, region: &Arc<Region>) {
        region.removed.store(true, Ordering::Release);
        self.all.retain(|other| !Arc::ptr_eq(other, region));
    }

    /// Returns a region whose handle and buffers were all dropped, if there is one.
    pub(crate) fn unused(&self) -> Option<Arc<Region>> {
        self.all
            .iter()
            .find(|region| region.abandoned.load(Ordering::Relaxed) && Arc::strong_count(region) == 1)
            .cloned()
    }
}

/// Returns the address for the region after this one, with a huge page between them.
fn next_gpa(region: &Region) -> u64 {
    (region.gpa + region.len).saturating_add(HUGE_PAGE).next_multiple_of(HUGE_PAGE)
}

/// The largest number of regions in a whole table.
pub(crate) const TABLE_MAX: usize = MEM_TABLE_REGIONS_MAX;
