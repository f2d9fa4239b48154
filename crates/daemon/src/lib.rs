//! The devices of a daemon, and the pool of workers that serves them.
//!
//! A [`Registry`] owns devices that come and go while the daemon runs. It makes each of a [`DeviceConfig`] with a function
//! of the program, which alone knows the kinds of devices; here a device is a [`kickless_device::Device`].
//!
//! # Threads
//! Each device has a session thread, which accepts front-ends and serves them, one after the other. The workers of the pool
//! carry out the requests of all devices. [`Registry::add`] and [`Registry::remove`] run on the caller's thread.
//!
//! # Locks
//! One lock protects the table of the devices. It is held to look things up and to change them, and never while a device is
//! opened, stopped, or waited for.
//!
//! # Bounds
//! A registry has room for a number of devices that is fixed at its start, because the engines of the workers reserve slots
//! and threads for each device when they open ([`kickless_io::EngineOptions::owners`]). A device that is removed gives its
//! reserves, its address space, its threads and its descriptors back.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod config;
mod error;
mod registry;
mod sentence;
mod served;
mod socket;

pub use config::{
    BlkConfig, DEVICE_SPAN, DeviceConfig, DeviceKind, DeviceTable, Mistake, NetConfig, Notation, PollMode,
    PoolConfig, ServeConfig, Switch, parse_device_name,
};
pub use error::{AddError, MakeError, RemoveError, ServeError, SocketError, SocketProblem};
pub use registry::{Added, DeviceState, Listed, MakeDevice, Opened, Registry, Removal};
pub use sentence::sentence;
pub use served::Served;
pub use socket::{Endpoint, Listener, TURN_WAIT, real_path};
