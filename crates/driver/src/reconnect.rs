//! Replaces the lost connection of a disk or a card, on a thread that lives as long as the outage.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::link::Link;

/// A device that gets a new connection when it has lost one.
pub(crate) trait Reconnect: Send + Sync + Sized + 'static {
    fn link(&self) -> &Link;

    /// Returns the time in which the back-end has to be back.
    fn reconnect_limit(&self) -> Duration;

    /// Notes that an outage begins, after the connection was closed. Returns the deadline for the new one.
    fn begin_recovery(&self) -> Instant;

    /// Makes one attempt. Replies are awaited until the deadline, or a little longer.
    fn reconnect(self: &Arc<Self>, deadline: Instant) -> Result<(), Error>;

    /// Wakes all threads that wait for the device, so that they check the connection.
    fn wake_all(&self);

    /// Closes the connection and the back-end's own channel, if there is one.
    fn close_connection(&self);

    /// Ends the device after an outage that is too long. All later calls fail.
    fn give_up(self: &Arc<Self>, error: Error);

    /// Starts a thread that replaces the lost connection. Logs this once for each outage.
    fn lost(self: &Arc<Self>, cause: Error) {
        let device = self.clone();
        if let Err(error) = self.link().lost(cause, self.reconnect_limit(), move || recover(&device)) {
            self.give_up(error);
        }
    }
}

fn recover<D: Reconnect>(device: &Arc<D>) {
    device.close_connection();
    let deadline = device.begin_recovery();
    match device.link().retry_until(deadline, device.reconnect_limit(), || device.reconnect(deadline)) {
        Ok(true) => device.link().end_outage(),
        Ok(false) => {}
        Err(error) => return device.give_up(error),
    }
    // The connection may be lost again already. Threads could not report that during the outage. So they are
    // woken after it, and they check the connection again.
    device.wake_all();
    if device.link().is_dead() {
        device.close_connection();
    }
}
