//! Front-ends that connect while another one is served.

use rustix::event::{PollFd, PollFlags};
use std::os::fd::BorrowedFd;
use tracing::warn;

/// Logs, once in a session, that another front-end waits. It is not accepted: a connection in the socket's
/// backlog costs nothing.
pub(crate) struct WaitingFrontends<'a> {
    /// `None`: there is no listener, or the warning was logged.
    listener: Option<BorrowedFd<'a>>,
}

impl<'a> WaitingFrontends<'a> {
    pub(crate) fn new(listener: Option<BorrowedFd<'a>>) -> Self {
        Self { listener }
    }

    /// Returns the descriptor to wait for beside those of the session.
    pub(crate) fn listener(&self) -> Option<BorrowedFd<'a>> {
        self.listener
    }

    /// Handles the result of a wait for [`WaitingFrontends::listener`] in which the session's own connection
    /// was quiet. A front-end that closes its connection and makes another is not logged, because the old
    /// connection is readable first.
    pub(crate) fn note(&mut self, found: &PollFd<'_>) {
        let revents = found.revents();
        if revents.contains(PollFlags::IN) {
            warn!("another front-end has connected to the socket; it waits until this one leaves");
        }
        if !revents.is_empty() {
            self.listener = None;
        }
    }
}
