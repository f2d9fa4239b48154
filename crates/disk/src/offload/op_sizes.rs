//! Divides requests into operations that a library accepts: whole blocks, and no more bytes than its maximum.

use crate::SECTOR;
use crate::buffer_pool::BUFFER_BYTES;
use crate::piece::Piece;

/// The sizes of a library's operations in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpSizes {
    /// The unit of offsets and lengths: a power of two from 512 to 64 KiB.
    block: u64,
    /// The longest operation: a positive multiple of the block.
    bytes_max: u64,
}

/// The method for the first bytes of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RangePart {
    /// Discard or zero whole blocks.
    Blocks(u64),
    /// A part of a block, which no discard or zeroing can name.
    Rest(u64),
}

impl Default for OpSizes {
    fn default() -> Self {
        Self { block: SECTOR, bytes_max: u64::from(u32::MAX) - u64::from(u32::MAX) % SECTOR }
    }
}

impl OpSizes {
    /// Makes sizes from a library's smallest and largest operation. `min` is a power of two up to 64 KiB.
    /// `max` is at least `min` and at least 512.
    pub(crate) fn new(min: u32, max: u32) -> Self {
        let block = u64::from(min).max(SECTOR);
        Self { block, bytes_max: u64::from(max) - u64::from(max) % block }
    }

    pub(crate) fn block(self) -> u64 {
        self.block
    }

    /// Returns the longest read or write. A buffer limits it too.
    pub(crate) fn payload_max(self) -> u64 {
        self.bytes_max.min(BUFFER_BYTES as u64)
    }

    /// Returns the next piece of a transfer of `left` bytes at `at`.
    pub(super) fn piece(self, at: u64, left: u64, write: bool) -> Piece {
        Piece::next_of(at, left, self.block, self.payload_max(), write)
    }

    /// Returns the first part of an extent of `len` bytes at `at`. `len` is not 0.
    pub(super) fn range_part(self, at: u64, len: u64) -> RangePart {
        let first = at.next_multiple_of(self.block);
        let last = (at + len) - (at + len) % self.block;
        match at {
            _ if first >= last => RangePart::Rest(len),
            at if at == first => RangePart::Blocks((last - first).min(self.bytes_max)),
            at => RangePart::Rest(first - at),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kickless_testing::Random;

    /// Each division covers the request once and in order, in operations that the library accepts.
    #[test]
    fn divisions_cover_the_request_in_valid_operations() {
        let mut random = Random(7);
        for _ in 0..20_000 {
            let min = 1 << random.below(17);
            let max = (min.max(512) as u64 + random.below(1 << 20)) as u32;
            let sizes = OpSizes::new(min, max);
            let block = sizes.block();
            let valid = |at: u64, len: u64, max: u64| {
                assert!(at.is_multiple_of(block) && len.is_multiple_of(block) && len > 0 && len <= max);
                assert!(max <= sizes.bytes_max);
            };
            let (start, len) = (random.below(300) * SECTOR, (1 + random.below(1200)) * SECTOR);
            for write in [false, true] {
                let mut at = start;
                while at < start + len {
                    let piece = sizes.piece(at, start + len - at, write);
                    valid(piece.at, piece.total, sizes.payload_max());
                    assert_eq!(piece.at + piece.skip, at);
                    assert!(piece.len > 0 && piece.skip + piece.len <= piece.total);
                    assert!(!write || !piece.is_part() || piece.total == block);
                    at += piece.len;
                }
                assert_eq!(at, start + len);
            }
            let mut at = start;
            while at < start + len {
                at += match sizes.range_part(at, start + len - at) {
                    RangePart::Blocks(bytes) => {
                        valid(at, bytes, sizes.bytes_max);
                        bytes
                    }
                    RangePart::Rest(bytes) => {
                        let end = at + bytes;
                        assert!(at.next_multiple_of(block) >= end - end % block, "it has no whole block");
                        bytes
                    }
                };
            }
            assert_eq!(at, start + len);
        }
    }
}
