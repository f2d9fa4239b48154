//! The capacity and the allocation of a disk (SBC-3, READ CAPACITY and GET LBA STATUS commands).

use crate::cut::cut;
use crate::number::at_most_u32;
use crate::unit::Properties;

/// Length of the answer to READ CAPACITY(16).
const LONG_LEN: usize = 32;
/// Length of a descriptor of GET LBA STATUS, and of the head before all.
const STATUS_LEN: usize = 16;
const STATUS_HEAD: usize = 8;
/// Provisioning status of a descriptor: allocated, or not.
const MAPPED: u8 = 0;
const DEALLOCATED: u8 = 1;

/// Returns the answer to READ CAPACITY(10). A disk whose last block needs more than 32 bits has `ffffffff`.
pub fn read_capacity_10(disk: &Properties) -> Vec<u8> {
    let last = at_most_u32(disk.blocks.saturating_sub(1));
    [last.to_be_bytes(), disk.block_size.to_be_bytes()].concat()
}

/// Returns the answer to READ CAPACITY(16).
pub fn read_capacity_16(disk: &Properties, allocation: u32) -> Vec<u8> {
    let mut bytes = vec![0; LONG_LEN];
    bytes[..8].copy_from_slice(&disk.blocks.saturating_sub(1).to_be_bytes());
    bytes[8..12].copy_from_slice(&disk.block_size.to_be_bytes());
    bytes[13] = disk.physical_block_exp & 0x0f;
    bytes[14..16].copy_from_slice(&(disk.lowest_aligned & 0x3fff).to_be_bytes());
    if disk.can_unmap() {
        // LBPME, and LBPRZ.
        bytes[14] |= 0x80 | if disk.unmapped_reads_zeroes { 0x40 } else { 0 };
    }
    cut(bytes, allocation)
}

/// Consecutive blocks of the same kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LbaExtent {
    /// The first block.
    pub first: u64,
    /// The number of blocks.
    pub count: u32,
    /// They have space on the disk.
    pub is_allocated: bool,
}

/// Returns the answer to GET LBA STATUS. The caller passes at least one extent, which begins with the block
/// of the command.
pub fn lba_status(extents: &[LbaExtent], allocation: u32) -> Vec<u8> {
    let room = (allocation as usize).saturating_sub(STATUS_HEAD).div_ceil(STATUS_LEN);
    let extents = &extents[..extents.len().min(room.max(1))];
    // The length field does not count itself.
    let len = extents.len() * STATUS_LEN + STATUS_HEAD - 4;
    let mut bytes = at_most_u32(len as u64).to_be_bytes().to_vec();
    bytes.extend([0; 4]);
    for extent in extents {
        bytes.extend(extent.first.to_be_bytes());
        bytes.extend(extent.count.to_be_bytes());
        bytes.extend([if extent.is_allocated { MAPPED } else { DEALLOCATED }, 0, 0, 0]);
    }
    cut(bytes, allocation)
}
