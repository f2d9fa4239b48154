//! A registry of disks, and load on them.
#![allow(dead_code, reason = "each test uses a part of it")]

#[path = "../../../daemon/tests/common/rig.rs"]
mod rig;

use std::path::Path;
use std::time::Duration;

use kickless_daemon::DeviceConfig;
use kickless_driver::Options;
use kickless_kinds::kinds;
pub(crate) use kickless_testing::LIMIT;
use kickless_testing::pattern;
pub(crate) use rig::Rig;
use serde_json::json;

pub(crate) const BLOCK: usize = 4096;

pub(crate) type Disk = kickless_driver::Disk;

impl Rig {
    pub(crate) fn new(workers: u16, devices_max: usize) -> Self {
        Self::of(kinds(), workers, devices_max)
    }

    /// Returns the configuration of a device with this name and disk.
    pub(crate) fn config(&self, name: &str, disk: &str) -> DeviceConfig {
        let socket = self.socket(name);
        self.read(&json!({ "name": name, "socket-path": socket, "blk-file": disk, "cache": "writeback" }))
    }

    pub(crate) fn connect(&self, name: &str) -> Disk {
        connect(&self.socket(name))
    }
}

pub(crate) fn connect(socket: &Path) -> Disk {
    let options = Options {
        queues: 2,
        queue_size: 64,
        reconnect_limit: Duration::ZERO,
        connect_timeout: LIMIT,
        ..Options::new(socket)
    };
    Disk::connect(options).unwrap()
}

/// Returns the content of block `block` of a device in this version.
pub(crate) fn content(device: u64, block: u64, version: u64) -> Vec<u8> {
    pattern(device << 48 | block << 24 | version, BLOCK)
}
