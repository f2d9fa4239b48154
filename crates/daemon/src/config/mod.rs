//! The configuration of devices and of the pool that they share.
//!
//! An option exists once, as a field of a group of options: [`PoolConfig`] with its [`PollingConfig`],
//! [`ServeConfig`], the options of a kind ([`Kind::Options`]) and their limits ([`LimitsConfig`]). `clap`
//! derives the command line from these. A file or a call has the same options as keys, which the parsers of
//! the command line read ([`keys`](fn@keys), [`read`]). An option therefore has the same name, values and
//! default everywhere. The keys of a device determine its kind ([`Kinds::read`]).

mod capture;
mod device;
mod keys;
mod kind;
mod kind_config;
mod kinds;
mod limits;
mod making;
mod name;
mod notation;
mod polling;
mod pool;
mod removed;
mod saved;
mod serve;
pub mod text;
mod values;

pub use capture::CaptureConfig;
pub use device::{DEVICE_SPAN, DeviceConfig};
pub use keys::{Key, KeyError, Value, Values, alternatives, check, keys, read, unknown_key, values};
pub use kind::{Kind, Served, Settable, Words};
pub use kind_config::KindConfig;
pub use kinds::{KindEntry, Kinds};
pub use limits::{LimitWords, Limited, LimitsConfig};
pub use making::{MakeError, Making};
pub use name::parse_device_name;
pub use notation::{Mistake, Notation};
pub use polling::{PollMode, PollingConfig};
pub use pool::PoolConfig;
pub use removed::removed_option;
pub use saved::SavedTable;
pub use serve::{Identity, ServeConfig, Share};
pub use values::{SocketMode, Switch, show_name};
