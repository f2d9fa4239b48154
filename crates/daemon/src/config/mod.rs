//! The configuration of devices and of the pool that they share.
//!
//! [`DeviceConfig`] and [`PoolConfig`] exist once. The command line fills them through `clap`, configuration files and
//! other callers through `serde`; an option has the same name, the same values and the same default everywhere. A device
//! has the options of its kind ([`BlkConfig`], [`NetConfig`]) and those of all kinds ([`ServeConfig`]). A file or a call
//! describes it as a [`DeviceTable`], in which the kind follows from the keys.

mod blk;
mod device;
mod net;
mod notation;
mod pool;
mod serve;
mod table;
mod text;
mod values;

pub use blk::BlkConfig;
pub use device::{DEVICE_SPAN, DeviceConfig, DeviceKind, parse_device_name};
pub use net::NetConfig;
pub use notation::{Mistake, Notation};
pub use pool::{PollMode, PoolConfig};
pub use serve::ServeConfig;
pub use table::DeviceTable;
pub use values::Switch;
