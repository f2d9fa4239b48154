//! The configuration space.

use kickless_device::ConfigError;
use kickless_disk::{Disk, Limits, RangeLimits};
use kickless_spec::blk::{self, BlkFeatures, Config};

/// The largest segment that we ask drivers for. A larger one is served all the same.
const SIZE_MAX: u32 = 1 << 20;
/// Descriptors of a full request: at most this, or the queue size where that is smaller.
const CHAIN_MAX: u16 = 128;

/// Features of a disk with these limits.
pub(crate) fn features(limits: &Limits) -> BlkFeatures {
    let mut features = BlkFeatures::SIZE_MAX
        | BlkFeatures::SEG_MAX
        | BlkFeatures::BLK_SIZE
        | BlkFeatures::TOPOLOGY
        | BlkFeatures::FLUSH
        | BlkFeatures::CONFIG_WCE
        | BlkFeatures::MQ;
    features.set(BlkFeatures::RO, limits.read_only);
    features.set(BlkFeatures::DISCARD, limits.discard.is_some());
    features.set(BlkFeatures::WRITE_ZEROES, limits.write_zeroes.is_some());
    features.set(BlkFeatures::SECURE_ERASE, limits.secure_erase.is_some());
    features.set(BlkFeatures::LIFETIME, limits.lifetime.is_some());
    features
}

/// The configuration space as it reads now. `seg_max` leaves room for the header and the status in a chain that is as long as
/// the queue can be: the driver reads it before the queue size is known.
pub(crate) fn space(disk: &Disk, queues_max: u16, queue_size_max: u16, writeback: bool) -> Config {
    let limits = disk.limits();
    let sectors = |of: Option<RangeLimits>| of.map_or(0, |of| of.sectors_max).into();
    let segments = |of: Option<RangeLimits>| of.map_or(0, |of| of.ranges_max).into();
    let alignment = |of: Option<RangeLimits>| of.map_or(0, |of| of.alignment).into();
    Config {
        capacity: (disk.size() / blk::SECTOR_SIZE).into(),
        size_max: SIZE_MAX.into(),
        seg_max: u32::from(queue_size_max.min(CHAIN_MAX).saturating_sub(2).max(1)).into(),
        blk_size: limits.block_size.into(),
        physical_block_exp: limits.physical_block_exp,
        alignment_offset: limits.alignment_offset,
        min_io_size: limits.min_io_size.into(),
        opt_io_size: limits.opt_io_size.into(),
        writeback: writeback.into(),
        num_queues: queues_max.into(),
        max_discard_sectors: sectors(limits.discard),
        max_discard_seg: segments(limits.discard),
        discard_sector_alignment: alignment(limits.discard),
        max_write_zeroes_sectors: sectors(limits.write_zeroes),
        max_write_zeroes_seg: segments(limits.write_zeroes),
        write_zeroes_may_unmap: limits.zeroes_may_unmap.into(),
        max_secure_erase_sectors: sectors(limits.secure_erase),
        max_secure_erase_seg: segments(limits.secure_erase),
        secure_erase_sector_alignment: alignment(limits.secure_erase),
        ..Config::default()
    }
}

/// What a write of the driver to the configuration space asks for: the new value of `writeback`.
///
/// # Errors
/// Another field, or a value that is neither 0 nor 1.
pub(crate) fn write(offset: usize, from: &[u8]) -> Result<bool, ConfigError> {
    match (offset, from) {
        (blk::CONFIG_WRITEBACK, [value @ (0 | 1)]) => Ok(*value == 1),
        (blk::CONFIG_WRITEBACK, [value]) => Err(ConfigError::Value { field: "writeback", value: *value }),
        _ => Err(ConfigError::ReadOnly { offset, end: offset.saturating_add(from.len()) }),
    }
}
