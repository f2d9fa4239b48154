//! Values of options, and how they are written: on the command line and in configuration files alike. What a parser says of a
//! wrong value is the end of a sentence.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use clap::ValueEnum;
use kickless_disk::BadRule;
use kickless_io::{CompletionMode, EngineKind, UnknownCompletion, UnknownEngine};
use kickless_memory::quota;
use kickless_values::{parse_duration, parse_number, parse_size};

use crate::service::{BlkFile, Fault};

/// The most queues unless something else is said.
pub(crate) const NUM_QUEUES: u16 = 64;
/// The most entries of a queue unless something else is said.
pub(crate) const QUEUE_SIZE: u16 = 1024;
/// VIRTIO_BLK_T_GET_ID answers with this many bytes (virtio 1.3, section 5.2.6).
const SERIAL_BYTES_MAX: usize = 20;
/// A vhost-user kick names its queue in eight bits.
const NUM_QUEUES_MAX: u16 = 256;
/// Block sizes, capacities and requests are counted in these.
const SECTOR_BYTES: u64 = 512;
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

pub(crate) fn parse_blk_file(text: OsString) -> Result<BlkFile, String> {
    if text.is_empty() {
        return Err("give the path of a file or block device".into());
    }
    let size = |text: &str| match parse_size(text)? {
        0 => Err("a disk needs a size above 0".into()),
        bytes if bytes > i64::MAX as u64 => Err(format!("{text:?} is too large")),
        bytes if !bytes.is_multiple_of(SECTOR_BYTES) => {
            Err(format!("{text:?} is not a multiple of 512 bytes"))
        }
        bytes => Ok(bytes),
    };
    if let Some(path) = text.as_bytes().strip_prefix(b"qcow2:") {
        return parse_qcow2(OsStr::from_bytes(path));
    }
    match text.to_str().and_then(|text| text.split_once(':')) {
        Some((scheme, rest)) if scheme.starts_with("nbd") && rest.starts_with("//") => {
            parse_nbd(&text.to_string_lossy())
        }
        Some(("rbd", _)) => parse_rbd(&text.to_string_lossy()),
        Some(("null", bytes)) => size(bytes).map(BlkFile::Null),
        Some(("mem", bytes)) => size(bytes).map(BlkFile::Memory),
        Some(("fault", rest)) => parse_fault(rest),
        _ => Ok(BlkFile::Path(Path::new(&text).to_owned())),
    }
}

#[cfg(feature = "qcow2")]
fn parse_qcow2(path: &OsStr) -> Result<BlkFile, String> {
    if path.is_empty() {
        return Err("write qcow2:PATH".into());
    }
    Ok(BlkFile::Qcow2(path.into()))
}

#[cfg(not(feature = "qcow2"))]
fn parse_qcow2(_: &OsStr) -> Result<BlkFile, String> {
    Err("this program was built without the feature qcow2".into())
}

#[cfg(feature = "nbd")]
fn parse_nbd(uri: &str) -> Result<BlkFile, String> {
    uri.parse()
        .map(|uri| BlkFile::Nbd(Box::new(uri)))
        .map_err(|error: kickless_disk::BadUri| error.to_string())
}

#[cfg(not(feature = "nbd"))]
fn parse_nbd(_: &str) -> Result<BlkFile, String> {
    Err("this program was built without the feature nbd".into())
}

fn parse_rbd(text: &str) -> Result<BlkFile, String> {
    let name = text.parse().map_err(|error: kickless_disk::BadRbdName| error.to_string())?;
    rbd(name)
}

#[cfg(feature = "rbd")]
fn rbd(name: kickless_disk::RbdName) -> Result<BlkFile, String> {
    Ok(BlkFile::Rbd(Box::new(name)))
}

#[cfg(not(feature = "rbd"))]
fn rbd(name: kickless_disk::RbdName) -> Result<BlkFile, String> {
    Err(format!(
        "{name} needs a program that was built with the feature rbd: cargo build --features rbd, with librbd-dev"
    ))
}

/// What follows `fault:`.
fn parse_fault(text: &str) -> Result<BlkFile, String> {
    let (rules, under) = text.split_once(':').ok_or("write fault:RULES:DISK")?;
    let parsed = rules.parse().map_err(|error: BadRule| error.to_string())?;
    match parse_blk_file(under.into())? {
        BlkFile::Fault(_) => Err("one fault: is enough; put all rules into it".into()),
        under => Ok(BlkFile::Fault(Box::new(Fault { rules: parsed, text: rules.into(), under }))),
    }
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
