//! A kind of device for tests of this crate.

use std::sync::Arc;

use clap::Args;
use kickless_device::Operate;
use kickless_testing::{Fake, FakeDevice};
use serde::Serialize;
use serde_json::json;

use crate::config::{
    CaptureConfig, DeviceConfig, Identity, Kind, KindConfig, LimitWords, Limited, LimitsConfig, MakeError,
    Making, Mistake, Notation, Values, Words, read,
};

/// The options of a fake device.
#[derive(Clone, Debug, PartialEq, Args, Serialize)]
pub(crate) struct FakeConfig {
    /// The key of this kind
    #[arg(long)]
    pub(crate) fake: Option<String>,
    /// The limits
    #[command(flatten)]
    #[serde(flatten)]
    pub(crate) limits: LimitsConfig<Fakes>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Fakes;

impl Limited for Fakes {
    const WORDS: LimitWords = LimitWords {
        unit: "fakes",
        units: "fakes",
        directions: ["", "-in", "-out"],
        rates: ["{}"; 3],
        bursts: ["{}"; 3],
        unit_size: None,
        sharing: "fakes",
    };
}

pub(crate) struct FakeKind;

impl Kind for FakeKind {
    type Options = FakeConfig;
    type Limited = Fakes;

    const WORDS: Words =
        Words { name: "fake", key: "fake", one: "a fake", several: "fakes", has_latencies: false };
    const OWN_KEYS: &'static [&'static str] = &[];
    const SET_KEYS: &'static [&'static str] = &[];

    fn capabilities() -> serde_json::Value {
        json!({})
    }

    fn check(options: &FakeConfig, notation: Notation) -> Result<(), Mistake> {
        options.limits.check(notation)
    }

    fn descriptors(_: &FakeConfig) -> Vec<(&'static str, &str)> {
        Vec::new()
    }

    fn inherited(_: &FakeConfig) -> Vec<(&'static str, i32)> {
        Vec::new()
    }

    fn log_served(_: &FakeConfig, _: &str) {}

    fn limits(options: &mut FakeConfig) -> &mut LimitsConfig<Fakes> {
        &mut options.limits
    }

    fn set(_: &mut FakeConfig, _: &FakeConfig) {}

    fn apply(_: &FakeConfig, _: &dyn Operate) {}

    fn size_min(_: &mut FakeConfig) -> Option<&mut Option<u64>> {
        None
    }

    fn capture(_: &mut FakeConfig) -> Option<&mut CaptureConfig> {
        None
    }

    fn make(&self, _: &FakeConfig, _: &Making<'_>) -> Result<Arc<dyn Operate>, MakeError> {
        Ok(fake_device())
    }
}

/// Returns a device without rings.
pub(crate) fn fake_device() -> Arc<dyn Operate> {
    struct Idle;
    impl Fake for Idle {}
    Arc::new(FakeDevice(Idle))
}

/// Returns the configuration of a fake device.
pub(crate) fn fake_config(name: &str) -> DeviceConfig {
    // A thread of a model has too little stack for the description of all options.
    let make = || {
        let none = Values::new();
        let (fake, limits) = (None, LimitsConfig::default());
        DeviceConfig {
            kind: KindConfig::new::<FakeKind>(FakeConfig { fake, limits }),
            identity: Identity { name: None },
            serve: read(&none).unwrap(),
            share: read(&none).unwrap(),
        }
    };
    let made = std::thread::spawn(make).join().unwrap();
    DeviceConfig { identity: Identity { name: Some(name.into()) }, ..made }
}
