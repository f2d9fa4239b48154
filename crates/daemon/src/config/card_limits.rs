//! The limits of the frames of a network card.

use std::time::Duration;

use clap::Args;
use kickless_device::Limits;
use serde::Serialize;

use super::limits::{Given, check, first_key, limits};
use super::notation::{Mistake, Notation};
use super::text;
use super::values::{parse_bps, parse_burst, parse_group, parse_iops};

/// The limits of a card. Receive is the direction to the guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args, Serialize)]
#[command(next_help_heading = "Limits")]
#[serde(rename_all = "kebab-case")]
pub struct CardLimitsConfig {
    /// Limit of frames a second [default: none]
    #[arg(long, value_name = "N", value_parser = parse_iops)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub frames: Option<u32>,
    /// Limit of frames a second during a burst above --frames [default: none]
    #[arg(long, value_name = "N", value_parser = parse_iops)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub frames_max: Option<u32>,
    /// Longest burst at --frames-max [default: 1s]
    #[arg(long, value_name = "DURATION", value_parser = parse_burst)]
    #[serde(serialize_with = "text::serialize_duration", skip_serializing_if = "Option::is_none")]
    pub frames_max_length: Option<Duration>,
    /// Limit of frames to the guest a second [default: none]
    #[arg(long, value_name = "N", value_parser = parse_iops)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub frames_receive: Option<u32>,
    /// Limit of frames to the guest a second during a burst above --frames-receive [default: none]
    #[arg(long, value_name = "N", value_parser = parse_iops)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub frames_receive_max: Option<u32>,
    /// Longest burst at --frames-receive-max [default: 1s]
    #[arg(long, value_name = "DURATION", value_parser = parse_burst)]
    #[serde(serialize_with = "text::serialize_duration", skip_serializing_if = "Option::is_none")]
    pub frames_receive_max_length: Option<Duration>,
    /// Limit of frames of the guest a second [default: none]
    #[arg(long, value_name = "N", value_parser = parse_iops)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub frames_transmit: Option<u32>,
    /// Limit of frames of the guest a second during a burst above --frames-transmit [default: none]
    #[arg(long, value_name = "N", value_parser = parse_iops)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub frames_transmit_max: Option<u32>,
    /// Longest burst at --frames-transmit-max [default: 1s]
    #[arg(long, value_name = "DURATION", value_parser = parse_burst)]
    #[serde(serialize_with = "text::serialize_duration", skip_serializing_if = "Option::is_none")]
    pub frames_transmit_max_length: Option<Duration>,
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
    /// Limit of bytes to the guest a second [default: none]
    #[arg(long, value_name = "SIZE", value_parser = parse_bps)]
    #[serde(serialize_with = "text::optional::serialize", skip_serializing_if = "Option::is_none")]
    pub bps_receive: Option<u64>,
    /// Limit of bytes to the guest a second during a burst above --bps-receive [default: none]
    #[arg(long, value_name = "SIZE", value_parser = parse_bps)]
    #[serde(serialize_with = "text::optional::serialize", skip_serializing_if = "Option::is_none")]
    pub bps_receive_max: Option<u64>,
    /// Longest burst at --bps-receive-max [default: 1s]
    #[arg(long, value_name = "DURATION", value_parser = parse_burst)]
    #[serde(serialize_with = "text::serialize_duration", skip_serializing_if = "Option::is_none")]
    pub bps_receive_max_length: Option<Duration>,
    /// Limit of bytes of the guest a second [default: none]
    #[arg(long, value_name = "SIZE", value_parser = parse_bps)]
    #[serde(serialize_with = "text::optional::serialize", skip_serializing_if = "Option::is_none")]
    pub bps_transmit: Option<u64>,
    /// Limit of bytes of the guest a second during a burst above --bps-transmit [default: none]
    #[arg(long, value_name = "SIZE", value_parser = parse_bps)]
    #[serde(serialize_with = "text::optional::serialize", skip_serializing_if = "Option::is_none")]
    pub bps_transmit_max: Option<u64>,
    /// Longest burst at --bps-transmit-max [default: 1s]
    #[arg(long, value_name = "DURATION", value_parser = parse_burst)]
    #[serde(serialize_with = "text::serialize_duration", skip_serializing_if = "Option::is_none")]
    pub bps_transmit_max_length: Option<Duration>,
    /// Share the limits with all cards that name this group. The last one that is opened or changed sets them
    #[arg(long, value_name = "NAME", value_parser = parse_group)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
}

impl CardLimitsConfig {
    /// The keys that disks do not have.
    pub const KEYS: [&'static str; 15] = [
        "frames",
        "frames-max",
        "frames-max-length",
        "frames-receive",
        "frames-receive-max",
        "frames-receive-max-length",
        "frames-transmit",
        "frames-transmit-max",
        "frames-transmit-max-length",
        "bps-receive",
        "bps-receive-max",
        "bps-receive-max-length",
        "bps-transmit",
        "bps-transmit-max",
        "bps-transmit-max-length",
    ];

    /// Returns the first of [`CardLimitsConfig::KEYS`] that has a value.
    pub(crate) fn key(&self) -> Option<&'static str> {
        first_key(&Self::KEYS, self.given())
    }

    /// Returns the options of the limits of frames and of bytes: for all, to the guest, of the guest.
    fn given(&self) -> [[Given; 3]; 2] {
        [
            [
                Given::new("frames", self.frames, self.frames_max, self.frames_max_length),
                Given::new(
                    "frames-receive",
                    self.frames_receive,
                    self.frames_receive_max,
                    self.frames_receive_max_length,
                ),
                Given::new(
                    "frames-transmit",
                    self.frames_transmit,
                    self.frames_transmit_max,
                    self.frames_transmit_max_length,
                ),
            ],
            [
                Given::new("bps", self.bps, self.bps_max, self.bps_max_length),
                Given::new(
                    "bps-receive",
                    self.bps_receive,
                    self.bps_receive_max,
                    self.bps_receive_max_length,
                ),
                Given::new(
                    "bps-transmit",
                    self.bps_transmit,
                    self.bps_transmit_max,
                    self.bps_transmit_max_length,
                ),
            ],
        ]
    }

    pub(crate) fn check(&self, notation: Notation) -> Result<(), Mistake> {
        check(self.given(), notation)
    }

    /// Returns the limits.
    pub fn limits(&self) -> Limits {
        limits(self.given(), None)
    }
}
