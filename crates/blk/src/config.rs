//! The configuration space and the features that go with it.

use kickless_device::ConfigError;
use kickless_disk::{Limits, RangeLimits};
use kickless_spec::blk::{self, BlkFeatures, Config};

/// The largest segment that drivers are asked to send. A larger one is served as well.
const SIZE_MAX: u32 = 1 << 20;
/// The largest number of descriptors of a request, or the queue size if that is smaller.
const CHAIN_MAX: u16 = 128;

/// Returns the features of a disk with these limits.
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
    features
}

/// The choices that the disk does not make.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Choices {
    /// The operator's: the bytes of a logical block that the driver sees, a power of two.
    pub(crate) block_size: u32,
    /// The driver's: a write may complete before it is durable.
    pub(crate) writeback: bool,
    /// The operator's: requests may give space back to the host.
    pub(crate) discard: bool,
}

/// Returns the configuration space of a disk of this size in bytes.
///
/// `seg_max` leaves room for the header and the status in a chain as long as the largest queue. The driver
/// reads it before it chooses the queue size.
pub(crate) fn space(
    (limits, size): (&Limits, u64),
    queues_max: u16,
    queue_size_max: u16,
    choices: Choices,
) -> Config {
    let sectors = |of: Option<RangeLimits>| of.map_or(0, |of| of.sectors_max).into();
    let segments = |of: Option<RangeLimits>| of.map_or(0, |of| of.ranges_max).into();
    // The disk counts in its own blocks, and the driver in those that it sees.
    let physical = u64::from(limits.block_size) << limits.physical_block_exp;
    let blocks = |own: u32| u64::from(own) * u64::from(limits.block_size) / u64::from(choices.block_size);
    Config {
        capacity: (size / blk::SECTOR_SIZE).into(),
        size_max: SIZE_MAX.into(),
        seg_max: u32::from(queue_size_max.min(CHAIN_MAX).saturating_sub(2).max(1)).into(),
        blk_size: choices.block_size.into(),
        physical_block_exp: (physical / u64::from(choices.block_size)).max(1).ilog2() as u8,
        alignment_offset: blocks(limits.alignment_offset.into()).try_into().unwrap_or(0),
        min_io_size: u16::try_from(blocks(limits.min_io_size.into())).unwrap_or(0).into(),
        opt_io_size: u32::try_from(blocks(limits.opt_io_size)).unwrap_or(0).into(),
        writeback: choices.writeback.into(),
        num_queues: queues_max.into(),
        max_discard_sectors: sectors(limits.discard),
        max_discard_seg: segments(limits.discard),
        discard_sector_alignment: limits.discard.map_or(0, |of| of.alignment).into(),
        max_write_zeroes_sectors: sectors(limits.write_zeroes),
        max_write_zeroes_seg: segments(limits.write_zeroes),
        write_zeroes_may_unmap: (limits.zeroes_may_unmap && choices.discard).into(),
        ..Config::default()
    }
}

/// Parses a write of the driver to the configuration space, and returns the new value of `writeback`.
///
/// # Errors
/// The write is to another field, or its value is neither 0 nor 1.
pub(crate) fn write(offset: usize, from: &[u8]) -> Result<bool, ConfigError> {
    match (offset, from) {
        (blk::CONFIG_WRITEBACK, [value @ (0 | 1)]) => Ok(*value == 1),
        (blk::CONFIG_WRITEBACK, [value]) => Err(ConfigError::Value { field: "writeback", value: *value }),
        _ => Err(ConfigError::ReadOnly { offset, end: offset.saturating_add(from.len()) }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        block_size: 4096,
        physical_block_exp: 1,
        alignment_offset: 2,
        min_io_size: 3,
        opt_io_size: 4,
        read_only: true,
        discard: Some(RangeLimits { sectors_max: 5, ranges_max: 6, alignment: 7 }),
        write_zeroes: Some(RangeLimits { sectors_max: 8, ranges_max: 9, alignment: 10 }),
        zeroes_may_unmap: true,
    };
    /// The driver sees the blocks of the disk.
    const OWN: Choices = Choices { block_size: 4096, writeback: false, discard: true };
    const NONE: Limits =
        Limits { read_only: false, discard: None, write_zeroes: None, zeroes_may_unmap: false, ..LIMITS };

    /// A driver may use a field or an operation only if the feature is offered.
    #[test]
    fn a_disk_has_the_features_of_its_limits() {
        let always = BlkFeatures::SIZE_MAX
            | BlkFeatures::SEG_MAX
            | BlkFeatures::BLK_SIZE
            | BlkFeatures::TOPOLOGY
            | BlkFeatures::FLUSH
            | BlkFeatures::CONFIG_WCE
            | BlkFeatures::MQ;
        assert_eq!(features(&NONE), always);
        for (limits, feature) in [
            (Limits { read_only: true, ..NONE }, BlkFeatures::RO),
            (Limits { discard: LIMITS.discard, ..NONE }, BlkFeatures::DISCARD),
            (Limits { write_zeroes: LIMITS.write_zeroes, ..NONE }, BlkFeatures::WRITE_ZEROES),
        ] {
            assert_eq!(features(&limits), always | feature);
        }
    }

    #[test]
    fn each_limit_is_in_its_field() {
        let said = space((&LIMITS, 512 * 99), 14, 64, Choices { writeback: true, ..OWN });
        assert_eq!((said.capacity.get(), said.num_queues.get(), said.writeback), (99, 14, 1));
        assert_eq!((said.size_max.get(), said.seg_max.get(), said.blk_size.get()), (SIZE_MAX, 62, 4096));
        assert_eq!((said.physical_block_exp, said.alignment_offset), (1, 2));
        assert_eq!((said.min_io_size.get(), said.opt_io_size.get()), (3, 4));
        let discard = (said.max_discard_sectors, said.max_discard_seg, said.discard_sector_alignment);
        assert_eq!(discard, (5.into(), 6.into(), 7.into()));
        assert_eq!((said.max_write_zeroes_sectors.get(), said.max_write_zeroes_seg.get()), (8, 9));
        assert_eq!(said.write_zeroes_may_unmap, 1);
        // Without a limit, the field is 0.
        let said = space((&NONE, 512), 1, 64, OWN);
        assert_eq!((said.writeback, said.write_zeroes_may_unmap), (0, 0));
        assert_eq!((said.max_discard_sectors.get(), said.max_write_zeroes_sectors.get()), (0, 0));
    }

    /// A driver keeps using the discards that it negotiated, so these stay. Only zeroes tell the driver that
    /// they keep their space.
    #[test]
    fn without_discards_only_zeroes_say_so() {
        let [on, off] = [true, false].map(|discard| space((&LIMITS, 512), 1, 64, Choices { discard, ..OWN }));
        assert_eq!((on.write_zeroes_may_unmap, off.write_zeroes_may_unmap), (1, 0));
        assert_eq!(Config { write_zeroes_may_unmap: 1, ..off }, on);
    }

    /// The figures are the same bytes for each block size.
    #[test]
    fn a_driver_counts_in_the_blocks_that_it_sees() {
        let limits = Limits { physical_block_exp: 2, alignment_offset: 1, ..LIMITS };
        let seen = |limits: &Limits, block_size| {
            let said = space((limits, 1 << 20), 1, 64, Choices { block_size, ..OWN });
            assert_eq!((said.blk_size.get(), said.capacity.get()), (block_size, 2048));
            let sizes = (said.min_io_size.get(), said.opt_io_size.get());
            (said.physical_block_exp, said.alignment_offset, sizes.0, sizes.1)
        };
        assert_eq!(seen(&limits, 4096), (2, 1, 3, 4));
        assert_eq!(seen(&limits, 512), (5, 8, 24, 32));
        let file = Limits { block_size: 512, physical_block_exp: 3, alignment_offset: 0, ..limits };
        assert_eq!(seen(&Limits { min_io_size: 8, opt_io_size: 7, ..file.clone() }, 4096), (0, 0, 1, 0));
        assert_eq!(seen(&Limits { physical_block_exp: 0, ..file }, 4096).0, 0);
        // Numbers that the fields cannot hold are unknown.
        let large = Limits { alignment_offset: 255, min_io_size: 65535, opt_io_size: u32::MAX, ..limits };
        assert_eq!(seen(&large, 512), (5, 0, 0, 0));
    }
}
