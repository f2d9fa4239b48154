//! Block sizes and preferred sizes of files and devices.

use crate::{Limits, RangeLimits, SECTOR};
use kickless_opener::BlockFacts;

/// The largest range in bytes. A longer range would take too long for one request.
const RANGE_BYTES_MAX: u64 = 1 << 30;
/// The largest plausible granularity of a device. Its number of sectors fits into 32 bits.
const GRANULARITY_MAX: u64 = 1 << 30;

/// Returns the limits of an image file. Its sectors have 512 bytes, and its physical blocks are those of the
/// file system. `punches`: the file system can punch holes.
pub(super) fn of_image(block: u64, punches: bool, plain: Limits) -> Limits {
    let block = if block.is_power_of_two() && (SECTOR..=64 << 10).contains(&block) { block } else { SECTOR };
    let sectors = block / SECTOR;
    Limits {
        physical_block_exp: sectors.ilog2() as u8,
        min_io_size: if sectors > 1 { sectors as u16 } else { 0 },
        discard: (punches && !plain.read_only).then(|| RangeLimits::bytes(RANGE_BYTES_MAX, block)),
        write_zeroes: (!plain.read_only).then(|| RangeLimits::bytes(RANGE_BYTES_MAX, SECTOR)),
        zeroes_may_unmap: punches && !plain.read_only,
        ..plain
    }
}

/// Returns the limits of a block device. Its logical blocks have `block` bytes if that is known.
pub(super) fn of_device(facts: &BlockFacts, plain: Limits, size: u64, block: Option<u64>) -> Limits {
    of_numbers(plain, size, block, |name| facts.number(name))
}

/// Returns the limits as [`of_device`], with the numbers from `sysfs`.
fn of_numbers(plain: Limits, size: u64, block: Option<u64>, sysfs: impl Fn(&str) -> Option<u64>) -> Limits {
    let block = block
        .or_else(|| sysfs("logical_block_size"))
        .filter(|b| b.is_power_of_two() && (SECTOR..=1 << 30).contains(b) && size.is_multiple_of(*b))
        .unwrap_or(SECTOR);
    let physical =
        sysfs("physical_block_size").filter(|p| p.is_power_of_two() && *p >= block).unwrap_or(block);
    let ranges = |alignment| (!plain.read_only).then(|| RangeLimits::bytes(RANGE_BYTES_MAX, alignment));
    let discards = sysfs("discard_max_bytes").is_some_and(|max| max > 0);
    let granularity = sysfs("discard_granularity").filter(|g| g.is_multiple_of(block)).unwrap_or(block);
    let blocks = |name| sysfs(name).map_or(0, |bytes| bytes / block);
    Limits {
        block_size: block as u32,
        physical_block_exp: (physical / block).ilog2() as u8,
        alignment_offset: u8::try_from(blocks("alignment_offset")).unwrap_or(0),
        min_io_size: u16::try_from(blocks("minimum_io_size")).unwrap_or(0),
        opt_io_size: u32::try_from(blocks("optimal_io_size")).unwrap_or(0),
        discard: ranges(granularity.min(GRANULARITY_MAX)).filter(|_| discards),
        // The kernel writes zeroes if the device cannot do it itself.
        write_zeroes: ranges(block),
        zeroes_may_unmap: !plain.read_only && sysfs("write_zeroes_max_bytes").is_some_and(|max| max > 0),
        ..plain
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_raid_of_512e_drives() {
        let limits = of_numbers(Limits::plain(false), 1 << 30, None, |name| match name {
            "logical_block_size" => Some(512),
            "physical_block_size" => Some(4096),
            "alignment_offset" => Some(3584),
            "minimum_io_size" => Some(64 << 10),
            "optimal_io_size" => Some(256 << 10),
            "discard_max_bytes" => Some(1 << 20),
            "discard_granularity" => Some(4096),
            _ => None,
        });
        let ranges = |alignment| Some(RangeLimits { sectors_max: 1 << 21, ranges_max: 64, alignment });
        assert_eq!(
            (limits.discard, limits.write_zeroes, limits.zeroes_may_unmap),
            (ranges(8), ranges(1), false)
        );
        assert_eq!((limits.block_size, limits.physical_block_exp, limits.alignment_offset), (512, 3, 7));
        assert_eq!((limits.min_io_size, limits.opt_io_size), (128, 512));
    }

    #[test]
    fn invalid_numbers_are_ignored() {
        let plain = Limits::plain(true);
        let limits = of_numbers(plain.clone(), 3 * 512, Some(4096), |name| match name {
            // No such block fits the size; a physical block is smaller than a logical one; lengths exceed
            // their fields.
            "logical_block_size" => Some(0),
            "physical_block_size" => Some(100),
            _ => Some(u64::MAX),
        });
        assert_eq!(limits, plain);
        assert_eq!(of_image(0, true, plain.clone()), plain);
        assert_eq!(of_image(4096, true, plain).physical_block_exp, 3);
    }
}
