//! Parsers for the values of options, on the command line and in configuration files. The error of a parser
//! is the end of a sentence.

use std::fmt;
use std::time::Duration;

use clap::ValueEnum;
use kickless_memory::quota;
use kickless_values::{parse_duration, parse_number, parse_size, parse_size_within};

use super::name::parse_device_name;

/// Default of `queue-size`.
pub(crate) const QUEUE_SIZE: u16 = 1024;
/// Far more workers than a host needs. Limits the threads and engines of the process.
const WORKERS_MAX: u16 = 256;
/// One visit in each nanosecond, which no worker reaches.
const VISITS_PER_SEC_MAX: u32 = 1_000_000_000;
/// A guest soon treats a disk with a longer delay as broken.
const DELAY_MAX: Duration = Duration::from_secs(1);
/// The slack of a limit without bursts has this length.
const BURST_MIN: Duration = Duration::from_millis(100);
/// Less guest memory than any machine has.
const MEMORY_MIN: u64 = 1 << 20;
/// Longer polling of an idle ring has no use.
const IDLE_MAX: Duration = Duration::from_secs(3600);

/// `on` or `off`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// `on`.
    On,
    /// `off`.
    Off,
}

impl fmt::Display for Switch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        show_name(*self, f)
    }
}

/// The permissions of a socket. They are written in octal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketMode(pub u32);

impl fmt::Display for SocketMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04o}", self.0)
    }
}

/// Writes the name that a value has on the command line.
///
/// # Errors
/// The text cannot be written.
pub fn show_name(value: impl ValueEnum, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    value.to_possible_value().map_or(Ok(()), |value| f.write_str(value.get_name()))
}

pub(crate) fn parse_workers(text: &str) -> Result<u16, String> {
    parse_number(text, 1, WORKERS_MAX.into())
}

/// Parses the address space that the front-end of a device may use. The maximum is that of all devices
/// together.
pub(crate) fn parse_memory_max(text: &str) -> Result<u64, String> {
    parse_size_within(text, MEMORY_MIN, quota::BYTES_MAX)
}

/// Parses a limit of requests in a second.
pub(crate) fn parse_iops(text: &str) -> Result<u32, String> {
    parse_number(text, 1, u32::MAX)
}

/// Parses a limit of bytes in a second, or a number of bytes.
pub(crate) fn parse_bps(text: &str) -> Result<u64, String> {
    match parse_size(text)? {
        0 => Err("it must be above 0".into()),
        bytes => Ok(bytes),
    }
}

/// Parses the length of a burst.
pub(crate) fn parse_burst(text: &str) -> Result<Duration, String> {
    match parse_duration(text)? {
        length if (BURST_MIN..=IDLE_MAX).contains(&length) => Ok(length),
        _ => Err("it must be from 100ms to 1h".into()),
    }
}

/// Parses the name of a group of limits.
pub(crate) fn parse_group(text: &str) -> Result<String, String> {
    parse_device_name(text)
}

pub(crate) fn parse_mode(text: &str) -> Result<SocketMode, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 && !text.starts_with('+') => Ok(SocketMode(mode)),
        _ => Err("it must be an octal number from 0 to 0777, such as 0660".into()),
    }
}

/// Parses a rate of visits per second. The rate 0 stands for a rate that is never reached.
pub(crate) fn parse_rate(text: &str) -> Result<u32, String> {
    parse_number(text, 0, VISITS_PER_SEC_MAX)
}

/// Parses a delay of a request or its completion. Zero is valid.
pub(crate) fn parse_delay(text: &str) -> Result<Duration, String> {
    match parse_duration(text)? {
        delay if delay <= DELAY_MAX => Ok(delay),
        _ => Err("it must be 1s at most".into()),
    }
}

/// Parses the time for which an idle ring is polled.
pub(crate) fn parse_idle(text: &str) -> Result<Duration, String> {
    match parse_duration(text)? {
        Duration::ZERO => Err("it must be above 0".into()),
        idle if idle <= IDLE_MAX => Ok(idle),
        _ => Err("it must be 1h at most".into()),
    }
}

/// The largest share of the pool. The smallest is 1.
const WEIGHT_MAX: u32 = 1000;

pub(crate) fn parse_weight(text: &str) -> Result<u32, String> {
    parse_number(text, 1, WEIGHT_MAX)
}

pub(crate) fn parse_not_empty<T: for<'t> From<&'t str>>(text: &str) -> Result<T, String> {
    if text.is_empty() { Err("it is empty: give it a value or leave it out".into()) } else { Ok(text.into()) }
}
