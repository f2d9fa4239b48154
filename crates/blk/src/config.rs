//! The configuration space.

use kickless_device::ConfigError;
use kickless_disk::Limits;
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
    features
}

/// The configuration space as it reads now. `seg_max` leaves room for the header and the status in a chain that is as long as
/// the queue can be: the driver reads it before the queue size is known.
pub(crate) fn space(limits: &Limits, queues_max: u16, queue_size_max: u16, writeback: bool) -> Config {
    Config {
        capacity: (limits.size / blk::SECTOR_SIZE).into(),
        size_max: SIZE_MAX.into(),
        seg_max: u32::from(queue_size_max.min(CHAIN_MAX).saturating_sub(2).max(1)).into(),
        blk_size: limits.block_size.into(),
        physical_block_exp: limits.physical_block_exp,
        alignment_offset: limits.alignment_offset,
        min_io_size: limits.min_io_size.into(),
        opt_io_size: limits.opt_io_size.into(),
        writeback: writeback.into(),
        num_queues: queues_max.into(),
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
