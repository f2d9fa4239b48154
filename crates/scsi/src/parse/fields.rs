//! Fields that several commands have.

use crate::number::big_endian;
use crate::table::CDB_LEN_MAX;

/// The address and the number of blocks of a command, in the layout of its length.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockFields {
    pub(super) first: u64,
    pub(super) count: u32,
    /// The first byte of the number of blocks.
    pub(super) count_at: u16,
}

impl BlockFields {
    /// Reads the fields of a command with more than 6 bytes.
    #[inline]
    pub(super) fn read(cdb: &[u8; CDB_LEN_MAX]) -> Self {
        let [_, _, a, b, c, d, e, f, g, h, i, j, k, l, ..] = *cdb;
        let short = u32::from_be_bytes([a, b, c, d]).into();
        match cdb[0] >> 5 {
            4 => Self {
                first: u64::from_be_bytes([a, b, c, d, e, f, g, h]),
                count: u32::from_be_bytes([i, j, k, l]),
                count_at: 10,
            },
            5 => Self { first: short, count: u32::from_be_bytes([e, f, g, h]), count_at: 6 },
            _ => Self { first: short, count: u16::from_be_bytes([f, g]).into(), count_at: 7 },
        }
    }

    /// Reads the fields of a command of 6 bytes, of which 0 blocks are 256 (SBC-3, READ (6) command).
    #[inline]
    pub(super) fn read_6(cdb: &[u8; CDB_LEN_MAX]) -> Self {
        let first = big_endian(&[cdb[1] & 0x1f, cdb[2], cdb[3]]);
        let count = if cdb[4] == 0 { 256 } else { cdb[4].into() };
        Self { first, count, count_at: 4 }
    }
}

/// Returns the number in two bytes from `at` on.
pub(super) fn number_16(cdb: &[u8; CDB_LEN_MAX], at: usize) -> u16 {
    big_endian(&cdb[at..at + 2]) as u16
}

/// Returns the number in four bytes from `at` on.
pub(super) fn number_32(cdb: &[u8; CDB_LEN_MAX], at: usize) -> u32 {
    big_endian(&cdb[at..at + 4]) as u32
}
