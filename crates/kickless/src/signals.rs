//! Signals, as descriptors that become readable: SIGTERM and SIGINT end the program, SIGUSR1 asks it what it has counted,
//! SIGHUP has it look whether disks have grown.

use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use anyhow::{Context, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGXFSZ};
use signal_hook::flag;
use signal_hook::low_level::pipe;

/// The signals that are waited for. None of them kills the process any more.
#[derive(Debug)]
pub(crate) struct Signals {
    stop: UnixStream,
    report: UnixStream,
    look: UnixStream,
}

impl Signals {
    /// From now on signals are waited for.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub(crate) fn catch() -> Result<Self> {
        // A file that may not grow (RLIMIT_FSIZE), be it the log's or an image: the write fails, and the process goes on.
        flag::register(SIGXFSZ, Arc::default()).context("signals cannot be caught")?;
        let (stop, stopping) = pair()?;
        for signal in [SIGTERM, SIGINT] {
            watch(signal, &stopping)?;
        }
        let (report, reporting) = pair()?;
        watch(SIGUSR1, &reporting)?;
        let (look, looking) = pair()?;
        watch(SIGHUP, &looking)?;
        Ok(Self { stop, report, look })
    }

    /// Readable, and for good, once the program is to end.
    pub(crate) fn stop(&self) -> BorrowedFd<'_> {
        self.stop.as_fd()
    }

    /// Readable once somebody asks for the counters, until [`Signals::take_report`].
    pub(crate) fn report(&self) -> BorrowedFd<'_> {
        self.report.as_fd()
    }

    /// Whether somebody has asked for the counters, once or more often.
    pub(crate) fn take_report(&self) -> bool {
        take(&self.report)
    }

    /// Readable once somebody says that disks may have changed, until [`Signals::take_look`].
    pub(crate) fn look(&self) -> BorrowedFd<'_> {
        self.look.as_fd()
    }

    /// Whether somebody has said so, once or more often.
    pub(crate) fn take_look(&self) -> bool {
        take(&self.look)
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
    let (ours, theirs) = UnixStream::pair().context("no descriptors are left to wait for signals with")?;
    for end in [&ours, &theirs] {
        end.set_nonblocking(true).context("signals cannot be waited for")?;
    }
    Ok((ours, theirs))
}

fn watch(signal: i32, with: &UnixStream) -> Result<()> {
    let with = with.try_clone().context("no descriptors are left to wait for signals with")?;
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

    // One test: the signals are the process's.
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
        assert!(readable(signals.look(), limit) && signals.take_look() && !signals.take_look());
        assert!(!readable(signals.stop(), Duration::ZERO) && !signals.take_report());

        kill_process(getpid(), Signal::TERM).unwrap();
        assert!(readable(signals.stop(), limit));
        kill_process(getpid(), Signal::INT).unwrap();
        assert!(readable(signals.stop(), Duration::ZERO));
    }
}
