//! Memory that is shared with the back-end: regions, each behind a file of its own.

use std::ffi::CStr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kickless_memory::{Area, Gpa, Map, Slot, UserAddr};
use kickless_spec::vhost_user::MEM_TABLE_REGIONS_MAX;
use kickless_vhost_user::MemoryRegion;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use std::sync::Arc;

use crate::error::Error;

/// Regions begin and end on huge pages, whatever their files have: some back-ends register whole ones for DMA.
pub(crate) const HUGE_PAGE: u64 = 2 << 20;
/// The device's address of the first region. Not 0, so that an address that was forgotten is found out.
pub(crate) const FIRST: u64 = 4 << 30;
/// What the memfd is called in `/proc/PID/maps` of either side.
const NAME: &CStr = c"kickless-driver";

/// A run of shared memory. The device knows its bytes by addresses of ours, which are the same in each space but our own.
#[derive(Debug)]
pub(crate) struct Region {
    file: OwnedFd,
    offset: u64,
    gpa: u64,
    len: u64,
    map: Map,
    /// Which disk it is registered with.
    disk: u64,
    /// Its last handle was dropped: it goes with the next change of memory.
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

    /// Memory of our own, zeroed.
    fn own(gpa: u64, len: u64, huge_pages: bool, disk: u64) -> Result<Self, Error> {
        let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        if huge_pages {
            flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        }
        let file = memfd_create(NAME, flags).map_err(Error::os("shared memory"))?;
        ftruncate(&file, len).map_err(Error::os("shared memory"))?;
        if huge_pages {
            // A huge page that is missing is a signal on first use, which nobody could handle; so all of them now.
            rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, len)
                .map_err(Error::os("huge pages"))?;
        }
        // The back-end has the file too: were it to cut it short, our next access would be a signal that kills.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(Error::os("shared memory"))?;
        Self::new(file, 0, gpa, len, disk)
    }

    /// The device's address of its first byte.
    #[inline]
    pub(crate) fn gpa(&self) -> u64 {
        self.gpa
    }

    /// Bytes.
    #[inline]
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// For copies from and to it.
    #[inline]
    pub(crate) fn map(&self) -> &Map {
        &self.map
    }

    /// Direct access to `len` bytes at the device's address `gpa`, which must be aligned to `align`.
    pub(crate) fn area(&self, gpa: u64, len: usize, align: usize) -> Result<Area, Error> {
        let source = || std::io::Error::from(std::io::ErrorKind::InvalidInput);
        self.map
            .area(UserAddr(gpa), len, align)
            .map_err(|_| Error::Os { what: "shared memory", source: source() })
    }

    /// As messages tell of it.
    pub(crate) fn message(&self) -> MemoryRegion {
        let Self { gpa, len, offset, .. } = *self;
        MemoryRegion { guest_addr: gpa, size: len, user_addr: gpa, mmap_offset: offset, xen: None }
    }

    /// Another descriptor of its file, to hand out.
    pub(crate) fn duplicate(&self) -> Result<OwnedFd, Error> {
        self.file.try_clone().map_err(|source| Error::Os { what: "shared memory", source })
    }

    /// Nobody will use it any more once what is in flight is done.
    pub(crate) fn abandon(&self) {
        self.abandoned.store(true, Ordering::Relaxed);
    }

    /// Whether requests may still use it.
    #[inline]
    pub(crate) fn is_removed(&self) -> bool {
        self.removed.load(Ordering::Acquire)
    }

    /// Whether both are shared with the same back-end.
    #[inline]
    pub(crate) fn is_same_disk(&self, other: &Self) -> bool {
        self.disk == other.disk
    }
}

/// All regions of a disk. The first is our own: rings, what belongs to requests, and buffers.
#[derive(Debug)]
pub(crate) struct Regions {
    all: Vec<Arc<Region>>,
    next: u64,
    disk: u64,
}

/// Numbers for disks, so that a buffer is told from another disk's.
static DISKS: AtomicU64 = AtomicU64::new(0);

impl Regions {
    /// Just our own, of at least `len` bytes.
    pub(crate) fn new(len: u64, huge_pages: bool) -> Result<Self, Error> {
        let len = len.checked_next_multiple_of(HUGE_PAGE).ok_or(Error::NoMemory { len: usize::MAX })?;
        let disk = DISKS.fetch_add(1, Ordering::Relaxed);
        let own = Arc::new(Region::own(FIRST, len, huge_pages, disk)?);
        Ok(Self { next: next_gpa(&own), all: vec![own], disk })
    }

    /// All of them, our own first.
    pub(crate) fn all(&self) -> &[Arc<Region>] {
        &self.all
    }

    /// Takes a part of a file in, at an address that was never used before.
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

    /// Takes a region out.
    pub(crate) fn remove(&mut self, region: &Arc<Region>) {
        region.removed.store(true, Ordering::Release);
        self.all.retain(|other| !Arc::ptr_eq(other, region));
    }

    /// A region without a handle and without a request in flight.
    pub(crate) fn unused(&self) -> Option<Arc<Region>> {
        self.all
            .iter()
            .find(|region| region.abandoned.load(Ordering::Relaxed) && Arc::strong_count(region) == 1)
            .cloned()
    }
}

/// The address of the region after this one, a huge page between them.
fn next_gpa(region: &Region) -> u64 {
    (region.gpa + region.len).saturating_add(HUGE_PAGE).next_multiple_of(HUGE_PAGE)
}

/// Most regions where they can only be told all at once.
pub(crate) const TABLE_MAX: usize = MEM_TABLE_REGIONS_MAX;
