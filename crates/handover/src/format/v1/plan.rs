//! The plan: the daemon, and the names and phases of its devices.

use crate::error::Error;
use crate::parts::{Amounts, Checked, Fd};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The longest path of a socket's name. The kernel's limit of a path.
const PATH_BYTES_MAX: usize = 4096;

/// The configuration of a device: the keys and values that a call of the control socket has.
pub type Config = Map<String, Value>;

/// Describes the daemon, and names its devices. Its message has the number of devices that a
/// [`Device`](super::Device) describes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// The version of the program that writes this, for the log.
    pub version: String,
    /// All devices. The number of a device in messages is its position here.
    pub devices: Vec<Planned>,
    /// The devices of the configuration file, as it was read last.
    pub of_file: Vec<Config>,
    /// The control sockets.
    pub control: Vec<Listener>,
    /// The sockets that the service manager has passed.
    pub passed: Vec<Passed>,
    /// The filter of the log, if a call has changed it.
    pub log_filter: Option<String>,
    /// The microseconds within which the service manager expects a sign of life.
    pub watchdog_us: Option<u64>,
    /// The counters of the daemon.
    pub counters: Amounts,
}

/// A device of the plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Planned {
    /// Its configuration, as calls have changed it.
    pub config: Config,
    /// Its front-ends, or what is behind it, come from descriptors.
    pub is_inherited: bool,
    /// Its phase.
    pub phase: Phase,
}

/// The phase of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub enum Phase {
    /// It is served, and a record describes it.
    Served,
    /// It cannot be opened yet, and is tried again.
    Unavailable {
        /// The reason, as a sentence.
        error: String,
    },
    /// It is not served any more.
    Ended {
        /// The reason, as a sentence, if it ended on an error.
        error: Option<String>,
    },
}

/// A listening socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Listener {
    /// The socket.
    pub socket: Fd,
    /// Its name, if the daemon made it and removes it.
    pub name: Option<SocketName>,
}

/// A listening socket that the service manager has passed for a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Passed {
    /// The name of the device.
    pub name: String,
    /// The socket.
    pub listener: Listener,
}

/// The name of a socket in the file system.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SocketName {
    /// The path.
    pub path: String,
    /// The device of the name's inode.
    pub device: u64,
    /// The number of the name's inode.
    pub inode: u64,
}

impl Listener {
    pub(super) fn check(&self) -> Result<(), Error> {
        match &self.name {
            Some(SocketName { path, .. }) if path.len() > PATH_BYTES_MAX || path.contains('\0') => {
                Err(Error::field("path of a socket", path.len()))
            }
            _ => Ok(()),
        }
    }
}

/// Checks that values are plain, as those of a file are.
fn check_config(config: &Config) -> Result<(), Error> {
    let is_plain = |value: &Value| value.is_string() || value.is_boolean() || value.is_number();
    match config.iter().find(|(_, value)| !is_plain(value)) {
        Some((key, _)) => Err(Error::field("option", key)),
        None => Ok(()),
    }
}

impl Plan {
    /// Returns the number of devices that a record describes.
    pub fn served(&self) -> usize {
        self.devices.iter().filter(|device| device.phase == Phase::Served).count()
    }
}

impl Checked for Plan {
    fn check(&self) -> Result<(), Error> {
        let of_devices = self.devices.iter().map(|device| &device.config);
        of_devices.chain(&self.of_file).try_for_each(check_config)?;
        let passed = self.passed.iter().map(|passed| &passed.listener);
        self.control.iter().chain(passed).try_for_each(Listener::check)
    }
}
