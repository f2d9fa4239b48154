//! Front-ends that connect while another one is served.

use crate::wait::is_readable;
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

    /// Handles the result of a wait for [`WaitingFrontends::listener`] in which the session's own connection,
    /// `messages`, was quiet.
    ///
    /// A front-end that closes its connection and makes another is not logged. A wait looks at one
    /// descriptor after the other, and both events may happen in between. So this looks at `messages` again.
    pub(crate) fn note(&mut self, messages: BorrowedFd<'_>, found: &PollFd<'_>) {
        let revents = found.revents();
        if revents.is_empty() || is_readable(messages) {
            return;
        }
        if revents.contains(PollFlags::IN) {
            warn!("another front-end has connected to the socket; it waits until this one leaves");
        }
        self.listener = None;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use rustix::event::poll;
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    /// Lets another front-end connect. Then the served one leaves, or stays. Returns whether the other one is
    /// still watched for.
    fn watches_after(leaves: bool) -> bool {
        let (frontend, ours) = UnixStream::pair().unwrap();
        // A byte that can be read stands for a connection that can be accepted.
        let (mut other, listener) = UnixStream::pair().unwrap();
        other.write_all(&[0]).unwrap();
        let mut waiting = WaitingFrontends::new(Some(listener.as_fd()));
        let mut found = [PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN)];
        poll(&mut found, None).unwrap();
        let _stays = (!leaves).then_some(frontend);
        waiting.note(ours.as_fd(), &found[0]);
        waiting.listener().is_some()
    }

    #[test]
    fn another_front_end_is_noted_once() {
        assert!(!watches_after(false));
    }

    #[test]
    fn a_front_end_that_connects_again_is_not_noted() {
        assert!(watches_after(true));
    }
}
