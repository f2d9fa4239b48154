//! The description of a device in a file or a call: a table of keys.

use std::fmt;
use std::iter::zip;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use kickless_disk::{Cache, DiskSpec};
use kickless_net_port::Port;
use kickless_values::{MacAddress, parse_queue_size};
use serde::de::Error;
use serde::{Deserialize, Deserializer};

use super::blk::BlkConfig;
use super::card_limits::CardLimitsConfig;
use super::device::{DeviceConfig, DeviceKind};
use super::limits::LimitsConfig;
use super::name::parse_device_name;
use super::net::NetConfig;
use super::notation::Mistake;
use super::serve::ServeConfig;
use super::text;
use super::values::{
    OnError, Switch, parse_blk_size, parse_block_size, parse_bps, parse_burst, parse_cache_size,
    parse_capture_length, parse_group, parse_iops, parse_memory_max, parse_mode, parse_mtu, parse_not_empty,
    parse_num_queue_pairs, parse_num_queues, parse_serial, parse_weight,
};

/// A device as a table. It has the keys of all kinds of devices, and each key may be absent.
/// [`DeviceConfig::try_from`] checks that the present keys can be combined.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct DeviceTable {
    #[serde(with = "text::optional")]
    kind: Option<KindName>,
    #[serde(deserialize_with = "name")]
    name: Option<String>,
    #[serde(deserialize_with = "path")]
    socket_path: Option<PathBuf>,
    #[serde(with = "text::optional")]
    blk_file: Option<DiskSpec>,
    #[serde(deserialize_with = "blk_size")]
    blk_size: Option<u64>,
    #[serde(deserialize_with = "block_size")]
    logical_block_size: Option<u32>,
    #[serde(with = "text::optional")]
    port: Option<Port>,
    #[serde(deserialize_with = "flag")]
    read_only: Option<bool>,
    #[serde(deserialize_with = "serial")]
    serial: Option<String>,
    #[serde(deserialize_with = "num_queues")]
    num_queues: Option<u16>,
    #[serde(deserialize_with = "queue_size")]
    queue_size: Option<u16>,
    #[serde(with = "text::optional")]
    cache: Option<Cache>,
    #[serde(deserialize_with = "cache_size")]
    cache_size: Option<u64>,
    #[serde(with = "text::optional")]
    merge: Option<Switch>,
    #[serde(with = "text::optional")]
    discard: Option<Switch>,
    #[serde(with = "text::optional")]
    lock: Option<Switch>,
    #[serde(deserialize_with = "flag")]
    incoming: Option<bool>,
    #[serde(with = "text::optional")]
    on_error: Option<OnError>,
    #[serde(deserialize_with = "iops")]
    iops: Option<u32>,
    #[serde(deserialize_with = "iops")]
    iops_max: Option<u32>,
    #[serde(deserialize_with = "burst")]
    iops_max_length: Option<Duration>,
    #[serde(deserialize_with = "iops")]
    iops_read: Option<u32>,
    #[serde(deserialize_with = "iops")]
    iops_read_max: Option<u32>,
    #[serde(deserialize_with = "burst")]
    iops_read_max_length: Option<Duration>,
    #[serde(deserialize_with = "iops")]
    iops_write: Option<u32>,
    #[serde(deserialize_with = "iops")]
    iops_write_max: Option<u32>,
    #[serde(deserialize_with = "burst")]
    iops_write_max_length: Option<Duration>,
    #[serde(deserialize_with = "bps")]
    bps: Option<u64>,
    #[serde(deserialize_with = "bps")]
    bps_max: Option<u64>,
    #[serde(deserialize_with = "burst")]
    bps_max_length: Option<Duration>,
    #[serde(deserialize_with = "bps")]
    bps_read: Option<u64>,
    #[serde(deserialize_with = "bps")]
    bps_read_max: Option<u64>,
    #[serde(deserialize_with = "burst")]
    bps_read_max_length: Option<Duration>,
    #[serde(deserialize_with = "bps")]
    bps_write: Option<u64>,
    #[serde(deserialize_with = "bps")]
    bps_write_max: Option<u64>,
    #[serde(deserialize_with = "burst")]
    bps_write_max_length: Option<Duration>,
    #[serde(deserialize_with = "bps")]
    iops_size: Option<u64>,
    #[serde(deserialize_with = "iops")]
    frames: Option<u32>,
    #[serde(deserialize_with = "iops")]
    frames_max: Option<u32>,
    #[serde(deserialize_with = "burst")]
    frames_max_length: Option<Duration>,
    #[serde(deserialize_with = "iops")]
    frames_receive: Option<u32>,
    #[serde(deserialize_with = "iops")]
    frames_receive_max: Option<u32>,
    #[serde(deserialize_with = "burst")]
    frames_receive_max_length: Option<Duration>,
    #[serde(deserialize_with = "iops")]
    frames_transmit: Option<u32>,
    #[serde(deserialize_with = "iops")]
    frames_transmit_max: Option<u32>,
    #[serde(deserialize_with = "burst")]
    frames_transmit_max_length: Option<Duration>,
    #[serde(deserialize_with = "bps")]
    bps_receive: Option<u64>,
    #[serde(deserialize_with = "bps")]
    bps_receive_max: Option<u64>,
    #[serde(deserialize_with = "burst")]
    bps_receive_max_length: Option<Duration>,
    #[serde(deserialize_with = "bps")]
    bps_transmit: Option<u64>,
    #[serde(deserialize_with = "bps")]
    bps_transmit_max: Option<u64>,
    #[serde(deserialize_with = "burst")]
    bps_transmit_max_length: Option<Duration>,
    #[serde(deserialize_with = "limit_group")]
    group: Option<String>,
    #[serde(with = "text::optional")]
    mac: Option<MacAddress>,
    #[serde(deserialize_with = "mtu")]
    mtu: Option<u16>,
    #[serde(deserialize_with = "num_queue_pairs")]
    num_queue_pairs: Option<u16>,
    #[serde(with = "text::optional")]
    offload: Option<Switch>,
    #[serde(with = "text::optional")]
    ring_reset: Option<Switch>,
    #[serde(deserialize_with = "path")]
    capture: Option<PathBuf>,
    #[serde(deserialize_with = "capture_length")]
    capture_length: Option<u32>,
    #[serde(deserialize_with = "memory_max")]
    memory_max: Option<u64>,
    #[serde(deserialize_with = "flag")]
    allow_slow_memory: Option<bool>,
    #[serde(deserialize_with = "mode")]
    socket_mode: Option<u32>,
    #[serde(deserialize_with = "group")]
    socket_group: Option<String>,
    #[serde(deserialize_with = "weight")]
    weight: Option<u32>,
}

/// The value of the key `kind`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KindName {
    Blk,
    Net,
}

impl fmt::Display for KindName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            KindName::Blk => "blk",
            KindName::Net => "net",
        })
    }
}

impl FromStr for KindName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "blk" => Ok(KindName::Blk),
            "net" => Ok(KindName::Net),
            _ => Err("a kind of device is blk or net"),
        }
    }
}

impl DeviceTable {
    /// Keys that only disks have, without `blk-file` and [`LimitsConfig::KEYS`].
    pub const BLK_KEYS: [&str; 12] = [
        "blk-size",
        "logical-block-size",
        "read-only",
        "serial",
        "num-queues",
        "cache",
        "cache-size",
        "merge",
        "discard",
        "lock",
        "incoming",
        "on-error",
    ];
    /// Keys that only network cards have, without `port` and [`CardLimitsConfig::KEYS`].
    pub const NET_KEYS: [&str; 7] =
        ["mac", "mtu", "num-queue-pairs", "offload", "ring-reset", "capture", "capture-length"];

    /// Returns the first of [`DeviceTable::BLK_KEYS`] that is present.
    fn blk_key(&self) -> Option<&'static str> {
        let is_there = [
            self.blk_size.is_some(),
            self.logical_block_size.is_some(),
            self.read_only.is_some(),
            self.serial.is_some(),
            self.num_queues.is_some(),
            self.cache.is_some(),
            self.cache_size.is_some(),
            self.merge.is_some(),
            self.discard.is_some(),
            self.lock.is_some(),
            self.incoming.is_some(),
            self.on_error.is_some(),
        ];
        first_present(Self::BLK_KEYS, is_there)
    }

    /// Returns the first of [`DeviceTable::NET_KEYS`] that is present.
    fn net_key(&self) -> Option<&'static str> {
        let is_there = [
            self.mac.is_some(),
            self.mtu.is_some(),
            self.num_queue_pairs.is_some(),
            self.offload.is_some(),
            self.ring_reset.is_some(),
            self.capture.is_some(),
            self.capture_length.is_some(),
        ];
        first_present(Self::NET_KEYS, is_there)
    }

    /// Returns the limits of a disk.
    fn limits(&self) -> LimitsConfig {
        LimitsConfig {
            iops: self.iops,
            iops_max: self.iops_max,
            iops_max_length: self.iops_max_length,
            iops_read: self.iops_read,
            iops_read_max: self.iops_read_max,
            iops_read_max_length: self.iops_read_max_length,
            iops_write: self.iops_write,
            iops_write_max: self.iops_write_max,
            iops_write_max_length: self.iops_write_max_length,
            bps: self.bps,
            bps_max: self.bps_max,
            bps_max_length: self.bps_max_length,
            bps_read: self.bps_read,
            bps_read_max: self.bps_read_max,
            bps_read_max_length: self.bps_read_max_length,
            bps_write: self.bps_write,
            bps_write_max: self.bps_write_max,
            bps_write_max_length: self.bps_write_max_length,
            iops_size: self.iops_size,
            group: self.group.clone(),
        }
    }

    /// Returns the limits of a card.
    fn card_limits(&self) -> CardLimitsConfig {
        CardLimitsConfig {
            frames: self.frames,
            frames_max: self.frames_max,
            frames_max_length: self.frames_max_length,
            frames_receive: self.frames_receive,
            frames_receive_max: self.frames_receive_max,
            frames_receive_max_length: self.frames_receive_max_length,
            frames_transmit: self.frames_transmit,
            frames_transmit_max: self.frames_transmit_max,
            frames_transmit_max_length: self.frames_transmit_max_length,
            bps: self.bps,
            bps_max: self.bps_max,
            bps_max_length: self.bps_max_length,
            bps_receive: self.bps_receive,
            bps_receive_max: self.bps_receive_max,
            bps_receive_max_length: self.bps_receive_max_length,
            bps_transmit: self.bps_transmit,
            bps_transmit_max: self.bps_transmit_max,
            bps_transmit_max_length: self.bps_transmit_max_length,
            group: self.group.clone(),
        }
    }

    fn disk(&mut self, blk_file: DiskSpec) -> Result<DeviceKind, Mistake> {
        if let Some(key) = self.net_key().or(self.card_limits().key()) {
            return Err(mistake(key, "only network cards have it, and this device is a disk"));
        }
        let default = BlkConfig::new(blk_file);
        Ok(DeviceKind::Blk(BlkConfig {
            blk_size: self.blk_size,
            logical_block_size: self.logical_block_size.unwrap_or(default.logical_block_size),
            read_only: self.read_only.unwrap_or(default.read_only),
            serial: self.serial.take(),
            num_queues: self.num_queues.unwrap_or(default.num_queues),
            cache: self.cache.unwrap_or(default.cache),
            cache_size: self.cache_size,
            merge: self.merge.unwrap_or(default.merge),
            discard: self.discard.unwrap_or(default.discard),
            lock: self.lock.unwrap_or(default.lock),
            incoming: self.incoming.unwrap_or(default.incoming),
            on_error: self.on_error.unwrap_or(default.on_error),
            limits: self.limits(),
            ..default
        }))
    }

    fn card(&mut self, port: Port) -> Result<DeviceKind, Mistake> {
        if let Some(key) = self.blk_key().or(self.limits().key()) {
            return Err(mistake(key, "only disks have it, and this device is a network card"));
        }
        let default = NetConfig::new(port);
        let limits = self.card_limits();
        Ok(DeviceKind::Net(NetConfig {
            mac: self.mac,
            mtu: self.mtu,
            num_queue_pairs: self.num_queue_pairs,
            offload: self.offload.unwrap_or(default.offload),
            ring_reset: self.ring_reset.unwrap_or(default.ring_reset),
            capture: self.capture.take(),
            capture_length: self.capture_length,
            limits,
            ..default
        }))
    }
}

/// Returns the first key that is present.
fn first_present<const N: usize>(keys: [&'static str; N], is_there: [bool; N]) -> Option<&'static str> {
    zip(keys, is_there).find_map(|(key, is_there)| is_there.then_some(key))
}

impl TryFrom<DeviceTable> for DeviceConfig {
    type Error = Mistake;

    fn try_from(mut table: DeviceTable) -> Result<Self, Mistake> {
        let kind = match (table.kind, table.blk_file.take(), table.port.take()) {
            (None | Some(KindName::Blk), Some(blk_file), None) => table.disk(blk_file)?,
            (None | Some(KindName::Net), None, Some(port)) => table.card(port)?,
            (_, Some(_), Some(_)) => {
                return Err(mistake(
                    "port",
                    "a device is a disk or a network card: leave it or blk-file out",
                ));
            }
            (Some(KindName::Net), Some(_), None) => {
                return Err(mistake("blk-file", "it is for disks, and kind is net"));
            }
            (Some(KindName::Blk), None, Some(_)) => {
                return Err(mistake("port", "it is for network cards, and kind is blk"));
            }
            (Some(KindName::Blk), None, None) => return Err(mistake("blk-file", "a disk needs one")),
            (Some(KindName::Net), None, None) => return Err(mistake("port", "a network card needs one")),
            (None, None, None) => {
                return Err(mistake("blk-file", "a disk needs one, and a network card needs a port"));
            }
        };
        let default = ServeConfig::default();
        let serve = ServeConfig {
            name: table.name,
            socket_path: table.socket_path,
            queue_size: table.queue_size.unwrap_or(default.queue_size),
            memory_max: table.memory_max.unwrap_or(default.memory_max),
            allow_slow_memory: table.allow_slow_memory.unwrap_or(default.allow_slow_memory),
            socket_mode: table.socket_mode,
            socket_group: table.socket_group,
            weight: table.weight.unwrap_or(default.weight),
        };
        Ok(Self { kind, serve })
    }
}

impl<'de> Deserialize<'de> for DeviceConfig {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        Self::try_from(DeviceTable::deserialize(from)?).map_err(D::Error::custom)
    }
}

fn mistake(option: &'static str, why: &str) -> Mistake {
    Mistake { option, why: why.into() }
}

fn flag<'de, D: Deserializer<'de>>(from: D) -> Result<Option<bool>, D::Error> {
    bool::deserialize(from).map(Some)
}

fn name<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    text::text(from, parse_device_name).map(Some)
}

fn path<'de, D: Deserializer<'de>>(from: D) -> Result<Option<PathBuf>, D::Error> {
    text::text(from, parse_not_empty).map(Some)
}

fn blk_size<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    text::text(from, parse_blk_size).map(Some)
}

fn block_size<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    text::number(from, parse_block_size).map(Some)
}

fn cache_size<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    text::text(from, parse_cache_size).map(Some)
}

fn serial<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    text::text(from, parse_serial).map(Some)
}

fn num_queues<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u16>, D::Error> {
    text::number(from, parse_num_queues).map(Some)
}

fn queue_size<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u16>, D::Error> {
    text::number(from, parse_queue_size).map(Some)
}

fn mtu<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u16>, D::Error> {
    text::number(from, parse_mtu).map(Some)
}

fn capture_length<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    text::number(from, parse_capture_length).map(Some)
}

fn num_queue_pairs<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u16>, D::Error> {
    text::number(from, parse_num_queue_pairs).map(Some)
}

fn memory_max<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    text::text(from, parse_memory_max).map(Some)
}

fn mode<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    text::text(from, parse_mode).map(Some)
}

fn group<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    text::text(from, parse_not_empty).map(Some)
}

fn weight<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    text::number(from, parse_weight).map(Some)
}

fn iops<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    text::number(from, parse_iops).map(Some)
}

fn bps<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    text::text(from, parse_bps).map(Some)
}

fn burst<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
    text::text(from, parse_burst).map(Some)
}

fn limit_group<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    text::text(from, parse_group).map(Some)
}
