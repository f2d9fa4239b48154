//! The capabilities of a disk.

/// The bytes of a sector: the unit of virtio-blk's addresses and lengths, for any block size.
pub const SECTOR: u64 = 512;

/// The capabilities of a disk, in the terms of virtio-blk's configuration space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The bytes of a logical block, a power of two. A block device has its own, and others have 512.
    ///
    /// The other fields count in these. Requests of single sectors are always served.
    pub block_size: u32,
    /// The binary logarithm of the number of logical blocks in a physical block.
    pub physical_block_exp: u8,
    /// The number of the first logical block that begins a physical block.
    pub alignment_offset: u8,
    /// The smallest efficient request, in logical blocks; 0 if unknown.
    pub min_io_size: u16,
    /// The best size of a request, in logical blocks; 0 if unknown.
    pub opt_io_size: u32,
    /// Refuse writes.
    pub read_only: bool,
    /// The limits of discards; `None` if they are not supported.
    pub discard: Option<RangeLimits>,
    /// The limits of write-zeroes requests; `None` if they are not supported.
    pub write_zeroes: Option<RangeLimits>,
    /// Writing zeroes may free the space.
    pub zeroes_may_unmap: bool,
}

/// The limits of one request on ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangeLimits {
    /// The largest number of sectors of a range.
    pub sectors_max: u32,
    /// The largest number of ranges.
    pub ranges_max: u32,
    /// The preferred alignment in sectors; not 0.
    pub alignment: u32,
}

impl Limits {
    /// Returns the limits of a disk without optional features.
    pub(crate) fn plain(read_only: bool) -> Self {
        Self {
            block_size: SECTOR as u32,
            physical_block_exp: 0,
            alignment_offset: 0,
            min_io_size: 0,
            opt_io_size: 0,
            read_only,
            discard: None,
            write_zeroes: None,
            zeroes_may_unmap: false,
        }
    }
}

impl RangeLimits {
    /// Returns limits for ranges of at most `bytes_max` bytes.
    pub(crate) const fn bytes(bytes_max: u64, alignment: u64) -> Self {
        let (sectors_max, alignment) = ((bytes_max / SECTOR) as u32, (alignment / SECTOR) as u32);
        Self { sectors_max, ranges_max: RANGES_MAX, alignment: if alignment == 0 { 1 } else { alignment } }
    }
}

/// The largest number of ranges in one request: 1 KiB of segments.
const RANGES_MAX: u32 = 64;
