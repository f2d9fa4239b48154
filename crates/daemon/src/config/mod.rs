//! The configuration of devices and of the pool that they share.
//!
//! [`DeviceConfig`] and [`PoolConfig`] exist once. The command line fills them through `clap`, configuration files and
//! other callers through `serde`; an option has the same name, the same values and the same default everywhere.

mod device;
mod notation;
mod pool;
mod text;
mod values;

pub use device::{DEVICE_SPAN, DeviceConfig, DeviceKind, parse_device_name};
pub use notation::{Mistake, Notation};
pub use pool::{PollMode, PoolConfig};
pub use values::Switch;
