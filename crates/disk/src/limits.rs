//! What a disk can do.

/// Bytes of a sector: the unit of virtio-blk's addresses and lengths, whatever the block size.
pub const SECTOR: u64 = 512;

/// What a disk can do, in the terms of virtio-blk's configuration space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a logical block, a power of two. A hint: requests of single sectors are always served. An
    /// image file has 512 wherever it lies, for its partition table is counted in these; a block device has
    /// its own.
    pub block_size: u32,
    /// Binary logarithm of logical blocks in a physical block.
    pub physical_block_exp: u8,
    /// The first logical block that begins a physical block.
    pub alignment_offset: u8,
    /// The smallest request that is not inefficient, in logical blocks; 0 where unknown.
    pub min_io_size: u16,
    /// The request size that is best, in logical blocks; 0 where unknown.
    pub opt_io_size: u32,
    /// Writes are refused.
    pub read_only: bool,
    /// The most segments that a request should have; `None` where it does not matter. Requests with more are
    /// served.
    pub segments_max: Option<u32>,
    /// The most bytes that a segment should have. Longer ones are served.
    pub segment_bytes_max: u32,
    /// Of discards; `None`: there are none.
    pub discard: Option<RangeLimits>,
    /// Of requests to write zeroes; `None`: there are none.
    pub write_zeroes: Option<RangeLimits>,
    /// Zeroes may be written by giving space back.
    pub zeroes_may_unmap: bool,
    /// Of secure erasure; `None`: there is none.
    pub secure_erase: Option<RangeLimits>,
    /// How worn it is, where it says.
    pub lifetime: Option<Lifetime>,
}

/// What one request on ranges of a disk can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangeLimits {
    /// Sectors of each range.
    pub sectors_max: u32,
    /// Ranges.
    pub ranges_max: u32,
    /// Sectors that it does best with multiples of; not 0.
    pub alignment: u32,
}

/// How worn a disk is, in eMMC's terms (virtio 1.3, section 5.2.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifetime {
    /// Spare blocks: 1 normal, 2 at 80 %, 3 at 90 %; 0 not known.
    pub pre_eol_info: u16,
    /// Wear of SLC cells in steps of 10 %; 0 not known.
    pub type_a: u16,
    /// Wear of MLC cells in steps of 10 %; 0 not known.
    pub type_b: u16,
}

impl Limits {
    /// A disk without peculiarities.
    pub(crate) fn plain(read_only: bool) -> Self {
        Self {
            block_size: SECTOR as u32,
            physical_block_exp: 0,
            alignment_offset: 0,
            min_io_size: 0,
            opt_io_size: 0,
            read_only,
            segments_max: None,
            segment_bytes_max: SEGMENT_BYTES_MAX,
            discard: None,
            write_zeroes: None,
            zeroes_may_unmap: false,
            secure_erase: None,
            lifetime: None,
        }
    }
}

impl RangeLimits {
    /// Ranges of so many bytes at most.
    pub(crate) const fn bytes(bytes_max: u64, alignment: u64) -> Self {
        let (sectors_max, alignment) = ((bytes_max / SECTOR) as u32, (alignment / SECTOR) as u32);
        Self { sectors_max, ranges_max: RANGES_MAX, alignment: if alignment == 0 { 1 } else { alignment } }
    }
}

/// Ranges of one request: 1 KiB of them.
const RANGES_MAX: u32 = 64;

/// As much as fits into a page-aligned 32-bit length.
pub(crate) const SEGMENT_BYTES_MAX: u32 = 0x7fff_f000;
