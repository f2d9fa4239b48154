//! The process that hands its devices over, at a call of the next one.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::{Duration, Instant};
use std::{mem, process};

use anyhow::{Context, Result};
use kickless_control::{RpcError, Successor};
use kickless_daemon::{Beside, Given, PassedListener, Registry, hand_over};
use kickless_opener::Listener;
use kickless_sync::lock;
use rustix::net::{Shutdown, shutdown};
use serde_json::{Value, json};
use tracing::{info, warn};

use crate::reload::Reload;
use crate::{exit, log};

/// The longest time that this process waits until the next one lets it end. systemd has 5 s to make that one
/// the main process.
const RELEASE_WAIT: Duration = Duration::from_secs(10);

/// Hands the daemon over, to one process at a time.
pub(crate) struct HandOver {
    registry: Weak<Registry>,
    reload: Option<Reload>,
    control: Vec<PassedListener>,
    /// The interval of the service manager's watchdog.
    watchdog: Option<Duration>,
    /// The user of this process.
    pub(crate) user: u32,
    state: Mutex<State>,
}

enum State {
    Idle,
    /// Another process takes over now. Has a duplicate of the channel to it.
    Passing(OwnedFd),
    /// This process stops its devices.
    Stopping,
}

impl HandOver {
    /// Prepares for a hand-over of these devices and control sockets.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub(crate) fn new<'l>(
        registry: &Arc<Registry>,
        reload: Option<Reload>,
        control: impl IntoIterator<Item = &'l Listener>,
        watchdog: Option<Duration>,
        user: u32,
    ) -> Result<Arc<Self>> {
        let control = control.into_iter().map(PassedListener::of).collect::<Result<_, _>>();
        let control = control.context("no free descriptor for a duplicate of a control socket")?;
        let registry = Arc::downgrade(registry);
        Ok(Arc::new(Self { registry, reload, control, watchdog, user, state: Mutex::new(State::Idle) }))
    }

    /// Begins to hand the devices over to `to`, on a thread of its own.
    ///
    /// # Errors
    /// This process cannot hand them over to that one, or hands them over already.
    pub(crate) fn begin(self: &Arc<Self>, to: Successor) -> Result<Value, RpcError> {
        let (oldest, newest) = to.wants.formats;
        let format = kickless_daemon::common_format(oldest..=newest);
        let format = format.map_err(|error| RpcError::failed(error.to_string()))?;
        if process::id() == 1 {
            return Err(RpcError::failed(
                "the daemon is the first process of its container, which ends with it: start the container with an \
                 init process (--init)",
            ));
        }
        let registry = self.registry.upgrade().ok_or_else(|| RpcError::failed("the daemon is stopping"))?;
        let devices = registry.list().len();
        let copy = to.channel.try_clone().map_err(|error| RpcError::failed(error.to_string()))?;
        let mut state = lock(&self.state);
        match *state {
            State::Idle => {}
            State::Passing(_) => {
                return Err(RpcError::busy("the daemon is being upgraded: try again in a moment"));
            }
            State::Stopping => return Err(RpcError::failed("the daemon is stopping")),
        }
        let this = self.clone();
        let run = move || {
            let (version, to_store) = (to.wants.version.clone(), to.wants.store);
            let why = match this.hand_over(&registry, to) {
                Ok(given) => {
                    match to_store {
                        true => info!(devices = given.devices, "stored for the next process"),
                        false => info!(devices = given.devices, version, "handed over"),
                    }
                    given.wait_for_release(Instant::now() + RELEASE_WAIT);
                    exit::exit_now(0);
                }
                Err(why) => why,
            };
            let mut state = lock(&this.state);
            if matches!(*state, State::Passing(_)) {
                *state = State::Idle;
            }
            drop(state);
            // A program that reads this can try again at once.
            match to_store {
                true => warn!("the devices cannot be stored for the next process: {why}"),
                false => warn!("the upgrade to version {version} failed: {why}"),
            }
        };
        let thread = thread::Builder::new().name("hand over".into()).spawn(run);
        thread.map_err(|error| RpcError::failed(format!("cannot start a thread: {error}")))?;
        *state = State::Passing(copy);
        Ok(json!({ "format": format, "pid": process::id(), "devices": devices }))
    }

    fn hand_over(&self, registry: &Registry, to: Successor) -> Result<Given, String> {
        let of_file = self.reload.as_ref().map(Reload::devices).unwrap_or_default();
        let control = self.control.iter().map(PassedListener::try_clone).collect::<Result<_, _>>();
        let control = control.map_err(|error| error.to_string())?;
        let (log_filter, watchdog) = (log::changed_filter(), self.watchdog);
        let beside = Beside { of_file, control, log_filter, watchdog };
        hand_over(registry, &beside, to.channel, to.wants.drain, to.wants.store)
    }

    /// Makes the process that takes over fail, unless it serves already, and refuses others. Called before
    /// this one stops its devices.
    pub(crate) fn give_up(&self) {
        if let State::Passing(channel) = mem::replace(&mut *lock(&self.state), State::Stopping) {
            // The other process finds the end, or has taken over.
            let _ = shutdown(channel, Shutdown::Both);
        }
    }
}
