//! Devices for tests of this crate, of the kind that its integration tests have.

#[path = "../tests/common/toy.rs"]
mod toy;

use std::sync::Arc;

use kickless_device::Operate;

use crate::config::{DeviceConfig, Identity, KindConfig, Making, Values, read};
use toy::{MadeDevice, ToyConfig, ToyKind};

/// Returns a device without rings.
pub(crate) fn fake_device() -> Arc<dyn Operate> {
    toy::toy()
}

/// Returns the configuration of a toy.
pub(crate) fn fake_config(name: &str) -> DeviceConfig {
    type Make = fn(&ToyConfig, &Making<'_>) -> MadeDevice;
    // A thread of a model has too little stack for the description of all options.
    let make = || {
        let none = Values::new();
        DeviceConfig {
            kind: KindConfig::new::<ToyKind<Make>>(ToyConfig::default()),
            identity: Identity { name: None },
            serve: read(&none).unwrap(),
            share: read(&none).unwrap(),
        }
    };
    let made = std::thread::spawn(make).join().unwrap();
    DeviceConfig { identity: Identity { name: Some(name.into()) }, ..made }
}
