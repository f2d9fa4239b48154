//! Sleeps on descriptors.

use std::os::fd::AsFd;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Makes a descriptor to sleep on.
pub(crate) fn readable<'a>(fd: &'a impl AsFd) -> PollFd<'a> {
    PollFd::new(fd, PollFlags::IN)
}

/// Sleeps until one of the descriptors is readable.
pub(crate) fn sleep(fds: &mut [PollFd<'_>], deadline: Option<Instant>) {
    let timeout = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    // The only error is an interruption by a signal. The caller checks its condition again.
    if poll(fds, timeout.as_ref()).is_err() {
        fds.iter_mut().for_each(PollFd::clear_revents);
    }
}

/// Returns whether this descriptor ended the sleep.
pub(crate) fn is_ready(fd: &PollFd<'_>) -> bool {
    !fd.revents().is_empty()
}
