//! Waiting for workers.

use crate::Ended;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};
use tracing::warn;

/// How often a wait that does not end is logged.
const PATIENCE: Duration = Duration::from_secs(1);

/// Waits for a worker's answer.
///
/// # Errors
/// [`Ended::Worker`]: it will not come.
pub(crate) fn answer<T>(from: &Receiver<T>, waiting_for: &str, ring: Option<u16>) -> Result<T, Ended> {
    let since = Instant::now();
    loop {
        match from.recv_timeout(PATIENCE) {
            Ok(answer) => return Ok(answer),
            Err(RecvTimeoutError::Disconnected) => return Err(Ended::Worker),
            Err(RecvTimeoutError::Timeout) => complain(since, waiting_for, ring),
        }
    }
}

/// Waits until `done`, which itself waits up to the time it is given, says so.
pub(crate) fn until(waiting_for: &str, mut done: impl FnMut(Duration) -> bool) {
    let since = Instant::now();
    while !done(PATIENCE) {
        complain(since, waiting_for, None);
    }
}

fn complain(since: Instant, waiting_for: &str, ring: Option<u16>) {
    warn!(
        waiting_for,
        ring,
        seconds = since.elapsed().as_secs(),
        "still waiting; only this session is held up"
    );
}
