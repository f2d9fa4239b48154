//! Which disk, how, and what it can do.

pub(crate) mod fault_rules;
pub(crate) mod nbd_uri;
mod percent;
pub(crate) mod rbd_name;

use crate::FaultRules;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Bytes of a sector: the unit of virtio-blk's addresses and lengths, whatever the block size.
pub const SECTOR: u64 = 512;

/// Which disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskSpec {
    /// A raw image, or a block device.
    File(PathBuf),
    /// So many bytes of nothing: answers at once, for measuring the rings.
    Null(u64),
    /// So many bytes of RAM, zero to begin with.
    Memory(u64),
    /// An image in QEMU's format, which says so itself only once it is called one here.
    #[cfg(feature = "qcow2")]
    Qcow2(PathBuf),
    /// An export of an NBD server.
    #[cfg(feature = "nbd")]
    Nbd(crate::NbdUri),
    /// An image of a Ceph cluster.
    #[cfg(feature = "rbd")]
    Rbd(Box<crate::RbdName>),
    /// Another disk, with faults. For tests.
    Fault(FaultRules, Box<DiskSpec>),
}

/// Whether the host's page cache is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cache {
    /// Not (`O_DIRECT`).
    #[default]
    None,
    /// For reads and writes.
    Writeback,
}

impl fmt::Display for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::None => "none",
            Self::Writeback => "writeback",
        })
    }
}

/// A name that is no cache mode's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a cache mode is one of none, writeback")]
pub struct UnknownCache;

impl FromStr for Cache {
    type Err = UnknownCache;

    fn from_str(name: &str) -> Result<Self, UnknownCache> {
        match name {
            "none" => Ok(Self::None),
            "writeback" => Ok(Self::Writeback),
            _ => Err(UnknownCache),
        }
    }
}

/// How to open a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Refuse writes. The file need not be writable then.
    pub read_only: bool,
    /// Whether the host's page cache is used; means nothing for a disk that is no file.
    pub cache: Cache,
    /// Whether neighbouring requests are one for the kernel: see [`kickless_io::Engine::merge`].
    pub merge: bool,
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_names_go_both_ways() {
        for cache in [Cache::None, Cache::Writeback] {
            assert_eq!(cache.to_string().parse(), Ok(cache));
        }
        assert_eq!("unsafe".parse::<Cache>(), Err(UnknownCache));
    }
}
