//! Front-ends that connect while another one is served.

use crate::wait::{LEAVES_WITHIN, is_readable};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};
use tracing::warn;

/// Logs, once in a session, that another front-end waits. It is not accepted: a connection in the socket's
/// backlog costs nothing.
///
/// The same front-end may have connected again while its old connection is still open, for example in a
/// process that it has forked. So the warning comes only if the session still lasts a while later.
pub(crate) struct WaitingFrontends<'a> {
    /// `None`: there is no listener, or the warning was logged.
    listener: Option<BorrowedFd<'a>>,
    /// Set when another front-end has connected: the moment of the warning.
    warn_at: Option<Instant>,
}

impl<'a> WaitingFrontends<'a> {
    pub(crate) fn new(listener: Option<BorrowedFd<'a>>) -> Self {
        Self { listener, warn_at: None }
    }

    /// Returns whether the warning may still have to be logged.
    pub(crate) fn is_watching(&self) -> bool {
        self.listener.is_some()
    }

    /// Returns the descriptor to wait for beside those of the session. It is readable when another front-end
    /// connects.
    pub(crate) fn listener(&self) -> Option<BorrowedFd<'a>> {
        self.listener.filter(|_| self.warn_at.is_none())
    }

    /// Handles the event that [`WaitingFrontends::listener`] is ready.
    pub(crate) fn note(&mut self) {
        self.warn_at = Some(Instant::now() + LEAVES_WITHIN);
    }

    /// Returns the time until [`WaitingFrontends::warn_if_due`] has something to do.
    pub(crate) fn timeout(&self) -> Option<Duration> {
        self.warn_at.map(|at| at.saturating_duration_since(Instant::now()))
    }

    /// Logs the warning if its time has come and the other front-end still waits.
    pub(crate) fn warn_if_due(&mut self) {
        if self.timeout() != Some(Duration::ZERO) {
            return;
        }
        self.warn_at = None;
        if self.listener.is_some_and(is_readable) {
            warn!("another front-end has connected to the socket; it waits until this one leaves");
            self.listener = None;
        }
    }
}
