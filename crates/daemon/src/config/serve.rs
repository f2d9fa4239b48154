//! The options that devices of all kinds share.

use std::path::PathBuf;

use clap::Args;
use kickless_memory::quota;
use kickless_values::parse_queue_size;
use serde::{Serialize, Serializer};

use super::text;
use super::values::{QUEUE_SIZE, parse_memory_max, parse_mode};

/// The name of a device, its socket, and its share of the host.
#[derive(Clone, Debug, PartialEq, Eq, Args, Serialize)]
#[command(next_help_heading = "Socket and virtual machine")]
#[serde(rename_all = "kebab-case")]
pub struct ServeConfig {
    /// Identifies the device in the log, and for callers that add and remove devices
    #[arg(skip)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
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
    #[serde(serialize_with = "serialize_mode", skip_serializing_if = "Option::is_none")]
    pub socket_mode: Option<u32>,
    /// Group of the socket, by name or number
    #[arg(long, value_name = "GROUP")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub socket_group: Option<String>,
    /// The share of the pool, relative to the shares of other devices
    #[arg(skip = 1u32)]
    pub weight: u32,
}

/// Returns the default options of a device.
impl Default for ServeConfig {
    fn default() -> Self {
        Self {
            name: None,
            socket_path: None,
            queue_size: QUEUE_SIZE,
            memory_max: quota::DEVICE_BYTES_DEFAULT,
            allow_slow_memory: false,
            socket_mode: None,
            socket_group: None,
            weight: 1,
        }
    }
}

fn serialize_mode<S: Serializer>(mode: &Option<u32>, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(&format_args!("{:04o}", mode.unwrap_or_default()))
}
