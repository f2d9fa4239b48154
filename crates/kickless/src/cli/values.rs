//! Values of options, and how they are written: on the command line and in configuration files alike. What a parser says of a
//! wrong value is the end of a sentence.

use std::ffi::OsString;
use std::time::Duration;

use clap::ValueEnum;
use kickless_disk::DiskSpec;
use kickless_io::{CompletionMode, EngineKind, UnknownCompletion, UnknownEngine};
use kickless_memory::quota;
use kickless_values::{parse_duration, parse_number, parse_size};

/// The most queues unless something else is said.
pub(crate) const NUM_QUEUES: u16 = 64;
/// The most entries of a queue unless something else is said.
pub(crate) const QUEUE_SIZE: u16 = 1024;
/// VIRTIO_BLK_T_GET_ID answers with this many bytes (virtio 1.3, section 5.2.6).
const SERIAL_BYTES_MAX: usize = 20;
/// A vhost-user kick names its queue in eight bits.
const NUM_QUEUES_MAX: u16 = 256;
/// Threads that one process could make sense of.
const WORKERS_MAX: u16 = 256;
/// No driver counts more kicks than this.
const KICKS_PER_SEC_MAX: u32 = 1_000_000_000;
/// A guest takes a disk that answers later than this for a broken one before long.
const DELAY_MAX: Duration = Duration::from_secs(1);
/// A ring that has been idle for longer is idle.
const IDLE_MAX: Duration = Duration::from_secs(3600);

/// `on` or `off`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    /// `on`.
    On,
    /// `off`.
    Off,
}

/// `--poll`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PollMode {
    /// When it pays.
    Auto,
    /// As long as there are rings.
    Always,
    /// Not at all.
    Never,
    /// From a rate of kicks on.
    Rate,
}

impl PollMode {
    /// What it is called.
    pub(crate) fn name(self) -> &'static str {
        match self {
            PollMode::Auto => "auto",
            PollMode::Always => "always",
            PollMode::Never => "never",
            PollMode::Rate => "rate",
        }
    }
}

/// One of the values of `T`, by name.
pub(crate) fn parse_name<T: ValueEnum>(text: &str) -> Result<T, String> {
    T::from_str(text, false).map_err(|_| {
        let values = T::value_variants().iter().filter_map(ValueEnum::to_possible_value);
        let names: Vec<String> = values.map(|value| value.get_name().to_owned()).collect();
        format!("it must be {}", names.join(" or "))
    })
}

/// `--blk-file`. Takes any bytes, as paths do.
pub(crate) fn parse_blk_file(text: OsString) -> Result<DiskSpec, String> {
    DiskSpec::parse(&text).map_err(|error| error.to_string())
}

pub(crate) fn parse_engine(text: &str) -> Result<EngineKind, String> {
    text.parse().map_err(|error: UnknownEngine| error.to_string())
}

pub(crate) fn parse_completion(text: &str) -> Result<CompletionMode, String> {
    text.parse().map_err(|error: UnknownCompletion| error.to_string())
}

pub(crate) fn parse_serial(text: &str) -> Result<String, String> {
    if text.len() > SERIAL_BYTES_MAX {
        return Err(format!("it has {} bytes, and {SERIAL_BYTES_MAX} are the most", text.len()));
    }
    if !text.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic()) {
        return Err("only printable ASCII characters can be sent to a guest".into());
    }
    Ok(text.into())
}

pub(crate) fn parse_num_queues(text: &str) -> Result<u16, String> {
    parse_number(text, 1, NUM_QUEUES_MAX.into())
}

pub(crate) fn parse_workers(text: &str) -> Result<u16, String> {
    parse_number(text, 1, WORKERS_MAX.into())
}

/// Address space that a device's front-end may take, up to what there is for all devices.
pub(crate) fn parse_memory_max(text: &str) -> Result<u64, String> {
    match parse_size(text)? {
        bytes if bytes < 1 << 20 => Err("it must be 1M at least".into()),
        bytes if bytes > quota::BYTES_MAX => Err(format!(
            "it must be {}T at most, which is what all devices of a process have",
            quota::BYTES_MAX >> 40
        )),
        bytes => Ok(bytes),
    }
}

pub(crate) fn parse_mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 && !text.starts_with('+') => Ok(mode),
        _ => Err("it must be an octal number from 0 to 0777".into()),
    }
}

/// Kicks a second; 0 is a rate that is never reached.
pub(crate) fn parse_rate(text: &str) -> Result<u32, String> {
    parse_number(text, 0, KICKS_PER_SEC_MAX)
}

/// A delay that a request or its completion may have; it can be none.
pub(crate) fn parse_delay(text: &str) -> Result<Duration, String> {
    match parse_duration(text)? {
        delay if delay <= DELAY_MAX => Ok(delay),
        _ => Err("it must be 1s at most".into()),
    }
}

/// For how long a ring is looked at that yields nothing.
pub(crate) fn parse_idle(text: &str) -> Result<Duration, String> {
    match parse_duration(text)? {
        Duration::ZERO => Err("it must be above 0".into()),
        idle if idle <= IDLE_MAX => Ok(idle),
        _ => Err("it must be 1h at most".into()),
    }
}
