//! Tests the configuration space as a front-end reads and writes it.
#![expect(clippy::unwrap_used, reason = "a test may")]

use kickless_blk::{Blk, Options};
use kickless_device::{ConfigError, Device, Driver};
use kickless_disk::{Disk, DiskSpec};
use kickless_spec::blk::{BlkFeatures, CONFIG_WRITEBACK, Config};
use kickless_spec::features::Features;
use zerocopy::FromBytes;

fn device(queue_size_max: u16, read_only: bool) -> Blk {
    let options = kickless_disk::Options { read_only, ..Default::default() };
    let disk = Disk::open(&DiskSpec::Null(1 << 20), &options).unwrap();
    Blk::new(disk, Options { serial: "serial".to_owned(), queues_max: 4, queue_size_max, lock: false })
}

fn config(device: &Blk) -> Config {
    let mut bytes = [0; size_of::<Config>()];
    device.read_config(0, &mut bytes);
    Config::read_from_bytes(&bytes).unwrap()
}

#[test]
fn fields_follow_the_options() {
    let said = config(&device(1024, false));
    assert_eq!((said.capacity.get(), said.num_queues.get(), said.blk_size.get()), (2048, 4, 512));
    assert_eq!(said.seg_max.get(), 126);
    assert_eq!(config(&device(64, false)).seg_max.get(), 62);
    assert_eq!(config(&device(2, false)).seg_max.get(), 1);
}

#[test]
fn reads_of_parts_and_beyond_the_end() {
    let device = device(256, false);
    let mut part = [0xff; 4];
    device.read_config(34, &mut part);
    assert_eq!(part, [4, 0, 0, 0]);
    let mut beyond = [0xff; 8];
    device.read_config(size_of::<Config>() - 4, &mut beyond);
    assert_eq!(beyond, [0; 8]);
    device.read_config(usize::MAX, &mut beyond);
    assert_eq!(beyond, [0; 8]);
}

#[test]
fn a_driver_chooses_its_cache_mode_and_nothing_else() {
    let device = device(256, false);
    // Before a driver is known, it may be one that chose 0 before this process began.
    assert_eq!(config(&device).writeback, 0);
    device.reset(Driver::Fresh);
    assert_eq!(config(&device).writeback, 1);
    device.write_config(CONFIG_WRITEBACK, &[0]).unwrap();
    assert_eq!(config(&device).writeback, 0);
    let wrong = ConfigError::Value { field: "writeback", value: 2 };
    assert_eq!(device.write_config(CONFIG_WRITEBACK, &[2]), Err(wrong));
    for (offset, bytes) in [(0, &[0][..]), (CONFIG_WRITEBACK, &[1, 0]), (usize::MAX, &[1, 1])] {
        assert!(matches!(device.write_config(offset, bytes), Err(ConfigError::ReadOnly { .. })));
    }
    assert_eq!(config(&device).writeback, 0);
    device.reset(Driver::Fresh);
    assert_eq!(config(&device).writeback, 1);
}

/// QEMU shows the next driver the value that the last one wrote, without asking the device.
#[test]
fn the_cache_mode_outlives_a_reset_by_the_same_front_end() {
    let device = device(256, false);
    device.reset(Driver::Fresh);
    for writeback in [0, 1, 0] {
        device.write_config(CONFIG_WRITEBACK, &[writeback]).unwrap();
        device.reset(Driver::SameFrontEnd);
        assert_eq!(config(&device).writeback, writeback);
    }
}

/// The device's state contains the driver's choice. An unknown choice counts as off.
#[test]
fn the_cache_mode_is_saved_and_loaded() {
    let old = device(256, false);
    assert_eq!(old.save(), b"blk1\0");
    old.reset(Driver::Fresh);
    assert_eq!(old.save(), b"blk1\x01");
    old.reset(Driver::Unknown);
    assert_eq!((config(&old).writeback, old.save()), (0, b"blk1\0".to_vec()));
    let new = device(256, false);
    for (state, writeback) in [(b"blk1\x01", 1), (b"blk1\0", 0), (b"blk1\x01", 1)] {
        new.load(state).unwrap();
        assert_eq!(config(&new).writeback, writeback);
    }
    for wrong in [&b""[..], b"blk1", b"blk1\x02", b"blk2\0", b"blk1\0\0"] {
        assert!(new.load(wrong).is_err(), "{wrong:?}");
        assert_eq!(config(&new).writeback, 1);
    }
}

#[test]
fn every_ring_is_offered() {
    let rings = Features::VERSION_1
        | Features::EVENT_IDX
        | Features::INDIRECT_DESC
        | Features::RING_PACKED
        | Features::IN_ORDER;
    assert!(device(256, false).features().contains(rings));
}

#[test]
fn read_only_is_a_feature() {
    let ro =
        |device: Blk| BlkFeatures::from_bits_truncate(device.features().bits()).contains(BlkFeatures::RO);
    assert!(ro(device(256, true)) && !ro(device(256, false)));
}
