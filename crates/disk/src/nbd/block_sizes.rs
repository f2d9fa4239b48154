//! The sizes of requests that an export accepts (NBD protocol, section "Size constraints").

use super::wire::Problem;
use crate::offload::OpSizes;
use crate::{Limits, RangeLimits, SECTOR};

/// The largest smallest request in bytes.
const MINIMUM_MAX: u32 = 1 << 16;

/// The largest physical block in bytes that the guest is told of.
const PHYSICAL_MAX: u32 = 1 << 16;

/// The largest discard or write-zeroes request in bytes. A command has 32 bits for the length.
const RANGE_MAX: u64 = 1 << 30;

/// The sizes that a server reports, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockSizes {
    /// The unit of offsets and lengths, a power of two.
    minimum: u32,
    /// The smallest efficient request, a power of two.
    preferred: u32,
    /// The largest payload of a request.
    maximum: u32,
}

impl Default for BlockSizes {
    /// Returns the sizes of a server that reports none.
    fn default() -> Self {
        Self { minimum: 1, preferred: 1, maximum: u32::MAX }
    }
}

impl BlockSizes {
    /// Parses the body of the information after its type.
    ///
    /// # Errors
    /// The length is wrong, or the sizes contradict the protocol.
    pub(super) fn parse(body: &[u8]) -> Result<Self, Problem> {
        let body: &[u8; 12] =
            body.try_into().map_err(|_| Problem::Protocol("block sizes have a wrong length"))?;
        let [minimum, preferred, maximum] =
            [0, 4, 8].map(|at| u32::from_be_bytes([body[at], body[at + 1], body[at + 2], body[at + 3]]));
        Self::new((minimum, preferred, maximum))
    }

    /// Checks the least, the preferred and the largest size.
    ///
    /// # Errors
    /// The sizes contradict the protocol.
    pub(super) fn new((minimum, preferred, maximum): (u32, u32, u32)) -> Result<Self, Problem> {
        let is_valid = minimum.is_power_of_two()
            && preferred.is_power_of_two()
            && minimum <= MINIMUM_MAX
            && minimum <= preferred
            && preferred.max(SECTOR as u32) <= maximum;
        if is_valid {
            Ok(Self { minimum, preferred, maximum })
        } else {
            Err(Problem::BlockSizes { minimum, preferred, maximum })
        }
    }

    /// Returns the least, the preferred and the largest size.
    pub(super) fn numbers(self) -> (u32, u32, u32) {
        (self.minimum, self.preferred, self.maximum)
    }

    /// Returns the sizes of the client's requests.
    pub(super) fn of_ops(self) -> OpSizes {
        OpSizes::new(self.minimum, self.maximum)
    }

    /// Returns the limits of a disk over an export that can discard (`trim`) and write zeroes. They are those
    /// of an image on a file system with blocks of this size.
    pub(super) fn limits(self, read_only: bool, trim: bool, zeroes: bool) -> Limits {
        let block = self.of_ops().block();
        let sectors = u64::from(self.preferred.min(PHYSICAL_MAX)).max(block) / SECTOR;
        let ranges =
            |offered, alignment| (offered && !read_only).then(|| RangeLimits::bytes(RANGE_MAX, alignment));
        let write_zeroes = ranges(zeroes, SECTOR);
        Limits {
            physical_block_exp: sectors.ilog2() as u8,
            min_io_size: if sectors > 1 { sectors as u16 } else { 0 },
            discard: ranges(trim, block),
            write_zeroes,
            zeroes_may_unmap: write_zeroes.is_some(),
            ..Limits::plain(read_only)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(sizes: [u32; 3]) -> Result<BlockSizes, String> {
        BlockSizes::parse(&sizes.map(u32::to_be_bytes).concat()).map_err(|problem| problem.to_string())
    }

    #[test]
    fn invalid_sizes_are_refused() {
        const MAX: u32 = u32::MAX;
        for valid in [[1, 1, 512], [512, 4096, MAX], [65536, 65536, 65536], [4096, 1 << 31, MAX]] {
            assert!(parse(valid).is_ok(), "{valid:?}");
        }
        for invalid in [
            [0, 4096, MAX],
            [3, 4096, MAX],
            [512, 4095, MAX],
            [1, 0, MAX],
            [1 << 17, 1 << 17, MAX],
            [4096, 512, MAX],
            [1, 1, 511],
            [512, 4096, 2048],
            [1, 1, 0],
        ] {
            assert!(parse(invalid).unwrap_err().contains("are invalid"), "{invalid:?}");
        }
        for length in [0, 4, 11, 13, 16] {
            let error = BlockSizes::parse(&vec![1; length]).unwrap_err().to_string();
            assert!(error.contains("length"), "{error}");
        }
    }

    #[test]
    fn guests_see_the_larger_block() {
        let seen = |sizes| {
            let limits = parse(sizes).unwrap().limits(false, true, true);
            (
                limits.block_size,
                limits.physical_block_exp,
                limits.min_io_size,
                limits.discard.unwrap().alignment,
            )
        };
        assert_eq!(seen([1, 1, u32::MAX]), (512, 0, 0, 1));
        assert_eq!(seen([1, 4096, u32::MAX]), (512, 3, 8, 1));
        assert_eq!(seen([4096, 4096, u32::MAX]), (512, 3, 8, 8));
        assert_eq!(seen([512, 1 << 30, u32::MAX]), (512, 7, 128, 1));
    }
}
