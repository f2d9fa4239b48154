//! The devices of a daemon, and the pool of workers that serves them.
//!
//! A [`Registry`] owns the devices. Callers add and remove devices while the daemon runs. The kinds of
//! devices are the program's: it hands a table of them ([`Kinds`]) to the registry, and each [`Kind`] makes
//! devices from their [`DeviceConfig`]. Here each of them is a [`kickless_device::Operate`].
//!
//! # Threads
//! Each device has a session thread, which accepts front-ends and serves them, one after the other. It also
//! closes the device. The workers of the pool execute the requests of all devices. [`Registry::add`] and
//! [`Registry::remove`] run on the caller's thread.
//!
//! Other threads use a device for a short time, by a [`DeviceRef`]. The session thread closes the device
//! after the last one is dropped. [`Registry::remove`] waits for that, up to its deadline. It reports success
//! only when the name and the socket are free and no thread uses the disk.
//!
//! # Locks
//! One lock protects the table of the devices. A thread holds it only to read or change the table, and never
//! while it opens, closes or waits for a device. The name of a device is in use until the device is closed.
//! The file `lifecycle.rs` has a model, which loom runs.
//!
//! # Things of the host
//! The registry enters the things that a device uses by their names ([`DeviceConfig::grants`]) before it
//! resolves or opens one of them. The entry goes after the socket is removed and the disk is closed. If the
//! sandbox refuses one ([`AddError::Refused`]), the device is not tried again. A process without a sandbox
//! enters nothing.
//!
//! # Bounds
//! The maximum number of devices is fixed when the registry is made, because the engines of the workers
//! reserve slots and threads for each device when they open ([`kickless_io::EngineOptions::owners`]). A
//! device counts from its opening until it is closed, even while it is being removed or after it has ended.
//! There are therefore never more owners than reserves. The pool must have at least [`Registry::devices_max`]
//! reserves, and engines have at most [`kickless_io::OWNERS_MAX`]. `docs/adr/0010-one-owner-is-a-promise.md`
//! says why the number does not grow at run time.
//!
//! A removed device gives back its reserves, its address space, its threads and its descriptors. The present
//! devices share the address space and the lines of the log.
//!
//! ```no_run
//! use kickless_daemon::{DeviceConfig, Kinds, Notation, PoolConfig, Registry, RemoveMode};
//! use kickless_worker::WorkerPool;
//! use std::time::Duration;
//!
//! /// Serves a device of one of these kinds for a minute.
//! fn serve(kinds: Kinds, config: DeviceConfig) -> Result<(), Box<dyn std::error::Error>> {
//!     let registry = Registry::new(8, kinds)?;
//!     let options = PoolConfig::default().worker_options(8, Notation::Keys).map_err(|m| m.to_string())?;
//!     registry.set_pool(WorkerPool::start(&options)?);
//!     registry.add(config)?;
//!     std::thread::sleep(Duration::from_secs(60));
//!     registry.remove("a", RemoveMode::Refuse, Duration::from_secs(10))?;
//!     Ok(())
//! }
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods))]

use std::time::Duration;

/// The time that a removal waits by default. A request of a healthy disk completes within it.
pub const REMOVE_TIMEOUT: Duration = Duration::from_secs(10);

mod config;
mod device_status;
mod error;
mod freeze;
mod hand_over;
mod lifecycle;
mod registry;
mod reload;
mod sentence;
mod served_device;
mod socket;
mod table;
#[cfg(test)]
extern crate self as kickless_daemon;
#[cfg(test)]
mod testing;
mod unavailable;

pub use config::{
    CaptureConfig, DEVICE_SPAN, DeviceConfig, Identity, Key, KeyError, Kind, KindConfig, KindEntry, Kinds,
    LimitWords, Limited, LimitsConfig, MakeError, Making, Mistake, Notation, PollMode, PollingConfig,
    PoolConfig, SavedTable, ServeConfig, Served, Settable, Share, SocketMode, Switch, Value, Values, Words,
    alternatives, check, keys, parse_device_name, read, removed_option, show_name, text, unknown_key, values,
};
pub use device_status::{DeviceState, DeviceStatus};
pub use error::{
    AddError, CaptureError, DrainError, FindError, RemoveError, ResizeError, ServeError, SetError,
};
pub use freeze::{BeingUpgraded, Change};
pub use hand_over::{Beside, Given, TakenOver, hand_over, shelve, take_over, take_shelved};
#[cfg(debug_assertions)]
pub use hand_over::{End, StepHook, set_step_hook};
pub use kickless_handover::{FORMATS, Shelved, common as common_format};
pub use registry::{AddOutcome, OpenDevice, Registry, Removal, RemoveMode};
pub use reload::{Failed, Reloaded, RestartNeeded, UsedDevices, reload};
pub use sentence::sentence;
pub use served_device::{DeviceRef, ServedDevice};
pub use socket::{Endpoint, PassedListener};
