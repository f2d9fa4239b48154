//! Turns signals into readable descriptors. SIGTERM and SIGINT end the program, SIGUSR1 requests the
//! counters, and SIGHUP requests that the sizes of disks and the configuration file are read again.

use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use anyhow::{Context, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGXFSZ};
use signal_hook::flag;
use signal_hook::low_level::pipe;

/// The signals that the program handles. They no longer kill the process.
#[derive(Debug)]
pub(crate) struct Signals {
    stop: UnixStream,
    report: UnixStream,
    refresh: UnixStream,
}

impl Signals {
    /// Starts to catch the signals.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub(crate) fn catch() -> Result<Self> {
        // A write beyond RLIMIT_FSIZE, to the log or an image, then fails and does not kill the process.
        flag::register(SIGXFSZ, Arc::default()).context("signals cannot be caught")?;
        let (stop, stopping) = pair()?;
        for signal in [SIGTERM, SIGINT] {
            watch(signal, &stopping)?;
        }
        let (report, reporting) = pair()?;
        watch(SIGUSR1, &reporting)?;
        let (refresh, refreshing) = pair()?;
        watch(SIGHUP, &refreshing)?;
        Ok(Self { stop, report, refresh })
    }

    /// Returns a descriptor that becomes readable when the program must end, and stays readable.
    pub(crate) fn stop(&self) -> BorrowedFd<'_> {
        self.stop.as_fd()
    }

    /// Returns a descriptor that is readable after a request for the counters, until
    /// [`Signals::take_report`].
    pub(crate) fn report(&self) -> BorrowedFd<'_> {
        self.report.as_fd()
    }

    /// Returns whether the counters were requested since the last call.
    pub(crate) fn take_report(&self) -> bool {
        take(&self.report)
    }

    /// Returns a descriptor that is readable after a request for a refresh, until [`Signals::take_refresh`].
    pub(crate) fn refresh(&self) -> BorrowedFd<'_> {
        self.refresh.as_fd()
    }

    /// Returns whether a refresh was requested since the last call.
    pub(crate) fn take_refresh(&self) -> bool {
        take(&self.refresh)
    }
}

fn take(mut from: &UnixStream) -> bool {
    let mut asked = false;
    while matches!(from.read(&mut [0; 64]), Ok(1..)) {
        asked = true;
    }
    asked
}

fn pair() -> Result<(UnixStream, UnixStream)> {
    let (ours, theirs) = UnixStream::pair().context("no free descriptor to wait for signals with")?;
    for end in [&ours, &theirs] {
        end.set_nonblocking(true).context("signals cannot be waited for")?;
    }
    Ok((ours, theirs))
}

fn watch(signal: i32, with: &UnixStream) -> Result<()> {
    let with = with.try_clone().context("no free descriptor to wait for signals with")?;
    pipe::register(signal, with).context("signals cannot be waited for")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::process::{Signal, getpid, kill_process};

    use super::*;

    fn readable(fd: BorrowedFd<'_>, within: Duration) -> bool {
        let timeout = Timespec { tv_sec: within.as_secs() as i64, tv_nsec: within.subsec_nanos().into() };
        poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&timeout)).unwrap() == 1
    }

    // This is one test, because signals go to the whole process.
    #[test]
    fn signals_make_them_readable() {
        let signals = Signals::catch().unwrap();
        let limit = Duration::from_secs(20);
        assert!(!readable(signals.stop(), Duration::ZERO) && !readable(signals.report(), Duration::ZERO));
        assert!(!signals.take_report());
        for _ in 0..2 {
            kill_process(getpid(), Signal::USR1).unwrap();
            assert!(readable(signals.report(), limit));
            assert!(signals.take_report());
        }
        kill_process(getpid(), Signal::HUP).unwrap();
        assert!(readable(signals.refresh(), limit) && signals.take_refresh() && !signals.take_refresh());
        assert!(!readable(signals.stop(), Duration::ZERO) && !signals.take_report());

        kill_process(getpid(), Signal::TERM).unwrap();
        assert!(readable(signals.stop(), limit));
        kill_process(getpid(), Signal::INT).unwrap();
        assert!(readable(signals.stop(), Duration::ZERO));
    }
}
