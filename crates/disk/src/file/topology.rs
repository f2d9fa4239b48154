//! Block sizes and the sizes that are efficient.

use crate::{Limits, SECTOR};
use rustix::fs::{major, minor};
use std::fs;
use std::path::PathBuf;

/// An image file: sectors of 512 bytes, in physical blocks as the file system's.
pub(super) fn of_image(block: u64, plain: Limits) -> Limits {
    let block = if block.is_power_of_two() && (SECTOR..=64 << 10).contains(&block) { block } else { SECTOR };
    let sectors = block / SECTOR;
    Limits {
        physical_block_exp: sectors.ilog2() as u8,
        min_io_size: if sectors > 1 { sectors as u16 } else { 0 },
        ..plain
    }
}

fn sysfs(device: u64) -> PathBuf {
    PathBuf::from(format!("/sys/dev/block/{}:{}", major(device), minor(device)))
}

fn number(path: PathBuf) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Whether a block device refuses writes.
pub(super) fn is_protected(device: u64) -> bool {
    number(sysfs(device).join("ro")) == Some(1)
}

/// What sysfs says about a block device, whose logical blocks have `block` bytes if that is known.
pub(super) fn of_device(device: u64, plain: Limits, block: Option<u64>) -> Limits {
    let here = sysfs(device);
    // A partition has its disk's queue.
    let queue = if here.join("partition").exists() { here.join("../queue") } else { here.join("queue") };
    of_numbers(plain, block, |name| {
        number(if name == "alignment_offset" { here.join(name) } else { queue.join(name) })
    })
}

/// As [`of_device`], with the numbers from `sysfs`.
fn of_numbers(plain: Limits, block: Option<u64>, sysfs: impl Fn(&str) -> Option<u64>) -> Limits {
    let block = block
        .or_else(|| sysfs("logical_block_size"))
        .filter(|b| b.is_power_of_two() && (SECTOR..=1 << 30).contains(b) && plain.size.is_multiple_of(*b))
        .unwrap_or(SECTOR);
    let physical =
        sysfs("physical_block_size").filter(|p| p.is_power_of_two() && *p >= block).unwrap_or(block);
    let blocks = |name| sysfs(name).map_or(0, |bytes| bytes / block);
    Limits {
        block_size: block as u32,
        physical_block_exp: (physical / block).ilog2() as u8,
        alignment_offset: u8::try_from(blocks("alignment_offset")).unwrap_or(0),
        min_io_size: u16::try_from(blocks("minimum_io_size")).unwrap_or(0),
        opt_io_size: u32::try_from(blocks("optimal_io_size")).unwrap_or(0),
        segments_max: sysfs("max_segments").and_then(|n| u32::try_from(n).ok()).filter(|&n| n > 0),
        ..plain
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_raid_of_512e_drives() {
        let limits = of_numbers(Limits::plain(1 << 30, false), None, |name| match name {
            "logical_block_size" => Some(512),
            "physical_block_size" => Some(4096),
            "alignment_offset" => Some(3584),
            "minimum_io_size" => Some(64 << 10),
            "optimal_io_size" => Some(256 << 10),
            "max_segments" => Some(168),
            _ => None,
        });
        assert_eq!((limits.block_size, limits.physical_block_exp, limits.alignment_offset), (512, 3, 7));
        assert_eq!((limits.min_io_size, limits.opt_io_size, limits.segments_max), (128, 512, Some(168)));
    }

    #[test]
    fn nonsense_is_left_out() {
        let plain = Limits::plain(3 * 512, true);
        let limits = of_numbers(plain.clone(), Some(4096), |name| match name {
            // No such block fits the size; a physical one smaller than a logical one; lengths beyond their
            // fields.
            "logical_block_size" => Some(0),
            "physical_block_size" => Some(100),
            "max_segments" => Some(0),
            _ => Some(u64::MAX),
        });
        assert_eq!(limits, plain);
        assert_eq!(of_image(0, plain.clone()), plain);
        assert_eq!(of_image(4096, plain).physical_block_exp, 3);
    }
}
