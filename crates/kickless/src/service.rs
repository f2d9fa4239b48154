//! The devices that the program serves, and the workers that they share.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use anyhow::{Error, Result, anyhow, bail};
use kickless_daemon::{DeviceConfig, Notation, PoolConfig};
use kickless_opener::Target;

use crate::cli::{ControlOptions, SandboxOptions, UpgradeOptions};
use crate::wrong_use::WrongUse;

/// The number of an inherited socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InheritedSocket {
    /// The socket of `--fd`.
    Fd(i32),
    /// The only socket that the service manager has passed.
    OfManager(i32),
}

impl InheritedSocket {
    /// Returns the number.
    pub(crate) fn number(self) -> i32 {
        match self {
            Self::Fd(fd) | Self::OfManager(fd) => fd,
        }
    }
}

/// Shows the option or the variable that names it.
impl fmt::Display for InheritedSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fd(fd) => write!(f, "--fd={fd}"),
            Self::OfManager(_) => f.write_str("LISTEN_FDS"),
        }
    }
}

/// A pool of workers, and the devices that share it.
#[derive(Debug)]
pub(crate) struct Service {
    /// The notation of the options, for sentences about them.
    pub(crate) notation: Notation,
    /// The configuration of the workers.
    pub(crate) pool: PoolConfig,
    /// The devices. There can be none if there is a control socket.
    pub(crate) devices: Vec<DeviceConfig>,
    /// The configuration file that describes them.
    pub(crate) file: Option<PathBuf>,
    /// The lines of its keys.
    pub(crate) lines: Lines,
    /// The names of devices of the file that have no socket of their own, and the sentence of each.
    pub(crate) without_socket: Vec<(String, String)>,
    /// The inherited socket that the only device uses instead of a path.
    pub(crate) fd: Option<InheritedSocket>,
    /// The control sockets.
    pub(crate) control: ControlOptions,
    /// The sandbox.
    pub(crate) sandbox: SandboxOptions,
    /// The daemon to take over from.
    pub(crate) upgrade: UpgradeOptions,
    /// A device that cannot be opened ends the start. Otherwise it is tried again.
    pub(crate) all_or_nothing: bool,
}

/// The lines of the keys of a configuration file.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lines(BTreeMap<(Option<String>, String), usize>);

impl Lines {
    /// Adds the line of a key of the device with this name, or of the pool.
    pub(crate) fn add(&mut self, device: Option<&str>, key: &str, line: usize) {
        self.0.insert((device.map(str::to_owned), key.to_owned()), line);
    }
}

impl Service {
    /// Returns the error of an option of the device with this name, or of the pool. A value on a command line
    /// is a wrong command line.
    pub(crate) fn mistake(&self, device: Option<&str>, option: &str, why: &str) -> Error {
        match self.file {
            Some(_) => anyhow!("{}: {why}", self.place(device, option)),
            None => WrongUse::of(format!("{}: {why}", self.place(device, option))),
        }
    }

    /// Returns the name of an option of the device with this name, or of the pool, with the file and the line
    /// that has it.
    pub(crate) fn place(&self, device: Option<&str>, option: &str) -> String {
        let Some(file) = &self.file else { return self.notation.option(option) };
        let of = device.map_or_else(|| "[pool]: ".into(), |name| format!("device {name}: "));
        let line = self.lines.0.get(&(device.map(str::to_owned), option.to_owned()));
        let line = line.map(|line| format!("{line}:")).unwrap_or_default();
        format!("{}:{line} {of}{option}", file.display())
    }

    /// Returns the paths of the images of all devices.
    pub(crate) fn images(&self) -> Vec<PathBuf> {
        let grants = self.devices.iter().flat_map(DeviceConfig::grants);
        grants
            .filter_map(|grant| if let Target::Image { path, .. } = grant.to { Some(path) } else { None })
            .collect()
    }

    /// Checks that there is something to serve.
    ///
    /// # Errors
    /// There is no device, and no control socket through which one could come. The error is one sentence.
    pub(crate) fn check(&self) -> Result<()> {
        match &self.file {
            Some(file) if self.devices.is_empty() && !self.control.is_on() => bail!(
                "{}: there is no device to serve: describe each in a [[device]], or give --control",
                file.display()
            ),
            _ => Ok(()),
        }
    }

    /// Checks that each device has a socket: by its path, or one that `is_passed`.
    ///
    /// # Errors
    /// A device has none. The error is one sentence.
    pub(crate) fn check_sockets(&self, is_passed: impl Fn(&str) -> bool) -> Result<()> {
        match self.without_socket.iter().find(|(name, _)| !is_passed(name)) {
            Some((_, sentence)) => bail!("{sentence}, unless systemd passes a socket with the device's name"),
            None => Ok(()),
        }
    }

    /// Returns whether the daemon goes on without devices, because others can be added.
    pub(crate) fn outlives_devices(&self) -> bool {
        self.file.is_some() && self.control.is_on()
    }
}
