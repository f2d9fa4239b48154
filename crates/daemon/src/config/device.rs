//! One device: what it serves, and where.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};
use kickless_disk::{Cache, DiskSpec};
use kickless_memory::quota;
use kickless_values::parse_queue_size;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use tracing::{Span, error_span};

use super::notation::{Mistake, Notation};
use super::text;
use super::values::{
    NUM_QUEUES, QUEUE_SIZE, Switch, parse_memory_max, parse_mode, parse_not_empty, parse_num_queues,
    parse_serial, parse_weight,
};

/// The name of the span that log lines about a device are in.
pub const DEVICE_SPAN: &str = "device";
/// The log says the name in each line.
const NAME_BYTES_MAX: usize = 64;

/// A device and its socket.
#[derive(Clone, Debug, PartialEq, Eq, Args, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct DeviceConfig {
    /// The kind of device
    #[arg(skip)]
    #[serde(default, with = "text")]
    pub kind: DeviceKind,
    /// The name of the device among others: in the log, and for who adds and removes devices
    #[arg(skip)]
    #[serde(default, deserialize_with = "name", skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Listen on this unix socket
    #[arg(long, value_name = "PATH")]
    #[serde(default, deserialize_with = "path", skip_serializing_if = "Option::is_none")]
    pub socket_path: Option<PathBuf>,
    /// The disk: a file or block device; qcow2:PATH is an image in QEMU's format; nbd://HOST:PORT/EXPORT and
    /// nbd+unix:///EXPORT?socket=PATH are exports of an NBD server; rbd:POOL/IMAGE is an image of a Ceph cluster;
    /// null:SIZE answers at once and stores nothing; mem:SIZE is a RAM disk; fault:RULES:DISK is one of these with
    /// faults, for tests
    #[arg(long, value_name = "PATH", value_parser = OsStringValueParser::new().try_map(|text| DiskSpec::parse(&text)))]
    #[serde(with = "text")]
    pub blk_file: DiskSpec,
    /// Let guests read only
    #[arg(long)]
    #[serde(default)]
    pub read_only: bool,
    /// Serial number that the disk reports, 20 bytes at most [default: one that differs from disk to disk]
    #[arg(long, value_name = "TEXT", value_parser = parse_serial)]
    #[serde(default, deserialize_with = "serial", skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// The most queues a virtual machine may use
    #[arg(long, value_name = "N", default_value_t = NUM_QUEUES, value_parser = parse_num_queues)]
    #[serde(default = "num_queues_default", deserialize_with = "num_queues")]
    pub num_queues: u16,
    /// The most requests a queue may hold, a power of two
    #[arg(long, value_name = "N", default_value_t = QUEUE_SIZE, value_parser = parse_queue_size)]
    #[serde(default = "queue_size_default", deserialize_with = "queue_size")]
    pub queue_size: u16,
    /// Whether the host's page cache is used: none or writeback
    #[arg(long, value_name = "MODE", default_value_t = Cache::None, value_parser = str::parse::<Cache>)]
    #[serde(default = "cache_default", with = "text")]
    pub cache: Cache,
    /// Whether neighbouring requests that come together are one for the kernel
    #[arg(long, value_enum, default_value_t = Switch::On)]
    #[serde(default = "on", with = "text")]
    pub merge: Switch,
    /// Whether to lock the disk against other users, as QEMU does
    #[arg(long, value_enum, default_value_t = Switch::On)]
    #[serde(default = "on", with = "text")]
    pub lock: Switch,
    /// A virtual machine will be migrated in: another host may still be using the disk at start-up
    #[arg(long)]
    #[serde(default)]
    pub incoming: bool,
    /// The most guest memory and what belongs to it that may be mapped at a time
    #[arg(long, value_name = "SIZE", default_value = "16T", value_parser = parse_memory_max)]
    #[serde(
        default = "memory_max_default",
        deserialize_with = "memory_max",
        serialize_with = "text::serialize"
    )]
    pub memory_max: u64,
    /// Accept guest memory on file systems that may never answer, such as FUSE or NFS
    #[arg(long)]
    #[serde(default)]
    pub allow_slow_memory: bool,
    /// The permissions of the socket, such as 0660
    #[arg(long, value_name = "OCTAL", value_parser = parse_mode)]
    #[serde(default, deserialize_with = "mode", serialize_with = "serialize_mode")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub socket_mode: Option<u32>,
    /// The group of the socket, by name or number
    #[arg(long, value_name = "GROUP")]
    #[serde(default, deserialize_with = "group", skip_serializing_if = "Option::is_none")]
    pub socket_group: Option<String>,
    /// The share of the pool, beside those of other devices
    #[arg(skip = 1u32)]
    #[serde(default = "weight_default", deserialize_with = "weight")]
    pub weight: u32,
}

/// `kind`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceKind {
    /// A disk.
    #[default]
    Blk,
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceKind::Blk => f.write_str("blk"),
        }
    }
}

impl FromStr for DeviceKind {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "blk" { Ok(DeviceKind::Blk) } else { Err("the only kind of device is blk") }
    }
}

impl DeviceConfig {
    /// Checks what the types of the options cannot say.
    ///
    /// # Errors
    /// Options do not go together. `notation` is how the sentence names them.
    pub fn check(&self, notation: Notation) -> Result<(), Mistake> {
        if self.incoming && self.blk_file.is_of_process() {
            let why = format!(
                "it needs a {} that another host can use, not null: or mem:",
                notation.option("blk-file")
            );
            return Err(Mistake { option: "incoming", why });
        }
        Ok(())
    }

    /// Returns the span that marks the log's lines about this device. Of the highest level, so that it is there whatever is
    /// logged.
    pub fn span(&self) -> Span {
        match &self.name {
            Some(name) => error_span!(DEVICE_SPAN, %name),
            None => Span::none(),
        }
    }

    /// Returns how a sentence names an option of this device.
    pub fn option(&self, notation: Notation, option: &str) -> String {
        match &self.name {
            Some(name) => format!("device {name}: {}", notation.option(option)),
            None => notation.option(option),
        }
    }
}

/// Parses the name of a device.
///
/// # Errors
/// Says what a name may be, as the end of a sentence.
pub fn parse_device_name(text: &str) -> Result<String, String> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-:@".contains(&byte);
    if text.is_empty() || text.len() > NAME_BYTES_MAX || !text.bytes().all(allowed) {
        return Err(format!("it must be 1 to {NAME_BYTES_MAX} letters, digits and . _ - : @"));
    }
    Ok(text.into())
}

fn name<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    text::text(from, parse_device_name).map(Some)
}

fn path<'de, D: Deserializer<'de>>(from: D) -> Result<Option<PathBuf>, D::Error> {
    text::text(from, parse_not_empty).map(Some)
}

fn serial<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    text::text(from, parse_serial).map(Some)
}

fn num_queues_default() -> u16 {
    NUM_QUEUES
}

fn num_queues<'de, D: Deserializer<'de>>(from: D) -> Result<u16, D::Error> {
    text::number(from, parse_num_queues)
}

fn queue_size_default() -> u16 {
    QUEUE_SIZE
}

fn queue_size<'de, D: Deserializer<'de>>(from: D) -> Result<u16, D::Error> {
    text::number(from, parse_queue_size)
}

fn cache_default() -> Cache {
    Cache::None
}

fn on() -> Switch {
    Switch::On
}

fn memory_max_default() -> u64 {
    quota::DEVICE_BYTES_DEFAULT
}

fn memory_max<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    text::text(from, parse_memory_max)
}

fn mode<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    text::text(from, parse_mode).map(Some)
}

fn serialize_mode<S: Serializer>(mode: &Option<u32>, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(&format_args!("{:04o}", mode.unwrap_or_default()))
}

fn group<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    text::text(from, parse_not_empty).map(Some)
}

fn weight_default() -> u32 {
    1
}

fn weight<'de, D: Deserializer<'de>>(from: D) -> Result<u32, D::Error> {
    text::number(from, parse_weight)
}
