//! The options that devices of all kinds share.

use std::path::PathBuf;

use clap::Args;
use kickless_values::parse_queue_size;
use serde::Serialize;

use super::name::parse_device_name;
use super::text;
use super::values::{QUEUE_SIZE, SocketMode, parse_memory_max, parse_mode, parse_not_empty, parse_weight};

/// The name of a device. A command line has one device, which needs none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Identity {
    /// Identifies the device in the log, and for callers that add and remove devices
    #[arg(long, value_name = "NAME", value_parser = parse_device_name)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// The socket of a device, and its share of the host.
#[derive(Clone, Debug, PartialEq, Eq, Args, Serialize)]
#[command(next_help_heading = "Socket and virtual machine")]
#[serde(rename_all = "kebab-case")]
pub struct ServeConfig {
    /// Listen on this unix socket
    #[arg(long, value_name = "PATH")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub socket_path: Option<PathBuf>,
    /// Maximum number of requests or frames that a queue can hold, a power of two
    #[arg(long, value_name = "N", default_value_t = QUEUE_SIZE, value_parser = parse_queue_size)]
    pub queue_size: u16,
    /// Maximum size of mapped guest memory, its dirty log and in-flight buffers included
    #[arg(long, value_name = "SIZE", default_value = "16T", value_parser = parse_memory_max)]
    #[serde(serialize_with = "text::serialize")]
    pub memory_max: u64,
    /// Accept guest memory on file systems that can block for ever, such as FUSE or NFS
    #[arg(long)]
    pub allow_slow_memory: bool,
    /// Permissions of the socket, such as 0660
    #[arg(long, value_name = "OCTAL", value_parser = parse_mode)]
    #[serde(serialize_with = "text::optional", skip_serializing_if = "Option::is_none")]
    pub socket_mode: Option<SocketMode>,
    /// Group of the socket, by name or number
    #[arg(long, value_name = "GROUP", value_parser = parse_not_empty::<String>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub socket_group: Option<String>,
}

/// The share of a device beside other devices. A command line has one device, which gets everything.
#[derive(Clone, Debug, PartialEq, Eq, Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Share {
    /// The share of the pool, relative to the shares of other devices
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = parse_weight)]
    pub weight: u32,
}

/// Returns the share of a single device.
impl Default for Share {
    fn default() -> Self {
        Self { weight: 1 }
    }
}
