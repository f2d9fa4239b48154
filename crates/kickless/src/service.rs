//! The devices that the program serves, and the workers that they share.

use std::path::PathBuf;

use anyhow::{Result, bail};
use kickless_daemon::{DeviceConfig, Notation, PoolConfig};

use crate::cli::{ControlOptions, SandboxOptions, UpgradeOptions};

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
    /// The number of the inherited socket that the only device uses instead of a path.
    pub(crate) fd: Option<i32>,
    /// The control sockets.
    pub(crate) control: ControlOptions,
    /// The sandbox.
    pub(crate) sandbox: SandboxOptions,
    /// The daemon to take over from.
    pub(crate) upgrade: UpgradeOptions,
    /// A device that cannot be opened ends the start. Otherwise it is tried again.
    pub(crate) all_or_nothing: bool,
}

impl Service {
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

    /// Returns whether the daemon goes on without devices, because others can be added.
    pub(crate) fn outlives_devices(&self) -> bool {
        self.file.is_some() && self.control.is_on()
    }
}
