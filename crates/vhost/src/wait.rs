//! Waits for workers, and for requests in flight.
//!
//! A worker answers a change between two rounds of its loop, and a stop when the ring's requests are done.
//! The session always waits for these answers ([`answer`]). They depend on this process and the host's kernel
//! only, because a stop limits how long requests wait for a remote server.
//!
//! A message that takes memory or a translation away is answered when no request in flight uses it
//! ([`until`]). Such a request can wait for a remote server that does not answer, and no ring stops here. So
//! this wait limits the waits of the device's requests itself, as a stop does. It also ends early, with the
//! session, when the answer has become useless: the process is asked to stop, or the front-end has gone. The
//! memory stays mapped until the last request is done with it, whether the session waits for that or not. The
//! session's end stops all rings, which limits the same requests.

use crate::Ended;
use kickless_sync::mpsc::{Receiver, RecvTimeoutError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};
use tracing::warn;

/// The interval at which a long wait is logged.
const LOG_INTERVAL: Duration = Duration::from_secs(1);
/// The interval at which [`until`] checks whether its answer has become useless. It notices the end of the
/// wait itself at once.
pub(crate) const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// The events that make the answer to a message useless.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cancellation<'a> {
    /// Readable when the process is to stop.
    pub(crate) stop: BorrowedFd<'a>,
    /// The connection to the front-end.
    pub(crate) connection: BorrowedFd<'a>,
}

/// Time within which a front-end that leaves closes all its descriptors, from the first sign of that. The
/// kernel closes the descriptors of a process one after another, which takes less than a millisecond. The
/// rest is for a host whose processors are busy.
pub(crate) const LEAVES_WITHIN: Duration = Duration::from_secs(1);

/// Returns whether a socket has something to read or to accept, or the peer has closed the connection.
pub(crate) fn is_readable(socket: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(socket, PollFlags::IN)];
    // A failure here also occurs in the wait for this descriptor.
    poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

impl Cancellation<'_> {
    /// Checks whether the answer is still useful.
    ///
    /// # Errors
    /// The process is to stop, or the front-end cannot receive an answer. A front-end that has only shut down
    /// its sending direction still can.
    fn check(&self) -> Result<(), Ended> {
        let mut fds = [
            PollFd::from_borrowed_fd(self.stop, PollFlags::IN),
            // Waiting messages do not matter here. Only HUP and ERR do, which are always reported.
            PollFd::from_borrowed_fd(self.connection, PollFlags::empty()),
        ];
        // A poll that fails says nothing. The next one may succeed.
        let _ = poll(&mut fds, Some(&Timespec::default()));
        let [stop, connection] = fds.map(|fd| !fd.revents().is_empty());
        match (stop, connection) {
            (true, _) => Err(Ended::Stopped),
            (false, true) => Err(Ended::Left),
            (false, false) => Ok(()),
        }
    }
}

/// Waits for a worker's answer.
///
/// # Errors
/// [`Ended::Worker`]: the worker has ended.
pub(crate) fn answer<T>(from: &Receiver<T>, waiting_for: &str, ring: Option<u16>) -> Result<T, Ended> {
    let since = Instant::now();
    loop {
        match from.recv_timeout(LOG_INTERVAL) {
            Ok(answer) => return Ok(answer),
            Err(RecvTimeoutError::Disconnected) => return Err(Ended::Worker),
            Err(RecvTimeoutError::Timeout) => warn_of_wait(since, waiting_for, ring),
        }
    }
}

/// Waits until `done` returns `true`. `done` itself waits, up to the time that it is given. Meanwhile calls
/// `limit_remote_waits` repeatedly, so that no request in flight waits for a remote server for ever.
///
/// # Errors
/// The answer has become useless.
pub(crate) fn until(
    waiting_for: &str,
    cancellation: Cancellation<'_>,
    limit_remote_waits: impl Fn(),
    mut done: impl FnMut(Duration) -> bool,
) -> Result<(), Ended> {
    let since = Instant::now();
    let mut next = since;
    while !done(CHECK_INTERVAL) {
        cancellation.check()?;
        let now = Instant::now();
        if now >= next {
            // Repeated, because a request in several parts may have begun another part.
            limit_remote_waits();
            if now >= since + LOG_INTERVAL {
                warn_of_wait(since, waiting_for, None);
            }
            next = now + LOG_INTERVAL;
        }
    }
    Ok(())
}

fn warn_of_wait(since: Instant, waiting_for: &str, ring: Option<u16>) {
    warn!(
        waiting_for,
        ring,
        seconds = since.elapsed().as_secs(),
        "still waiting; only this session is held up"
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    /// Waits for an event that never comes. Returns the reason for the end, and the number of calls of
    /// `limit_remote_waits`. Calls `change` before each check.
    fn wait(stop: &UnixStream, connection: &UnixStream, mut change: impl FnMut()) -> (Ended, u32) {
        let limited = Cell::new(0);
        let cancellation = Cancellation { stop: stop.as_fd(), connection: connection.as_fd() };
        let ended = until(
            "a test",
            cancellation,
            || limited.set(limited.get() + 1),
            |_| {
                if limited.get() > 0 {
                    change();
                }
                false
            },
        );
        (ended.unwrap_err(), limited.get())
    }

    #[test]
    fn a_wait_limits_remote_waits_until_its_answer_is_useless() {
        let ((stop, stopping), (connection, frontend)) =
            (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        // Waiting messages, and the end of more messages, do not end the wait. The front-end can still
        // receive the answer.
        (&frontend).write_all(b"message").unwrap();
        frontend.shutdown(std::net::Shutdown::Write).unwrap();
        let (ended, limited) = wait(&stop, &connection, || (&stopping).write_all(&[0]).unwrap());
        assert!(matches!(ended, Ended::Stopped) && limited > 0, "{ended}");

        let (stop, _stopping) = UnixStream::pair().unwrap();
        let mut frontend = Some(frontend);
        let (ended, limited) = wait(&stop, &connection, || drop(frontend.take()));
        assert!(matches!(ended, Ended::Left) && limited > 0, "{ended}");
    }

    #[test]
    fn a_finished_wait_limits_nothing() {
        let ((stop, stopping), (connection, frontend)) =
            (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        drop((stopping, frontend));
        let cancellation = Cancellation { stop: stop.as_fd(), connection: connection.as_fd() };
        until("a test", cancellation, || panic!("nothing to limit"), |_| true).unwrap();
    }
}
