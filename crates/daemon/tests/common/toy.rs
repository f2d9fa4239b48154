//! A kind of device for tests: its devices have no rings, or are those that a function of the test makes.
#![allow(dead_code, reason = "each test uses a part of it")]

use std::sync::Arc;

use clap::Args;
use kickless_daemon::{
    CaptureConfig, Kind, LimitWords, Limited, LimitsConfig, MakeError, Making, Mistake, Notation, Served,
    Settable, Words,
};
use kickless_device::Operate;
use kickless_opener::Grant;
use kickless_testing::{Fake, FakeDevice};
use serde::Serialize;
use serde_json::{Value, json};

pub(crate) type MadeDevice = Result<Arc<dyn Operate>, MakeError>;

/// The options of a toy.
#[derive(Clone, Debug, Default, PartialEq, Args, Serialize)]
pub(crate) struct ToyConfig {
    /// The toy
    #[arg(long)]
    pub(crate) toy: Option<String>,
    /// The limits
    #[command(flatten)]
    #[serde(flatten)]
    pub(crate) limits: LimitsConfig<Toys>,
}

/// The requests of a toy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Toys;

impl Limited for Toys {
    const WORDS: LimitWords = LimitWords {
        unit: "toys",
        units: "toys",
        directions: ["", "-in", "-out"],
        rates: ["{}"; 3],
        bursts: ["{}"; 3],
        unit_size: None,
        sharing: "toys",
    };
}

/// A kind whose devices come from this function.
pub(crate) struct ToyKind<F>(pub(crate) F);

impl<F: Fn(&ToyConfig, &Making<'_>) -> MadeDevice + Send + Sync + 'static> Kind for ToyKind<F> {
    type Options = ToyConfig;
    type Limited = Toys;

    const WORDS: Words = Words {
        name: "toy",
        key: "toy",
        one: "a toy",
        several: "toys",
        has_latencies: false,
        examples: &[("Serve a toy:", "kickless toy --socket-path=/tmp/toy.sock --toy=7")],
    };
    const OWN_KEYS: &'static [&'static str] = &["toy"];
    const SETTABLE: &'static [Settable<ToyConfig>] = &[];

    fn capabilities() -> Value {
        json!({ "type": "toy" })
    }

    fn check(options: &ToyConfig, notation: Notation) -> Result<(), Mistake> {
        options.limits.check(notation)
    }

    fn descriptors(_: &ToyConfig) -> Vec<(&'static str, &str)> {
        Vec::new()
    }

    fn inherited(_: &ToyConfig) -> Vec<(&'static str, i32)> {
        Vec::new()
    }

    fn grants(_: &ToyConfig) -> Vec<Grant> {
        Vec::new()
    }

    fn log_served(_: &ToyConfig, _: &Served) {}

    fn limits(options: &mut ToyConfig) -> &mut LimitsConfig<Toys> {
        &mut options.limits
    }

    fn size_min(_: &mut ToyConfig) -> Option<&mut Option<u64>> {
        None
    }

    fn capture(_: &mut ToyConfig) -> Option<&mut CaptureConfig> {
        None
    }

    fn make(&self, options: &ToyConfig, making: &Making<'_>) -> MadeDevice {
        (self.0)(options, making)
    }
}

/// Makes a device without rings. A toy called `broken` cannot be made.
pub(crate) fn make_toy(options: &ToyConfig, _: &Making<'_>) -> MadeDevice {
    match options.toy.as_deref() {
        Some("broken") => Err(MakeError { option: "toy", source: "it is broken".into() }),
        _ => Ok(toy()),
    }
}

/// Returns a device without rings.
pub(crate) fn toy() -> Arc<dyn Operate> {
    struct Idle;
    impl Fake for Idle {}
    Arc::new(FakeDevice(Idle))
}
