//! The options that only disks have.

use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};
use kickless_disk::{Cache, DiskSpec};
use serde::Serialize;

use super::notation::{Mistake, Notation};
use super::text;
use super::values::{NUM_QUEUES, Switch, parse_num_queues, parse_serial};

/// The options of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct BlkConfig {
    /// The disk: a file or block device; qcow2:PATH is an image in QEMU's format; nbd://HOST:PORT/EXPORT and
    /// nbd+unix:///EXPORT?socket=PATH are exports of an NBD server; rbd:POOL/IMAGE is an image of a Ceph cluster;
    /// null:SIZE answers at once and stores nothing; mem:SIZE is a RAM disk; fault:RULES:DISK is one of these with
    /// faults, for tests
    #[arg(long, value_name = "PATH", value_parser = OsStringValueParser::new().try_map(|text| DiskSpec::parse(&text)))]
    #[serde(serialize_with = "text::serialize")]
    pub blk_file: DiskSpec,
    /// Let guests read only
    #[arg(long)]
    pub read_only: bool,
    /// Serial number that the disk reports, 20 bytes at most [default: one that differs from disk to disk]
    #[arg(long, value_name = "TEXT", value_parser = parse_serial)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// The most queues a virtual machine may use
    #[arg(long, value_name = "N", default_value_t = NUM_QUEUES, value_parser = parse_num_queues)]
    pub num_queues: u16,
    /// Whether the host's page cache is used: none or writeback
    #[arg(long, value_name = "MODE", default_value_t = Cache::None, value_parser = str::parse::<Cache>)]
    #[serde(serialize_with = "text::serialize")]
    pub cache: Cache,
    /// Whether neighbouring requests that come together are one for the kernel
    #[arg(long, value_enum, default_value_t = Switch::On)]
    #[serde(serialize_with = "text::serialize")]
    pub merge: Switch,
    /// Whether to lock the disk against other users, as QEMU does
    #[arg(long, value_enum, default_value_t = Switch::On)]
    #[serde(serialize_with = "text::serialize")]
    pub lock: Switch,
    /// A virtual machine will be migrated in: another host may still be using the disk at start-up
    #[arg(long)]
    pub incoming: bool,
}

impl BlkConfig {
    /// Returns the options of a disk of which nothing else is said.
    pub(crate) fn new(blk_file: DiskSpec) -> Self {
        Self {
            blk_file,
            read_only: false,
            serial: None,
            num_queues: NUM_QUEUES,
            cache: Cache::None,
            merge: Switch::On,
            lock: Switch::On,
            incoming: false,
        }
    }

    pub(crate) fn check(&self, notation: Notation) -> Result<(), Mistake> {
        if self.incoming && self.blk_file.is_of_process() {
            let why = format!(
                "it needs a {} that another host can use, not null: or mem:",
                notation.option("blk-file")
            );
            return Err(Mistake { option: "incoming", why });
        }
        Ok(())
    }
}
