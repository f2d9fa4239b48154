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
//! opened, closed, or waited for. The name of a device is in use until the device is closed.
//!
//! # Bounds
//! A registry has room for a number of devices that is fixed at its start, because the engines of the workers reserve slots
//! and threads for each device when they open ([`kickless_io::EngineOptions::owners`]). This number is an upper bound. A device
//! counts from the moment when it is opened until it is closed, those that are being removed or have ended included, so there
//! are never more owners than reserves. The pool must have at least as many reserves ([`Registry::devices_max`]), and
//! engines have at most [`kickless_io::OWNERS_MAX`]. A device that is removed gives its reserves, its address space, its
//! threads and its descriptors back. Address space and lines of the log are divided among the devices that there are.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod config;
mod error;
mod registry;
mod sentence;
mod served;
mod socket;
mod table;

pub use config::{
    BlkConfig, DEVICE_SPAN, DeviceConfig, DeviceKind, DeviceTable, Mistake, NetConfig, Notation, PollMode,
    PoolConfig, ServeConfig, Switch, parse_device_name,
};
pub use error::{AddError, MakeError, RemoveError, ServeError, SocketError, SocketProblem};
pub use registry::{Added, Listed, MakeDevice, Opened, Registry, Removal};
pub use sentence::sentence;
pub use served::Served;
pub use socket::{Endpoint, Listener, TURN_WAIT, real_path};
pub use table::DeviceState;
