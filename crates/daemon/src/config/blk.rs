//! The options that only disks have.

use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};
use kickless_disk::{Cache, DiskSpec};
use serde::Serialize;

use super::limits::{LimitWords, Limited, LimitsConfig};
use super::notation::{Mistake, Notation};
use super::text;
use super::values::{
    BLOCK_SIZE, NUM_QUEUES, OnError, Switch, parse_blk_size, parse_block_size, parse_cache_size,
    parse_num_queues, parse_serial,
};

/// The options of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Args, Serialize)]
#[command(next_help_heading = "Disk")]
#[serde(rename_all = "kebab-case")]
pub struct BlkConfig {
    /// The disk: the path of a raw image or block device; qcow2:PATH for an image in QEMU's format;
    /// nbd://HOST:PORT/EXPORT or nbd+unix:///EXPORT?socket=PATH for an export of an NBD server;
    /// rbd:POOL/IMAGE for an image of a Ceph cluster; null:SIZE for a disk that stores nothing; mem:SIZE for
    /// a RAM disk; fault:RULES:DISK for one of these with injected faults, for tests
    #[arg(long, value_name = "PATH", value_parser = OsStringValueParser::new().try_map(|text| DiskSpec::parse(&text)))]
    #[serde(serialize_with = "text::serialize")]
    pub blk_file: DiskSpec,
    /// Grow a qcow2 image to this size if it is smaller [default: the image keeps its size]
    #[arg(long, value_name = "SIZE", value_parser = parse_blk_size)]
    #[serde(serialize_with = "text::optional", skip_serializing_if = "Option::is_none")]
    pub blk_size: Option<u64>,
    /// Logical block size that guests see, a power of two from 512 to 4096
    #[arg(long, value_name = "BYTES", default_value_t = BLOCK_SIZE, value_parser = parse_block_size)]
    pub logical_block_size: u32,
    /// Refuse writes of guests
    #[arg(long)]
    pub read_only: bool,
    /// Serial number that guests read, 20 bytes at most [default: derived from the disk]
    #[arg(long, value_name = "TEXT", value_parser = parse_serial)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// Maximum number of queues that a virtual machine can use
    #[arg(long, value_name = "N", default_value_t = NUM_QUEUES, value_parser = parse_num_queues)]
    pub num_queues: u16,
    /// Use of the host's page cache: none bypasses it, writeback uses it
    #[arg(long, value_name = "MODE", default_value_t = Cache::None, value_parser = str::parse::<Cache>)]
    #[serde(serialize_with = "text::serialize")]
    pub cache: Cache,
    /// Maximum memory for the L2 tables of a qcow2 image and its chain, from 64K to 64G [default: 32M each]
    #[arg(long, value_name = "SIZE", value_parser = parse_cache_size)]
    #[serde(serialize_with = "text::optional", skip_serializing_if = "Option::is_none")]
    pub cache_size: Option<u64>,
    /// Merge requests for neighbouring sectors that arrive together
    #[arg(long, value_enum, value_name = "on|off", hide_possible_values = true, default_value_t = Switch::On)]
    #[serde(serialize_with = "text::serialize")]
    pub merge: Switch,
    /// Give space back to the host when a guest discards data; off keeps what is allocated
    #[arg(long, value_enum, value_name = "on|off", hide_possible_values = true, default_value_t = Switch::On)]
    #[serde(serialize_with = "text::serialize")]
    pub discard: Switch,
    /// Lock the disk against use by other processes, as QEMU does
    #[arg(long, value_enum, value_name = "on|off", hide_possible_values = true, default_value_t = Switch::On)]
    #[serde(serialize_with = "text::serialize")]
    pub lock: Switch,
    /// Expect a virtual machine to be migrated to this host: another host may still use the disk at start-up
    #[arg(long)]
    pub incoming: bool,
    /// Treatment of a full file system and of a remote disk that is away: report the error to the guest, or
    /// stop the disk until device.resume
    #[arg(long, value_enum, value_name = "report|stop", hide_possible_values = true, default_value_t = OnError::Report)]
    #[serde(serialize_with = "text::serialize")]
    pub on_error: OnError,
    /// The limits of requests.
    #[command(flatten)]
    #[serde(flatten)]
    pub limits: LimitsConfig<Requests>,
}

/// The requests of a disk, whose limits have QEMU's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Requests;

impl Limited for Requests {
    const WORDS: LimitWords = LimitWords {
        unit: "iops",
        units: "requests",
        directions: ["", "-read", "-write"],
        rates: ["{} a second", "{} a second, reads only", "{} a second, writes only"],
        bursts: ["{} a second"; 3],
        unit_size: Some((
            "iops-size",
            "Count a request as one for each of this number of bytes [default: each request is one]",
        )),
        sharing: "devices",
    };
}

impl BlkConfig {
    pub(crate) fn check(&self, notation: Notation) -> Result<(), Mistake> {
        self.limits.check(notation)?;
        if self.incoming && self.blk_file.is_of_process() {
            let why = format!(
                "it needs a {} that another host can use, not null: or mem:",
                notation.option("blk-file")
            );
            return Err(Mistake::new("incoming", why));
        }
        if self.blk_size.is_some() {
            let why = if !self.blk_file.is_qcow2() {
                "only a qcow2: image grows by it; make a file or a device longer yourself, and send SIGHUP"
            } else if self.read_only {
                "a read-only image cannot grow"
            } else {
                return Ok(());
            };
            return Err(Mistake::new("blk-size", why));
        }
        Ok(())
    }
}
