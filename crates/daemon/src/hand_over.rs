//! Passes all devices of a registry to another process, or takes them over, while their guests go on.
//!
//! [`hand_over`] is the end of the *old* process, [`take_over`] that of the *new* one. The crate
//! `kickless_handover` has the messages between them, and the argument that exactly one of the two serves at
//! any moment.
//!
//! | old | new |
//! | --- | --- |
//! | refuses changes, sends the plan | reads each configuration, takes names and rights |
//! | parks each session for a moment, and sends the device | makes the disk or card, maps the memory, makes the tasks |
//! | syncs, parks all sessions, and sends again what changed | makes that again |
//! | **the pause**: parks the rings, sends indices and numbers | sets them, and says that it has taken over |
//! | ends, without a destructor | begins |
//!
//! If anything fails before the last step, the old process goes on with what it has: it has given duplicates.
//! The new one must end without destructors then ([`take_over`]), because some would remove names or write
//! images that the old one still uses.
//!
//! At a restart, no process waits. [`shelve()`] is a new end that keeps the records and descriptors in the
//! descriptor store of a service manager, and [`take_shelved`] serves them from there.

mod config;
mod fault;
mod new;
mod old;
mod passing;
mod shelve;

use std::time::Duration;

use super::config::DeviceConfig;
use super::socket::PassedListener;
#[cfg(debug_assertions)]
pub use fault::{End, StepHook, set_step_hook};
pub use new::{TakenOver, take_over, take_shelved};
pub use old::{Given, hand_over};
pub use shelve::shelve;

/// The longest time that one process waits for the other one before the pause. The new one opens images and
/// may look up names in it. That one waits as long in the pause, whose length the old one decides.
const PREPARE_WAIT: Duration = Duration::from_secs(60);
/// The longest time that the old process waits for the new one in the pause.
const PAUSE_WAIT: Duration = Duration::from_secs(1);
/// The longest time that a process waits for a store. The service manager has 5 s for its answer.
const STORE_WAIT: Duration = Duration::from_secs(10);

/// The name of the number of upgrades in a plan.
const UPGRADES: &str = "upgrades";

/// The things of a daemon that pass beside its devices. The program knows them.
#[derive(Debug, Default)]
pub struct Beside {
    /// The devices of the configuration file, as it was read last.
    pub of_file: Vec<DeviceConfig>,
    /// The control sockets, with the names that the process removes at its end.
    pub control: Vec<PassedListener>,
    /// The filter of the log, if a call has changed it.
    pub log_filter: Option<String>,
    /// The interval within which the service manager expects a sign of life. It tells this only to the
    /// process that it has started.
    pub watchdog: Option<Duration>,
}
