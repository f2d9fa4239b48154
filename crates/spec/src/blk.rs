//! virtio-blk (virtio 1.3, section 5.2).

use bitflags::bitflags;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The unit of `capacity` and of `Header::sector`, whatever the block size.
pub const SECTOR_SIZE: u64 = 512;
/// Length of the identity string of GET_ID.
pub const ID_LEN: usize = 20;

bitflags! {
    /// Feature bits of a block device (virtio 1.3, section 5.2.3).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct BlkFeatures: u64 {
        /// `size_max` is valid.
        const SIZE_MAX = 1 << 1;
        /// `seg_max` is valid.
        const SEG_MAX = 1 << 2;
        /// `geometry` is valid.
        const GEOMETRY = 1 << 4;
        /// The device is read-only.
        const RO = 1 << 5;
        /// `blk_size` is valid.
        const BLK_SIZE = 1 << 6;
        /// FLUSH is supported.
        const FLUSH = 1 << 9;
        /// `topology` is valid.
        const TOPOLOGY = 1 << 10;
        /// The driver may switch `writeback`.
        const CONFIG_WCE = 1 << 11;
        /// `num_queues` is valid.
        const MQ = 1 << 12;
        /// DISCARD is supported.
        const DISCARD = 1 << 13;
        /// WRITE_ZEROES is supported.
        const WRITE_ZEROES = 1 << 14;
        /// GET_LIFETIME is supported.
        const LIFETIME = 1 << 15;
        /// SECURE_ERASE is supported.
        const SECURE_ERASE = 1 << 16;
        /// The device is zoned.
        const ZONED = 1 << 17;
    }
}

/// Request type: read from the disk.
pub const T_IN: u32 = 0;
/// Request type: write to the disk.
pub const T_OUT: u32 = 1;
/// Request type: make completed writes durable.
pub const T_FLUSH: u32 = 4;
/// Request type: [`T_FLUSH`] of a legacy driver (virtio 0.9.5, appendix D).
pub const T_FLUSH_OUT: u32 = 5;
/// Request type: the identity string.
pub const T_GET_ID: u32 = 8;
/// Request type: lifetime figures.
pub const T_GET_LIFETIME: u32 = 10;
/// Request type: discard.
pub const T_DISCARD: u32 = 11;
/// Request type: write zeroes.
pub const T_WRITE_ZEROES: u32 = 13;
/// Request type: secure erase.
pub const T_SECURE_ERASE: u32 = 14;

/// Flag of a request type of a legacy driver: a barrier. It has a meaning only with a feature that devices
/// of virtio 1 do not have, but some firmware sets it in each request.
pub const T_BARRIER: u32 = 1 << 31;

/// Status: done.
pub const S_OK: u8 = 0;
/// Status: device or driver error.
pub const S_IOERR: u8 = 1;
/// Status: request type not supported.
pub const S_UNSUPP: u8 = 2;

/// The readable head of each request (`struct virtio_blk_req`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// `T_*`.
    pub kind: U32,
    /// Reserved; legacy drivers put a priority here.
    pub reserved: U32,
    /// First 512-byte sector.
    pub sector: U64,
}

/// One range of a discard, a secure erase or a write of zeroes (`struct virtio_blk_discard_write_zeroes`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Segment {
    /// First 512-byte sector.
    pub sector: U64,
    /// Number of 512-byte sectors.
    pub num_sectors: U32,
    /// [`SEGMENT_UNMAP`] or 0.
    pub flags: U32,
}

/// Flag of a write-zeroes segment: the device may deallocate the space.
pub const SEGMENT_UNMAP: u32 = 1;

/// `struct virtio_blk_config`. Fields of features that were not offered are zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Config {
    /// In 512-byte sectors.
    pub capacity: U64,
    /// Largest segment in bytes.
    pub size_max: U32,
    /// Most data segments in a request.
    pub seg_max: U32,
    /// Cylinders.
    pub cylinders: U16,
    /// Heads.
    pub heads: u8,
    /// Sectors for each track.
    pub sectors: u8,
    /// Logical block size in bytes. A recommendation, not a limit.
    pub blk_size: U32,
    /// log2 of the logical blocks in a physical one.
    pub physical_block_exp: u8,
    /// Offset of the first aligned logical block.
    pub alignment_offset: u8,
    /// Suggested minimum I/O in logical blocks.
    pub min_io_size: U16,
    /// Suggested optimal (largest efficient) I/O in logical blocks.
    pub opt_io_size: U32,
    /// 1: a write may complete before it is durable; 0: it may not.
    pub writeback: u8,
    /// Padding.
    pub unused0: u8,
    /// Number of request queues.
    pub num_queues: U16,
    /// Most sectors in a discard segment.
    pub max_discard_sectors: U32,
    /// Most discard segments in a request.
    pub max_discard_seg: U32,
    /// Discard alignment in sectors.
    pub discard_sector_alignment: U32,
    /// Most sectors in a write-zeroes segment.
    pub max_write_zeroes_sectors: U32,
    /// Most write-zeroes segments in a request.
    pub max_write_zeroes_seg: U32,
    /// Whether write-zeroes may deallocate.
    pub write_zeroes_may_unmap: u8,
    /// Padding.
    pub unused1: [u8; 3],
    /// Most sectors in a secure-erase segment.
    pub max_secure_erase_sectors: U32,
    /// Most secure-erase segments in a request.
    pub max_secure_erase_seg: U32,
    /// Secure-erase alignment in sectors.
    pub secure_erase_sector_alignment: U32,
}

/// Offset of [`Config::writeback`], the only field that a driver may write.
pub const CONFIG_WRITEBACK: usize = core::mem::offset_of!(Config, writeback);

#[cfg(test)]
mod tests {
    use super::*;
    use core::mem::offset_of;

    #[test]
    fn config_offsets() {
        // virtio 1.3, section 5.2.4, counted by hand.
        assert_eq!(offset_of!(Config, blk_size), 20);
        assert_eq!(offset_of!(Config, opt_io_size), 28);
        assert_eq!(CONFIG_WRITEBACK, 32);
        assert_eq!(offset_of!(Config, num_queues), 34);
        assert_eq!(offset_of!(Config, write_zeroes_may_unmap), 56);
        assert_eq!(size_of::<Config>(), 72);
        assert_eq!(size_of::<Header>(), 16);
        assert_eq!(size_of::<Segment>(), 16);
    }
}
