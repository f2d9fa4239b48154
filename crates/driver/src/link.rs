//! The state of a connection that does not depend on the kind of device: its events, the back-end's own
//! channel, the reason of the device's death, and whether an outage lasts.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use kickless_sync::lock;
use kickless_vhost_user::FrontendResponder;

use crate::connection::{self, Connection};
use crate::control::Control;
use crate::error::Error;
use crate::event::Event;
use crate::poll::{readable, sleep};

/// The shortest and the longest pause between attempts.
const PAUSE_MIN: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(100);

/// The link to a back-end, through one connection after another.
pub(crate) struct Link {
    pub(crate) control: Control,
    /// The back-end's own channel. It has a lock of its own so that a thread that sleeps at a queue can serve
    /// it.
    requests: Mutex<Option<FrontendResponder>>,
    /// The reason of the death.
    dead: OnceLock<Arc<Error>>,
    /// Signalled when the device dies.
    pub(crate) stop: Event,
    recovering: AtomicBool,
    /// The time in which the back-end has to be back.
    pub(crate) reconnect_limit: Duration,
    /// The number of changes of the configuration space.
    changes: AtomicU64,
}

impl Link {
    pub(crate) fn new(reconnect_limit: Duration) -> Result<Self, Error> {
        Ok(Self {
            control: Control::new()?,
            requests: Mutex::new(None),
            dead: OnceLock::new(),
            stop: Event::new()?,
            recovering: AtomicBool::new(false),
            reconnect_limit,
            changes: AtomicU64::new(0),
        })
    }

    /// Watches a connection, and serves its channel of the back-end from now on.
    pub(crate) fn watch(&self, connection: &mut Connection) -> Result<(), Error> {
        let requests = connection.take_requests();
        self.control.watch(connection.as_fd(), requests.as_ref().map(AsFd::as_fd))?;
        *lock(&self.requests) = requests;
        Ok(())
    }

    /// Closes a connection, if there is one, and the back-end's own channel.
    pub(crate) fn close(&self, connection: Option<Connection>) {
        if let Some(requests) = lock(&self.requests).take() {
            self.control.forget(requests.as_fd());
        }
        if let Some(connection) = connection {
            self.control.forget(connection.as_fd());
        }
    }

    /// Serves the back-end's own channel. Counts changes of the configuration space.
    pub(crate) fn serve_requests(&self) {
        let Ok(mut requests) = self.requests.try_lock() else { return };
        let Some(responder) = requests.as_mut() else { return };
        let served = connection::serve(responder);
        if served.is_err() {
            // The device works without this channel.
            self.control.forget(responder.as_fd());
            *requests = None;
        }
        self.changes.fetch_add(matches!(served, Ok(true)).into(), Ordering::Release);
    }

    /// Returns the number of changes of the configuration space.
    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Returns the reason of the death.
    pub(crate) fn failure(&self) -> Option<Arc<Error>> {
        self.dead.get().cloned()
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.dead.get().is_some()
    }

    /// Returns the error of a call on a dead device.
    pub(crate) fn dead_error(&self) -> Error {
        self.failure().map_or(Error::Unplugged, Error::Dead)
    }

    /// Returns `error`, or the reason of the death if `error` only says that the device is gone.
    pub(crate) fn explain(&self, error: Error) -> Error {
        if matches!(error, Error::Unplugged) { self.dead_error() } else { error }
    }

    /// Stores the reason of the death, and logs it. Returns `false` if the device is dead already.
    pub(crate) fn mark_dead(&self, error: Error) -> bool {
        if self.dead.set(Arc::new(error)).is_err() {
            return false;
        }
        if let Some(error) = self.dead.get().filter(|error| !matches!(***error, Error::Unplugged)) {
            tracing::error!(error = &**error as &dyn std::error::Error, "the device is dead");
        }
        true
    }

    /// Begins an outage, unless the device is dead or an outage lasts already. Starts a thread that runs
    /// `recover`, and logs this.
    ///
    /// # Errors
    /// The device does not connect again (the limit is zero), which is `cause`, or there can be no thread.
    /// The device has to die.
    pub(crate) fn lost(&self, cause: Error, recover: impl FnOnce() + Send + 'static) -> Result<(), Error> {
        if self.is_dead() || self.recovering.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        if self.reconnect_limit.is_zero() {
            return Err(cause);
        }
        tracing::info!("the back-end has closed the connection");
        let spawned = thread::Builder::new().name("kickless-recovery".into()).spawn(recover);
        spawned.map(drop).map_err(|source| Error::Os { what: "a thread to connect again", source })
    }

    /// Ends an outage.
    pub(crate) fn end_outage(&self) {
        tracing::info!("the back-end is back");
        self.recovering.store(false, Ordering::Release);
    }

    /// Returns whether an outage lasts.
    pub(crate) fn is_recovering(&self) -> bool {
        self.recovering.load(Ordering::Relaxed)
    }

    /// Repeats `attempt` until it succeeds, and returns `true`. Returns `false` if the device dies meanwhile.
    ///
    /// # Errors
    /// An attempt failed for good, or the deadline has passed.
    pub(crate) fn retry_until(
        &self,
        deadline: Instant,
        mut attempt: impl FnMut() -> Result<(), Error>,
    ) -> Result<bool, Error> {
        let mut pause = PAUSE_MIN;
        loop {
            if self.is_dead() {
                return Ok(false);
            }
            let error = match attempt() {
                Ok(()) => return Ok(true),
                Err(error) => error,
            };
            if !error.is_loss() {
                return Err(error);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Gone { limit: self.reconnect_limit, source: Box::new(error) });
            }
            sleep(&mut [readable(&self.stop)], Some(Instant::now() + pause.min(left)));
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }
}
