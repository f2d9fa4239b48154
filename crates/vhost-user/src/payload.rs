//! The parts of messages, with integers of the machine's own types.

use std::os::fd::OwnedFd;

use kickless_spec::vhost_user::{self as wire, IotlbAccess, IotlbKind, TransferDirection, TransferPhase};

/// A ring and a number that belongs to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VringState {
    /// The ring.
    pub index: u32,
    /// In SET_VRING_NUM, its size. In SET_VRING_BASE and GET_VRING_BASE, the next available index of a split
    /// ring in the low 16 bits, or both indices of a packed ring.
    pub num: u32,
}

/// The addresses of a ring's areas: front-end addresses, or IOVAs with ACCESS_PLATFORM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VringAddr {
    /// The ring.
    pub index: u32,
    /// Whether writes to the used ring are marked in the dirty log.
    pub log: bool,
    /// The descriptor table.
    pub desc_addr: u64,
    /// The used ring.
    pub used_addr: u64,
    /// The available ring.
    pub avail_addr: u64,
    /// The guest-physical address of the used ring, for marks in the dirty log. It need not be in any region.
    pub log_guest_addr: u64,
}

/// An eventfd, or another file descriptor, for a ring.
#[derive(Debug)]
pub struct VringFd {
    /// The ring.
    pub index: u8,
    /// The file descriptor. `None` means that there are no notifications: the back-end polls the ring for
    /// requests, or the driver polls it for completions.
    pub fd: Option<OwnedFd>,
}

/// A region of guest memory. Its values are not checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryRegion {
    /// Guest-physical address of its first byte.
    pub guest_addr: u64,
    /// Bytes.
    pub size: u64,
    /// Address of its first byte in the front-end.
    pub user_addr: u64,
    /// Offset of its first byte in the file.
    pub mmap_offset: u64,
}

/// The dirty log.
#[derive(Debug)]
pub enum LogBase {
    /// A file to share.
    Shared {
        /// Bytes.
        mmap_size: u64,
        /// Offset in the file of the byte whose bit 0 stands for the page at guest-physical address 0.
        mmap_offset: u64,
        /// The file. Without LOG_SHMFD there is none, and nothing can be logged.
        fd: Option<OwnedFd>,
    },
    /// An address in the front-end, which is useless to another process.
    Address(u64),
}

/// A change of the IOTLB, or a request for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Iotlb {
    /// The kind of message.
    pub kind: IotlbKind,
    /// The address that the device uses.
    pub iova: u64,
    /// Bytes.
    pub size: u64,
    /// The front-end address that `iova` translates to.
    pub user_addr: u64,
    /// The access that the device has, or wants. Empty for an invalidation.
    pub access: IotlbAccess,
}

/// A part of the configuration space.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// The offset of the first byte.
    pub offset: u32,
    /// `CONFIG_*` of [`kickless_spec::vhost_user`].
    pub flags: u32,
    /// The bytes, at most [`CONFIG_SIZE_MAX`](wire::CONFIG_SIZE_MAX).
    pub data: Vec<u8>,
    /// The number of bytes of payload after `data`. Some front-ends always send
    /// [`CONFIG_SIZE_MAX`](wire::CONFIG_SIZE_MAX) bytes, and the reply must be as long as the request.
    pub spare: usize,
}

impl Config {
    /// Returns the reply to this GET_CONFIG: the same part, with `data`, which is cut or zero-filled to the
    /// requested length.
    pub fn answer(&self, data: &[u8]) -> Self {
        let mut data = data.to_vec();
        data.resize(self.data.len(), 0);
        Self { data, ..*self }
    }
}

/// The in-flight buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Inflight {
    /// Bytes of the buffer. Zero in a reply means that there is no buffer.
    pub mmap_size: u64,
    /// Offset of the buffer in the file.
    pub mmap_offset: u64,
    /// Rings that the buffer has room for.
    pub num_queues: u16,
    /// Size of the rings.
    pub queue_size: u16,
}

/// Parameters of a transfer of the device's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceState {
    /// The direction: from the back-end or to it.
    pub direction: TransferDirection,
    /// The phase of the migration.
    pub phase: TransferPhase,
}

impl From<wire::VringState> for VringState {
    fn from(wire: wire::VringState) -> Self {
        Self { index: wire.index.get(), num: wire.num.get() }
    }
}

impl From<&wire::MemoryRegion> for MemoryRegion {
    fn from(wire: &wire::MemoryRegion) -> Self {
        Self {
            guest_addr: wire.guest_addr.get(),
            size: wire.size.get(),
            user_addr: wire.user_addr.get(),
            mmap_offset: wire.mmap_offset.get(),
        }
    }
}

impl From<&MemoryRegion> for wire::MemoryRegion {
    fn from(region: &MemoryRegion) -> Self {
        Self {
            guest_addr: region.guest_addr.into(),
            size: region.size.into(),
            user_addr: region.user_addr.into(),
            mmap_offset: region.mmap_offset.into(),
        }
    }
}

impl From<wire::Inflight> for Inflight {
    fn from(wire: wire::Inflight) -> Self {
        Self {
            mmap_size: wire.mmap_size.get(),
            mmap_offset: wire.mmap_offset.get(),
            num_queues: wire.num_queues.get(),
            queue_size: wire.queue_size.get(),
        }
    }
}

impl From<&Inflight> for wire::Inflight {
    fn from(inflight: &Inflight) -> Self {
        Self {
            mmap_size: inflight.mmap_size.into(),
            mmap_offset: inflight.mmap_offset.into(),
            num_queues: inflight.num_queues.into(),
            queue_size: inflight.queue_size.into(),
            padding: 0.into(),
        }
    }
}
