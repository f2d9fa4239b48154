//! The kind of disks, whose devices a function of the test makes.

use std::sync::Arc;

use kickless_daemon::{CaptureConfig, Kind, LimitsConfig, MakeError, Making, Mistake, Notation, Words};
use kickless_device::Operate;
use kickless_kinds::{BlkConfig, BlkKind, Requests};
use serde_json::Value;

pub(crate) type MadeDevice = Result<Arc<dyn Operate>, MakeError>;

/// A kind with the options of a disk. Its devices come from this function.
pub(crate) struct Made<F>(pub(crate) F);

impl<F: Fn(&BlkConfig, &Making<'_>) -> MadeDevice + Send + Sync + 'static> Kind for Made<F> {
    type Options = BlkConfig;
    type Limited = Requests;

    const WORDS: Words = BlkKind::WORDS;
    const OWN_KEYS: &'static [&'static str] = BlkKind::OWN_KEYS;
    const SET_KEYS: &'static [&'static str] = BlkKind::SET_KEYS;

    fn capabilities() -> Value {
        BlkKind::capabilities()
    }

    fn check(options: &BlkConfig, notation: Notation) -> Result<(), Mistake> {
        BlkKind::check(options, notation)
    }

    fn descriptors(options: &BlkConfig) -> Vec<(&'static str, &str)> {
        BlkKind::descriptors(options)
    }

    fn inherited(options: &BlkConfig) -> Vec<(&'static str, i32)> {
        BlkKind::inherited(options)
    }

    fn log_served(options: &BlkConfig, version: &str) {
        BlkKind::log_served(options, version);
    }

    fn limits(options: &mut BlkConfig) -> &mut LimitsConfig<Requests> {
        BlkKind::limits(options)
    }

    fn set(options: &mut BlkConfig, wanted: &BlkConfig) {
        BlkKind::set(options, wanted);
    }

    fn apply(options: &BlkConfig, device: &dyn Operate) {
        BlkKind::apply(options, device);
    }

    fn size_min(options: &mut BlkConfig) -> Option<&mut Option<u64>> {
        BlkKind::size_min(options)
    }

    fn capture(options: &mut BlkConfig) -> Option<&mut CaptureConfig> {
        BlkKind::capture(options)
    }

    fn make(&self, options: &BlkConfig, making: &Making<'_>) -> MadeDevice {
        (self.0)(options, making)
    }
}
