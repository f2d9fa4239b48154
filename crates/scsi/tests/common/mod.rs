//! A disk and its names, for all tests.
#![allow(dead_code, clippy::unwrap_used, reason = "a test may, and not each one uses everything")]

use kickless_scsi::{Command, Identity, Properties, Sense, Unit, UnmapLimits, parse};

/// A disk with everything, of 4096 blocks.
pub(crate) const DISK: Properties = Properties {
    block_size: 512,
    blocks: 4096,
    physical_block_exp: 3,
    lowest_aligned: 1,
    read_only: false,
    is_solid_state: true,
    transfer_blocks_max: 1024,
    transfer_blocks_best: 256,
    transfer_granularity: 8,
    compare_blocks_max: 16,
    write_same_blocks_max: 2048,
    unmap: Some(UnmapLimits { blocks_max: 1000, ranges_max: 4, granularity: 8, alignment: 1 }),
    write_same_unmaps: true,
    unmapped_reads_zeroes: true,
    is_thin: true,
};
/// A disk with nothing but reads and writes.
pub(crate) const PLAIN: Properties = Properties { blocks: 4096, ..Properties::plain(512) };
pub(crate) const READ_ONLY: Properties = Properties { read_only: true, ..DISK };

pub(crate) fn identity() -> Identity {
    Identity::new("KICKLESS", "DISK", "1", "disk-1").unwrap()
}

/// Parses a command for [`DISK`].
pub(crate) fn on_disk(cdb: &[u8]) -> Result<Command, Sense> {
    parse(cdb, Unit::Disk(&DISK))
}

/// Returns a command with these bytes set, and zeroes up to its length.
pub(crate) fn cdb(opcode: u8, fields: &[(usize, &[u8])]) -> Vec<u8> {
    let len = match opcode >> 5 {
        0 => 6,
        1 | 2 => 10,
        4 => 16,
        _ => 12,
    };
    let mut bytes = vec![0; len];
    bytes[0] = opcode;
    for (at, field) in fields {
        bytes[*at..at + field.len()].copy_from_slice(field);
    }
    bytes
}
