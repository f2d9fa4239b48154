//! The limits of the requests of a disk, by QEMU's names.

use std::iter::zip;
use std::time::Duration;

use clap::Args;
use kickless_device::{Limit, Limits, Rate};
use serde::Serialize;

use super::notation::{Mistake, Notation};
use super::text;
use super::values::{parse_bps, parse_burst, parse_group, parse_iops};

/// The part of a second whose units a bucket without bursts holds. A worker that is late by less loses
/// nothing, and a guest that paused gains a tenth of a second at most.
const SLACK: u64 = 10;

/// The limits of a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args, Serialize)]
#[command(next_help_heading = "Limits")]
#[serde(rename_all = "kebab-case")]
pub struct LimitsConfig {
    /// Limit of requests a second [default: none]
    #[arg(long, value_name = "N", value_parser = parse_iops)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops: Option<u32>,
    /// Limit of requests a second during a burst above --iops [default: none]
    #[arg(long, value_name = "N", value_parser = parse_iops)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops_max: Option<u32>,
    /// Longest burst at --iops-max [default: 1s]
    #[arg(long, value_name = "DURATION", value_parser = parse_burst)]
    #[serde(serialize_with = "text::serialize_duration", skip_serializing_if = "Option::is_none")]
    pub iops_max_length: Option<Duration>,
    /// Limit of requests a second, reads only [default: none]
    #[arg(long, value_name = "N", value_parser = parse_iops)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops_read: Option<u32>,
    /// Limit of requests a second during a burst above --iops-read [default: none]
    #[arg(long, value_name = "N", value_parser = parse_iops)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops_read_max: Option<u32>,
    /// Longest burst at --iops-read-max [default: 1s]
    #[arg(long, value_name = "DURATION", value_parser = parse_burst)]
    #[serde(serialize_with = "text::serialize_duration", skip_serializing_if = "Option::is_none")]
    pub iops_read_max_length: Option<Duration>,
    /// Limit of requests a second, writes only [default: none]
    #[arg(long, value_name = "N", value_parser = parse_iops)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops_write: Option<u32>,
    /// Limit of requests a second during a burst above --iops-write [default: none]
    #[arg(long, value_name = "N", value_parser = parse_iops)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops_write_max: Option<u32>,
    /// Longest burst at --iops-write-max [default: 1s]
    #[arg(long, value_name = "DURATION", value_parser = parse_burst)]
    #[serde(serialize_with = "text::serialize_duration", skip_serializing_if = "Option::is_none")]
    pub iops_write_max_length: Option<Duration>,
    /// Limit of bytes a second [default: none]
    #[arg(long, value_name = "SIZE", value_parser = parse_bps)]
    #[serde(serialize_with = "text::optional::serialize", skip_serializing_if = "Option::is_none")]
    pub bps: Option<u64>,
    /// Limit of bytes a second during a burst above --bps [default: none]
    #[arg(long, value_name = "SIZE", value_parser = parse_bps)]
    #[serde(serialize_with = "text::optional::serialize", skip_serializing_if = "Option::is_none")]
    pub bps_max: Option<u64>,
    /// Longest burst at --bps-max [default: 1s]
    #[arg(long, value_name = "DURATION", value_parser = parse_burst)]
    #[serde(serialize_with = "text::serialize_duration", skip_serializing_if = "Option::is_none")]
    pub bps_max_length: Option<Duration>,
    /// Limit of bytes a second, reads only [default: none]
    #[arg(long, value_name = "SIZE", value_parser = parse_bps)]
    #[serde(serialize_with = "text::optional::serialize", skip_serializing_if = "Option::is_none")]
    pub bps_read: Option<u64>,
    /// Limit of bytes a second during a burst above --bps-read [default: none]
    #[arg(long, value_name = "SIZE", value_parser = parse_bps)]
    #[serde(serialize_with = "text::optional::serialize", skip_serializing_if = "Option::is_none")]
    pub bps_read_max: Option<u64>,
    /// Longest burst at --bps-read-max [default: 1s]
    #[arg(long, value_name = "DURATION", value_parser = parse_burst)]
    #[serde(serialize_with = "text::serialize_duration", skip_serializing_if = "Option::is_none")]
    pub bps_read_max_length: Option<Duration>,
    /// Limit of bytes a second, writes only [default: none]
    #[arg(long, value_name = "SIZE", value_parser = parse_bps)]
    #[serde(serialize_with = "text::optional::serialize", skip_serializing_if = "Option::is_none")]
    pub bps_write: Option<u64>,
    /// Limit of bytes a second during a burst above --bps-write [default: none]
    #[arg(long, value_name = "SIZE", value_parser = parse_bps)]
    #[serde(serialize_with = "text::optional::serialize", skip_serializing_if = "Option::is_none")]
    pub bps_write_max: Option<u64>,
    /// Longest burst at --bps-write-max [default: 1s]
    #[arg(long, value_name = "DURATION", value_parser = parse_burst)]
    #[serde(serialize_with = "text::serialize_duration", skip_serializing_if = "Option::is_none")]
    pub bps_write_max_length: Option<Duration>,
    /// Count a request as one for each of this number of bytes [default: each request is one]
    #[arg(long, value_name = "SIZE", value_parser = parse_bps)]
    #[serde(serialize_with = "text::optional::serialize", skip_serializing_if = "Option::is_none")]
    pub iops_size: Option<u64>,
    /// Share the limits with all devices that name this group. The last one that is opened or changed sets
    /// them
    #[arg(long, value_name = "NAME", value_parser = parse_group)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
}

/// The options of one limit.
pub(crate) struct Given {
    pub(crate) option: &'static str,
    pub(crate) rate: Option<u64>,
    pub(crate) max: Option<u64>,
    pub(crate) max_length: Option<Duration>,
}

impl Given {
    pub(crate) fn new<T: Into<u64>>(
        option: &'static str,
        rate: Option<T>,
        max: Option<T>,
        max_length: Option<Duration>,
    ) -> Self {
        Self { option, rate: rate.map(T::into), max: max.map(T::into), max_length }
    }
}

impl LimitsConfig {
    /// The keys that cards do not have.
    pub const KEYS: [&'static str; 16] = [
        "iops",
        "iops-max",
        "iops-max-length",
        "iops-read",
        "iops-read-max",
        "iops-read-max-length",
        "iops-write",
        "iops-write-max",
        "iops-write-max-length",
        "bps-read",
        "bps-read-max",
        "bps-read-max-length",
        "bps-write",
        "bps-write-max",
        "bps-write-max-length",
        "iops-size",
    ];

    /// The keys that disks and cards have.
    pub const SHARED_KEYS: [&'static str; 4] = ["bps", "bps-max", "bps-max-length", "group"];

    /// Returns the first of [`LimitsConfig::KEYS`] that has a value.
    pub(crate) fn key(&self) -> Option<&'static str> {
        first_key(&Self::KEYS, self.given()).or(self.iops_size.map(|_| "iops-size"))
    }

    /// Returns the options of the limits of requests and of bytes: for all, for reads, for writes.
    fn given(&self) -> [[Given; 3]; 2] {
        [
            [
                Given::new("iops", self.iops, self.iops_max, self.iops_max_length),
                Given::new("iops-read", self.iops_read, self.iops_read_max, self.iops_read_max_length),
                Given::new("iops-write", self.iops_write, self.iops_write_max, self.iops_write_max_length),
            ],
            [
                Given::new("bps", self.bps, self.bps_max, self.bps_max_length),
                Given::new("bps-read", self.bps_read, self.bps_read_max, self.bps_read_max_length),
                Given::new("bps-write", self.bps_write, self.bps_write_max, self.bps_write_max_length),
            ],
        ]
    }

    pub(crate) fn check(&self, notation: Notation) -> Result<(), Mistake> {
        check(self.given(), notation)
    }

    /// Returns the limits.
    pub fn limits(&self) -> Limits {
        limits(self.given(), self.iops_size)
    }
}

/// Returns the first of `keys` that has a value. The keys are those of the options, in their order, without
/// those of [`LimitsConfig::SHARED_KEYS`].
pub(crate) fn first_key(keys: &[&'static str], given: [[Given; 3]; 2]) -> Option<&'static str> {
    let own = given.into_iter().flatten().filter(|given| given.option != "bps");
    let has_value =
        own.flat_map(|given| [given.rate.is_some(), given.max.is_some(), given.max_length.is_some()]);
    zip(keys, has_value).find_map(|(key, has_value)| has_value.then_some(*key))
}

/// Checks that the options of each limit can be combined.
pub(crate) fn check(given: [[Given; 3]; 2], notation: Notation) -> Result<(), Mistake> {
    for Given { option, rate, max, max_length } in given.into_iter().flatten() {
        let base = notation.option(option);
        let mistake = |why: String| Err(Mistake { option, why });
        match (rate, max, max_length) {
            (None, Some(_), _) => return mistake(format!("{base}-max needs it")),
            (_, None, Some(_)) => return mistake(format!("{base}-max-length needs {base}-max")),
            (Some(rate), Some(max), _) if max < rate => {
                return mistake(format!("{base}-max is for bursts, and must not be less"));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Returns the limits of these options. A request counts as one for each `request_size` bytes.
pub(crate) fn limits(given: [[Given; 3]; 2], request_size: Option<u64>) -> Limits {
    let limit = |Given { rate, max, max_length, .. }: Given| {
        let Some(per_second) = rate else { return Limit::default() };
        let slack = |per_second: u64| (per_second / SLACK).max(1);
        let Some(max) = max else {
            return Limit { sustained: Rate { per_second, burst: slack(per_second) }, peak: Rate::default() };
        };
        // During a burst, the sustained rate refills a part of what the burst takes.
        let millis = max_length.map_or(1000, |length| length.as_millis());
        let extra = u128::from(max.saturating_sub(per_second)) * millis / 1000;
        let burst = u64::try_from(extra).unwrap_or(u64::MAX).max(slack(per_second));
        Limit { sustained: Rate { per_second, burst }, peak: Rate { per_second: max, burst: slack(max) } }
    };
    let [requests, bytes] = given.map(|all| all.map(limit));
    Limits { requests, bytes, request_size: request_size.unwrap_or(0) }
}
