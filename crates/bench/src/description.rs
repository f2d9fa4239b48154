//! A load as the results describe it, whatever the kind of device is.

use std::time::Duration;

use serde_json::Value;

/// The words for what a load consists of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Units {
    /// Several of them.
    pub(crate) plural: &'static str,
    /// The heading of their rate.
    pub(crate) rate: &'static str,
    /// The heading of the bytes a second, and the number of bytes that it counts in.
    pub(crate) bytes: &'static str,
    pub(crate) bytes_unit: f64,
    /// One of them, after a slash.
    pub(crate) each: &'static str,
}

/// Requests to a disk.
pub(crate) const REQUESTS: Units =
    Units { plural: "requests", rate: "IOPS", bytes: "MiB/s", bytes_unit: (1u64 << 20) as f64, each: "req" };
/// Frames of a network card.
pub(crate) const FRAMES: Units =
    Units { plural: "packets", rate: "packets/s", bytes: "Gbit/s", bytes_unit: 1e9 / 8.0, each: "pkt" };

/// One load.
#[derive(Clone, Debug)]
pub(crate) struct Description {
    /// The load in words.
    pub(crate) words: String,
    /// Requests or frames a second, if the load has a rate.
    pub(crate) rate: Option<u32>,
    /// The measured time of a turn.
    pub(crate) time: Duration,
    /// The bytes of each request or frame.
    pub(crate) bytes: u32,
    pub(crate) units: Units,
    /// The load for programs.
    pub(crate) json: Value,
}
