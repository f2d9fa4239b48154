//! The contents of sectors.

use kickless_testing::Stamp;

/// The number of the write that stands for the backing image.
pub(crate) const BELOW: u64 = 0xff_ffff;
const WRITE_BITS: u32 = 24;

/// Returns the contents that a write leaves in a sector.
pub(crate) fn stamp_of(offset: u64, write: u64) -> Stamp {
    (offset + 1) << WRITE_BITS | write
}

/// Returns whether the contents are those of a sector: zeroes, or any write there.
pub(crate) fn is_of(stamp: Stamp, offset: u64) -> bool {
    stamp == 0 || stamp >> WRITE_BITS == offset + 1
}

/// Returns the contents of a sector of a compressed cluster.
pub(crate) fn inflated(first: Stamp, within: u64) -> Stamp {
    first + (within << WRITE_BITS)
}
