//! A registry of toys.
#![allow(dead_code, reason = "each test uses a part of it")]

pub(crate) mod hooked;
mod rig;
pub(crate) mod toy;

use kickless_daemon::{DeviceConfig, Kinds, Making};
pub(crate) use kickless_testing::LIMIT;
pub(crate) use rig::Rig;
use serde_json::json;
use toy::{MadeDevice, ToyConfig, ToyKind, make_toy};

impl Rig {
    pub(crate) fn new(workers: u16, devices_max: usize) -> Self {
        Self::with_devices(workers, devices_max, make_toy)
    }

    /// Makes a registry whose devices `make` makes.
    pub(crate) fn with_devices(
        workers: u16,
        devices_max: usize,
        make: impl Fn(&ToyConfig, &Making<'_>) -> MadeDevice + Send + Sync + 'static,
    ) -> Self {
        Self::of(Kinds::new(ToyKind(make)), workers, devices_max)
    }

    /// Returns the configuration of a device with this name.
    pub(crate) fn config(&self, name: &str, toy: &str) -> DeviceConfig {
        self.read(&json!({ "name": name, "socket-path": self.socket(name), "toy": toy }))
    }

    /// Adds a device that ends with an error, and waits until it has ended.
    pub(crate) fn add_failed_toy(&self, name: &str) {
        self.add_failed(self.config(name, "car"));
    }
}
