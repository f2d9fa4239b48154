//! Payload structures.

use bitflags::bitflags;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A ring and a number that belongs to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct VringState {
    /// The ring.
    pub index: U32,
    /// A size, a base or a switch, depending on the request.
    pub num: U32,
}

/// The addresses of a ring's areas: front-end addresses, or IOVAs with ACCESS_PLATFORM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct VringAddr {
    /// The ring.
    pub index: U32,
    /// [`VRING_F_LOG`](super::VRING_F_LOG).
    pub flags: U32,
    /// The descriptor table.
    pub desc: U64,
    /// The used ring.
    pub used: U64,
    /// The available ring.
    pub avail: U64,
    /// The guest-physical address of the used ring, for marks in the dirty log.
    pub log_guest_addr: U64,
}

/// The head of SET_MEM_TABLE. `num_regions` times [`MemoryRegion`] follow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct MemoryTableHeader {
    /// At most [`MEM_TABLE_REGIONS_MAX`](super::MEM_TABLE_REGIONS_MAX).
    pub num_regions: U32,
    /// Padding.
    pub padding: U32,
}

/// A region of guest memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct MemoryRegion {
    /// Guest-physical address of its first byte.
    pub guest_addr: U64,
    /// Bytes.
    pub size: U64,
    /// Address of its first byte in the front-end.
    pub user_addr: U64,
    /// Offset of its first byte in the file.
    pub mmap_offset: U64,
}

/// ADD_MEM_REG and REM_MEM_REG.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SingleMemoryRegion {
    /// Padding.
    pub padding: U64,
    /// The region.
    pub region: MemoryRegion,
}

/// The shared dirty log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Log {
    /// Bytes.
    pub mmap_size: U64,
    /// Offset in the file of the byte whose bit 0 stands for the page at guest-physical address 0.
    pub mmap_offset: U64,
}

/// `struct vhost_iotlb_msg`. The padding is the C structure's; the specification does not show it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct IotlbMsg {
    /// The address as the device sees it.
    pub iova: U64,
    /// Bytes.
    pub size: U64,
    /// The front-end address that `iova` translates to.
    pub user_addr: U64,
    /// [`IotlbAccess`].
    pub perm: u8,
    /// [`IotlbKind`].
    pub kind: u8,
    /// Padding.
    pub padding: [u8; 6],
}

impl IotlbMsg {
    /// Bytes of the structure without the padding.
    pub const UNPADDED: usize = core::mem::offset_of!(Self, padding);
}

bitflags! {
    /// [`IotlbMsg::perm`].
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct IotlbAccess: u8 {
        /// The device may read, or wants to.
        const READ = 1;
        /// The device may write, or wants to.
        const WRITE = 2;
    }
}

/// [`IotlbMsg::kind`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum IotlbKind {
    /// The back-end has no translation.
    Miss = 1,
    /// A new translation.
    Update = 2,
    /// The back-end must drop these translations.
    Invalidate = 3,
    /// The translation does not allow the access.
    AccessFail = 4,
}

impl IotlbKind {
    /// Returns the kind with this number.
    pub const fn from_raw(number: u8) -> Option<Self> {
        match number {
            1 => Some(Self::Miss),
            2 => Some(Self::Update),
            3 => Some(Self::Invalidate),
            4 => Some(Self::AccessFail),
            _ => None,
        }
    }
}

/// The head of GET_CONFIG and SET_CONFIG. The bytes follow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ConfigHeader {
    /// Offset in the configuration space.
    pub offset: U32,
    /// Bytes; at most [`CONFIG_SIZE_MAX`](super::CONFIG_SIZE_MAX).
    pub size: U32,
    /// `CONFIG_*`.
    pub flags: U32,
}

/// The in-flight buffer. The specification does not show the padding, which is the C structure's. QEMU
/// requires it in the reply to GET_INFLIGHT_FD.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Inflight {
    /// Bytes of the buffer.
    pub mmap_size: U64,
    /// Offset of the buffer in the file.
    pub mmap_offset: U64,
    /// Rings that the buffer has room for.
    pub num_queues: U16,
    /// Size of the rings.
    pub queue_size: U16,
    /// Padding.
    pub padding: U32,
}

impl Inflight {
    /// Bytes of the structure without the padding.
    pub const UNPADDED: usize = core::mem::offset_of!(Self, padding);
}

/// Parameters of SET_DEVICE_STATE_FD.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DeviceStateTransfer {
    /// [`TransferDirection`].
    pub direction: U32,
    /// [`TransferPhase`].
    pub phase: U32,
}

/// [`DeviceStateTransfer::direction`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum TransferDirection {
    /// From the back-end to the front-end, at the source of a migration.
    Save = 0,
    /// From the front-end to the back-end, at its destination.
    Load = 1,
}

impl TransferDirection {
    /// Returns the direction with this number.
    pub const fn from_raw(number: u32) -> Option<Self> {
        match number {
            0 => Some(Self::Save),
            1 => Some(Self::Load),
            _ => None,
        }
    }
}

/// [`DeviceStateTransfer::phase`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum TransferPhase {
    /// The guest and the device are stopped.
    Stopped = 0,
}

impl TransferPhase {
    /// Returns the phase with this number.
    pub const fn from_raw(number: u32) -> Option<Self> {
        match number {
            0 => Some(Self::Stopped),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vhost_user::Header;

    #[test]
    fn layout() {
        // Counted by hand from the specification. It leaves padding out; that is from the C structures.
        assert_eq!(size_of::<Header>(), 12);
        assert_eq!((size_of::<VringState>(), size_of::<VringAddr>()), (8, 40));
        assert_eq!((size_of::<MemoryTableHeader>(), size_of::<MemoryRegion>()), (8, 32));
        assert_eq!((size_of::<SingleMemoryRegion>(), size_of::<Log>()), (40, 16));
        assert_eq!((size_of::<IotlbMsg>(), IotlbMsg::UNPADDED), (32, 26));
        assert_eq!((size_of::<ConfigHeader>(), size_of::<DeviceStateTransfer>()), (12, 8));
        assert_eq!((size_of::<Inflight>(), Inflight::UNPADDED), (24, 20));
        assert_eq!(core::mem::offset_of!(VringAddr, log_guest_addr), 32);
    }
}
