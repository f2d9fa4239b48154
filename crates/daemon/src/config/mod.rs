//! The configuration of devices and of the pool that they share.
//!
//! An option exists once, as a field of a group of options: [`PoolConfig`], [`ServeConfig`], the options of a
//! kind ([`BlkConfig`], [`NetConfig`]) and their limits ([`LimitsConfig`]). `clap` derives the command line
//! from these. A file or a call has the same options as keys, which the parsers of the command line read
//! ([`keys`](fn@keys), [`read`]). An option therefore has the same name, values and default everywhere. The
//! keys of a device determine its kind.

mod blk;
mod device;
mod keys;
mod kinds;
mod limits;
mod name;
mod net;
mod notation;
mod pool;
mod serve;
mod text;
mod values;

pub use blk::{BlkConfig, Requests};
pub use device::{DEVICE_SPAN, DeviceConfig, DeviceKind};
pub use keys::{Key, KeyError, Value, Values, check, keys, read, values};
pub use limits::{LimitWords, Limited, LimitsConfig};
pub use name::parse_device_name;
pub use net::{Frames, NetConfig};
pub use notation::{Mistake, Notation};
pub use pool::{PollMode, PoolConfig};
pub use serve::{Identity, ServeConfig, Share};
pub use values::{OnError, SocketMode, Switch};
