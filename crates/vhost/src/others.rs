//! Front-ends that connect while another one is served.

use rustix::event::{PollFd, PollFlags};
use std::os::fd::BorrowedFd;
use tracing::warn;

/// Tells, once a session, that another front-end waits. It is not accepted: what waits in the socket's backlog costs nothing.
pub(crate) struct Others<'a> {
    /// `None`: there is no listener, or it was told.
    listener: Option<BorrowedFd<'a>>,
}

impl<'a> Others<'a> {
    pub(crate) fn new(listener: Option<BorrowedFd<'a>>) -> Self {
        Self { listener }
    }

    /// Returns the descriptor to wait for beside the session's own ones.
    pub(crate) fn listener(&self) -> Option<BorrowedFd<'a>> {
        self.listener
    }

    /// Takes note of what a wait for [`Others::listener`] returned in which the session's own connection was quiet. A front-end
    /// that closes its connection and makes another one is not told of: the old connection is readable first.
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
