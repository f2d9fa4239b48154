//! Takes a device's options apart, for the tests of the command line and of the configuration file.

use kickless_daemon::{BlkConfig, DeviceConfig, DeviceKind, NetConfig};

/// Returns the options of a disk.
pub(crate) fn disk_of(device: &DeviceConfig) -> &BlkConfig {
    match &device.kind {
        DeviceKind::Blk(disk) => disk,
        DeviceKind::Net(_) => panic!("{device:?}"),
    }
}

/// Returns the options of a card.
pub(crate) fn card_of(device: &DeviceConfig) -> &NetConfig {
    match &device.kind {
        DeviceKind::Net(card) => card,
        DeviceKind::Blk(_) => panic!("{device:?}"),
    }
}
