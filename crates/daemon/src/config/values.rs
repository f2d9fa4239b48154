//! Parsers for the values of options, on the command line and in configuration files. The error of a parser
//! is the end of a sentence.

use std::fmt;
use std::time::Duration;

use clap::ValueEnum;
use kickless_disk::SECTOR;
use kickless_memory::quota;
use kickless_spec::net::{ETHERNET_HEADER_LEN, FRAME_MAX, Header, MTU_MAX, MTU_MIN};
use kickless_values::{parse_duration, parse_number, parse_size};

use super::name::parse_device_name;

/// Default of `num-queues`.
pub(crate) const NUM_QUEUES: u16 = 64;
/// Default of `queue-size`.
pub(crate) const QUEUE_SIZE: u16 = 1024;
/// Default of `logical-block-size`, and its smallest value: a sector.
pub(crate) const BLOCK_SIZE: u32 = SECTOR as u32;
/// The smallest page of a guest. Linux before 6.15 refuses a disk whose blocks are larger than a page.
const BLOCK_SIZE_MAX: u32 = 4096;
/// VIRTIO_BLK_T_GET_ID answers with this many bytes (virtio 1.3, section 5.2.6).
const SERIAL_BYTES_MAX: usize = 20;
/// A vhost-user kick names its queue in eight bits.
const NUM_QUEUES_MAX: u16 = 256;
/// Default of `num-queue-pairs`.
pub(crate) const NUM_QUEUE_PAIRS: u16 = 64;
/// A card has two queues for each pair and one for commands, and a vhost-user kick names its queue in eight
/// bits.
const NUM_QUEUE_PAIRS_MAX: u16 = (NUM_QUEUES_MAX - 1) / 2;
/// The longest frame, so that a capture has all of it.
pub(crate) const CAPTURE_LENGTH_MAX: u32 = (FRAME_MAX - size_of::<Header>()) as u32;
/// Far more workers than a host needs. Limits the threads and engines of the process.
const WORKERS_MAX: u16 = 256;
/// The smallest cache of L2 tables that has an effect: 16 pieces of 4 KiB.
const CACHE_BYTES_MIN: u64 = 64 << 10;
/// The L2 tables of 512 TiB in clusters of 64 KiB. A larger cache is a mistake.
const CACHE_BYTES_MAX: u64 = 64 << 30;
/// One visit in each nanosecond, which no worker reaches.
const VISITS_PER_SEC_MAX: u32 = 1_000_000_000;
/// A guest soon treats a disk with a longer delay as broken.
const DELAY_MAX: Duration = Duration::from_secs(1);
/// The slack of a limit without bursts has this length.
const BURST_MIN: Duration = Duration::from_millis(100);
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

/// The treatment of an error that an operator can mend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OnError {
    /// `report`: the guest gets the error.
    Report,
    /// `stop`: the device stops until it is resumed.
    Stop,
}

impl fmt::Display for OnError {
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
pub(crate) fn show_name(value: impl ValueEnum, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    value.to_possible_value().map_or(Ok(()), |value| f.write_str(value.get_name()))
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

pub(crate) fn parse_num_queue_pairs(text: &str) -> Result<u16, String> {
    parse_number(text, 1, NUM_QUEUE_PAIRS_MAX.into())
}

pub(crate) fn parse_mtu(text: &str) -> Result<u16, String> {
    parse_number(text, MTU_MIN.into(), MTU_MAX.into())
}

pub(crate) fn parse_capture_length(text: &str) -> Result<u32, String> {
    parse_number(text, ETHERNET_HEADER_LEN as u32, CAPTURE_LENGTH_MAX)
}

pub(crate) fn parse_workers(text: &str) -> Result<u16, String> {
    parse_number(text, 1, WORKERS_MAX.into())
}

/// Parses the address space that the front-end of a device may use. The maximum is that of all devices
/// together.
pub(crate) fn parse_memory_max(text: &str) -> Result<u64, String> {
    match parse_size(text)? {
        bytes if bytes < 1 << 20 => Err("it must be 1M at least".into()),
        bytes if bytes > quota::BYTES_MAX => Err(format!(
            "it must be {}T at most, the address space of all devices of a process",
            quota::BYTES_MAX >> 40
        )),
        bytes => Ok(bytes),
    }
}

/// Parses the size that a disk has at least. The maximum is that of a file.
pub(crate) fn parse_blk_size(text: &str) -> Result<u64, String> {
    match parse_size(text)? {
        0 => Err("it must be above 0".into()),
        bytes if bytes > i64::MAX as u64 => Err(format!("{text:?} is too large")),
        bytes if !bytes.is_multiple_of(SECTOR) => Err(format!("{text:?} is not a multiple of 512 bytes")),
        bytes => Ok(bytes),
    }
}

/// Parses the size of a logical block.
pub(crate) fn parse_block_size(text: &str) -> Result<u32, String> {
    let bytes: u32 = parse_number(text, BLOCK_SIZE, BLOCK_SIZE_MAX)?;
    bytes.is_power_of_two().then_some(bytes).ok_or_else(|| "it must be a power of two".into())
}

/// Parses the size of the cache of L2 tables.
pub(crate) fn parse_cache_size(text: &str) -> Result<u64, String> {
    match parse_size(text)? {
        bytes if (CACHE_BYTES_MIN..=CACHE_BYTES_MAX).contains(&bytes) => Ok(bytes),
        _ => Err(format!("it must be from {}K to {}G", CACHE_BYTES_MIN >> 10, CACHE_BYTES_MAX >> 30)),
    }
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
        _ => Err("it must be an octal number from 0 to 0777".into()),
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
