//! Takes a device's options apart, for the tests of the command line and of the configuration file.

use kickless_daemon::DeviceConfig;
use kickless_kinds::{BlkConfig, BlkKind, NetConfig, NetKind};

/// Returns the options of a disk.
pub(crate) fn disk_of(device: &DeviceConfig) -> &BlkConfig {
    device.kind.options::<BlkKind>().unwrap_or_else(|| panic!("{device:?}"))
}

/// Returns the options of a card.
pub(crate) fn card_of(device: &DeviceConfig) -> &NetConfig {
    device.kind.options::<NetKind>().unwrap_or_else(|| panic!("{device:?}"))
}
