//! The devices that the program serves, and the workers that they share.

use std::path::PathBuf;

use kickless_daemon::{DeviceConfig, Notation, PoolConfig};

/// A pool of workers, and the devices that share it.
#[derive(Debug)]
pub(crate) struct Service {
    /// The notation of the options, for sentences about them.
    pub(crate) notation: Notation,
    /// The configuration of the workers.
    pub(crate) pool: PoolConfig,
    /// The devices, at least one.
    pub(crate) devices: Vec<DeviceConfig>,
    /// The configuration file that describes them.
    pub(crate) file: Option<PathBuf>,
    /// The number of the inherited socket that the only device uses instead of a path.
    pub(crate) fd: Option<i32>,
}
