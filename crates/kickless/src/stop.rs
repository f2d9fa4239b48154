//! SIGTERM and SIGINT, as a descriptor that becomes readable.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::low_level::pipe;

/// From now on the two signals no longer kill the process: the first of them makes the descriptor that is returned readable,
/// and it stays so.
///
/// # Errors
/// The process is out of descriptors.
pub(crate) fn on_signal() -> Result<OwnedFd> {
    let (stop, signalled) = UnixStream::pair().context("no descriptors are left to wait for signals with")?;
    for signal in [SIGTERM, SIGINT] {
        let signalled = signalled.try_clone().context("no descriptors are left to wait for signals with")?;
        pipe::register(signal, signalled).context("signals cannot be waited for")?;
    }
    Ok(stop.into())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::process::{Signal, getpid, kill_process};

    use super::*;

    fn readable(stop: &OwnedFd, within: Duration) -> bool {
        let timeout = Timespec { tv_sec: within.as_secs() as i64, tv_nsec: within.subsec_nanos().into() };
        poll(&mut [PollFd::new(stop, PollFlags::IN)], Some(&timeout)).unwrap() == 1
    }

    #[test]
    fn a_signal_makes_it_readable_for_good() {
        let stop = on_signal().unwrap();
        assert!(!readable(&stop, Duration::ZERO));
        kill_process(getpid(), Signal::TERM).unwrap();
        assert!(readable(&stop, Duration::from_secs(5)));
        kill_process(getpid(), Signal::INT).unwrap();
        assert!(readable(&stop, Duration::ZERO));
    }
}
