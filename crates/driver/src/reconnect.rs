//! The life of the connection of a disk or a card: its events, its errors, its end, and its replacement, on a
//! thread that lives as long as the outage.

use std::sync::Arc;
use std::time::Instant;

use crate::connection::{Connection, deadline_after};
use crate::error::Error;
use crate::link::Link;

/// A device that gets a new connection when it has lost one.
pub(crate) trait Reconnect: Send + Sync + Sized + 'static {
    fn link(&self) -> &Link;

    /// Locks the session and passes its connection to `with`: `None` while it is lost.
    fn with_connection<R>(&self, with: impl FnOnce(&mut Option<Connection>) -> R) -> R;

    /// Returns the numbers of all queues.
    fn queue_indices(&self) -> impl Iterator<Item = u8>;

    /// Notes that an outage begins, after the connection was closed. Returns the time from which the limit
    /// for the outage counts.
    fn begin_recovery(&self) -> Instant;

    /// Makes one attempt. Replies are awaited until the deadline, or a little longer.
    fn reconnect(self: &Arc<Self>, deadline: Instant) -> Result<(), Error>;

    /// Wakes all threads that wait for the device, so that they check the connection.
    fn wake_all(&self);

    /// Waits until nothing is in flight, before the queues are stopped.
    fn drain(self: &Arc<Self>) {}

    /// Fails everything in flight and closes the connection, because the device has just died.
    fn release(self: &Arc<Self>);

    /// Handles the events on the connection.
    fn check_connection(self: &Arc<Self>) {
        let happened = self.link().control.poll_events();
        if happened.error && self.link().control.error.take() > 0 {
            return self.die(Error::RingError);
        }
        if happened.message {
            self.link().serve_requests();
        }
        if happened.closed {
            self.lost(Error::Closed);
        }
    }

    /// Handles an error on the connection. The caller does not hold the lock of the session.
    ///
    /// The loss of the connection is no error, because a new connection is made and set up from the start. An
    /// error after which the connection is still usable is returned. Any other error kills the device.
    fn fail(self: &Arc<Self>, error: Error) -> Result<(), Error> {
        match error {
            Error::Refused { .. } | Error::Os { .. } => return Err(error),
            error if error.is_loss() => self.lost(error),
            error => self.die(error),
        }
        if self.link().is_dead() { Err(self.link().dead_error()) } else { Ok(()) }
    }

    /// Starts a thread that replaces the lost connection. Logs this once for each outage.
    fn lost(self: &Arc<Self>, cause: Error) {
        let device = self.clone();
        if let Err(error) = self.link().lost(cause, move || recover(&device)) {
            self.die(error);
        }
    }

    /// Closes the connection and the back-end's own channel, if there is one.
    fn close_connection(&self) {
        let connection = self.with_connection(Option::take);
        self.link().close(connection);
    }

    /// Closes the device in order: waits until nothing is in flight, and stops the queues.
    fn close(self: &Arc<Self>) {
        if self.link().is_dead() {
            return;
        }
        self.drain();
        if !self.link().is_recovering() {
            let stopped = self.with_connection(|connection| match connection {
                Some(connection) => self.queue_indices().try_for_each(|index| connection.stop(index)),
                None => Ok(()),
            });
            if let Err(error) = stopped {
                tracing::debug!(
                    error = &error as &dyn std::error::Error,
                    "the back-end closed the connection before the queues were stopped"
                );
            }
        }
        self.die(Error::Unplugged);
    }

    /// Kills the device. Everything in flight fails, and so do all later calls.
    fn die(self: &Arc<Self>, error: Error) {
        if self.link().mark_dead(error) {
            self.link().stop.signal();
            self.release();
        }
    }
}

fn recover<D: Reconnect>(device: &Arc<D>) {
    device.close_connection();
    let since = device.begin_recovery();
    let deadline = deadline_after(device.link().reconnect_limit.saturating_sub(since.elapsed()));
    match device.link().retry_until(deadline, || device.reconnect(deadline)) {
        Ok(true) => device.link().end_outage(),
        Ok(false) => {}
        Err(error) => return device.die(error),
    }
    // The connection may be lost again already. Threads could not report that during the outage. So they are
    // woken after it, and they check the connection again.
    device.wake_all();
    if device.link().is_dead() {
        device.close_connection();
    }
}
