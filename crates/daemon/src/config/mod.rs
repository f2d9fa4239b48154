//! The configuration of devices and of the pool that they share.
//!
//! The command line fills [`DeviceConfig`] and [`PoolConfig`] through `clap`; configuration files and other
//! callers fill them through `serde`. An option therefore has the same name, values and default everywhere. A
//! device has the options of its kind ([`BlkConfig`], [`NetConfig`]) and those of all kinds
//! ([`ServeConfig`]). A file or a call describes a device as a [`DeviceTable`], whose keys determine the
//! kind.

mod blk;
mod card_limits;
mod device;
mod limits;
mod name;
mod net;
mod notation;
mod pool;
mod serve;
mod table;
mod text;
mod values;

pub use blk::BlkConfig;
pub use card_limits::CardLimitsConfig;
pub use device::{DEVICE_SPAN, DeviceConfig, DeviceKind};
pub use limits::LimitsConfig;
pub use name::parse_device_name;
pub use net::NetConfig;
pub use notation::{Mistake, Notation};
pub use pool::{PollMode, PoolConfig};
pub use serve::ServeConfig;
pub use table::DeviceTable;
pub use values::{OnError, Switch};
