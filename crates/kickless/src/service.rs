//! What is to be served: devices, and the workers that they share.

use kickless_daemon::{DeviceConfig, Notation, PoolConfig};

/// A pool of workers, and the devices that share it.
#[derive(Debug)]
pub(crate) struct Service {
    /// Where the operator wrote all this.
    pub(crate) notation: Notation,
    /// The workers.
    pub(crate) pool: PoolConfig,
    /// At least one.
    pub(crate) devices: Vec<DeviceConfig>,
    /// The descriptor that the only device has instead of a path: its number.
    pub(crate) fd: Option<i32>,
}
