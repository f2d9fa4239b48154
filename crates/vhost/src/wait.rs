//! Waits for workers, and for requests in flight.
//!
//! A worker answers a change between two rounds of its loop, and a stop when the ring's requests are done. The session
//! always waits for these answers ([`answer`]). They depend on this process and the host's kernel only, because a stop
//! limits how long requests wait for a remote server.
//!
//! A message that takes memory or a translation away is answered when no request in flight uses it ([`until`]). Such a
//! request can wait for a remote server that does not answer, and no ring stops here. So this wait limits the waits of
//! the device's requests itself, as a stop does. It also ends early, with the session, when the answer has become useless:
//! the process is asked to stop, or the front-end has gone. The memory stays mapped until the last request is done with
//! it, whether the session waits for that or not. The session's end stops all rings, which limits the same requests.

use crate::Ended;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::BorrowedFd;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};
use tracing::warn;

/// How often a wait that does not end is logged.
const PATIENCE: Duration = Duration::from_secs(1);
/// How often [`until`] looks whether its answer has become useless. The end of the wait itself is noticed at once.
const LOOK: Duration = Duration::from_millis(50);

/// The events that make the answer to a message useless.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ends<'a> {
    /// Readable when the process is to stop.
    pub(crate) stop: BorrowedFd<'a>,
    /// The connection to the front-end.
    pub(crate) connection: BorrowedFd<'a>,
}

impl Ends<'_> {
    /// # Errors
    /// The process is to stop, or the front-end can receive no answer any more. One that has only shut its sending direction down still can.
    fn check(&self) -> Result<(), Ended> {
        let mut fds = [
            PollFd::from_borrowed_fd(self.stop, PollFlags::IN),
            // Messages that wait in it are none of our business: only HUP and ERR, which are always reported.
            PollFd::from_borrowed_fd(self.connection, PollFlags::empty()),
        ];
        // A poll that fails says nothing; the next one may.
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

/// Waits until `done` returns `true`. `done` itself waits, up to the time that it is given. Calls `limit_remote_waits`
/// again and again meanwhile, so that no request in flight waits for a remote server without end.
///
/// # Errors
/// The answer has become useless.
pub(crate) fn until(
    waiting_for: &str,
    ends: Ends<'_>,
    limit_remote_waits: impl Fn(),
    mut done: impl FnMut(Duration) -> bool,
) -> Result<(), Ended> {
    let since = Instant::now();
    let mut next = since;
    while !done(LOOK) {
        ends.check()?;
        let now = Instant::now();
        if now >= next {
            // Again each time: a request in several parts may have begun another part.
            limit_remote_waits();
            if now >= since + PATIENCE {
                complain(since, waiting_for, None);
            }
            next = now + PATIENCE;
        }
    }
    Ok(())
}

fn complain(since: Instant, waiting_for: &str, ring: Option<u16>) {
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

    /// Waits for what never comes; why that ended, and how often the waits of requests were limited. `change` is called before each look.
    fn wait(stop: &UnixStream, connection: &UnixStream, mut change: impl FnMut()) -> (Ended, u32) {
        let limited = Cell::new(0);
        let ends = Ends { stop: stop.as_fd(), connection: connection.as_fd() };
        let ended = until(
            "a test",
            ends,
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
        // Messages that are there, and no more of them to come, end nothing: the answer can still be received.
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
    fn what_is_done_already_limits_nothing_and_ends_well() {
        let ((stop, stopping), (connection, frontend)) =
            (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        drop((stopping, frontend));
        let ends = Ends { stop: stop.as_fd(), connection: connection.as_fd() };
        until("a test", ends, || panic!("nothing to limit"), |_| true).unwrap();
    }
}
