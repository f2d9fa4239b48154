//! The state of the service, as the service manager shows it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;

use kickless_sync::lock;
use rustix::net::{SendFlags, send};
use rustix::time::{ClockId, clock_gettime};

use super::relay::Messages;

/// Tells the service manager about this process, if one wants to know. No function waits.
#[derive(Default)]
pub(crate) struct ServiceState {
    to: Option<OwnedFd>,
    said: Mutex<Said>,
}

#[derive(Default)]
struct Said {
    phase: Phase,
    status: String,
    /// The phase or the status has changed, and there was no room for the message.
    is_unsent: bool,
}

/// The phase of the service. The service manager knows the first one by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Phase {
    #[default]
    Starting,
    Ready,
    /// Since this time in microseconds on the clock of all processes.
    Reloading(u64),
    Stopping,
}

impl ServiceState {
    /// Makes the state of a process that starts.
    pub(crate) fn new(messages: Option<Messages>) -> Self {
        Self { to: messages.map(Messages::into_fd), said: Mutex::default() }
    }

    /// Returns whether a service manager gets messages.
    pub(crate) fn is_watched(&self) -> bool {
        self.to.is_some()
    }

    /// Tells that the daemon serves.
    pub(crate) fn ready(&self) {
        self.change(|said| said.phase = Phase::Ready);
    }

    /// Tells that the configuration file is being read.
    pub(crate) fn reloading(&self) {
        let now = clock_gettime(ClockId::Monotonic);
        let now_us = now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1000;
        self.change(|said| said.phase = Phase::Reloading(now_us));
    }

    /// Tells that the daemon ends.
    pub(crate) fn stopping(&self) {
        self.change(|said| {
            said.phase = Phase::Stopping;
            said.status = "Waits until requests in flight have completed".into();
        });
    }

    /// Changes the line that `systemctl status` shows.
    pub(crate) fn set_status(&self, status: String) {
        let mut said = lock(&self.said);
        if self.to.is_some() && said.phase == Phase::Ready && said.status != status {
            said.status = status;
            self.send_state(&mut said);
        }
    }

    /// Tells that the process works.
    pub(crate) fn feed(&self) {
        self.send("WATCHDOG=1");
    }

    /// Makes the service manager expect a sign of life within this time, whatever it has read from the unit
    /// since the process started that it told of it.
    pub(crate) fn set_interval(&self, us: u128) {
        self.send(&format!("WATCHDOG_USEC={us}"));
    }

    /// Returns the descriptor that is writable when [`ServiceState::try_again`] has something to do.
    pub(crate) fn has_unsent(&self) -> Option<BorrowedFd<'_>> {
        self.to.as_ref().filter(|_| lock(&self.said).is_unsent).map(AsFd::as_fd)
    }

    /// Sends the state if there was no room for it.
    pub(crate) fn try_again(&self) {
        let mut said = lock(&self.said);
        if said.is_unsent {
            self.send_state(&mut said);
        }
    }

    /// Changes the phase. The last one stays.
    fn change(&self, change: impl FnOnce(&mut Said)) {
        let mut said = lock(&self.said);
        if said.phase != Phase::Stopping {
            change(&mut said);
            self.send_state(&mut said);
        }
    }

    fn send_state(&self, said: &mut Said) {
        let phase = match said.phase {
            Phase::Starting => String::new(),
            Phase::Ready => "READY=1\n".into(),
            Phase::Reloading(us) => format!("RELOADING=1\nMONOTONIC_USEC={us}\n"),
            Phase::Stopping => "STOPPING=1\n".into(),
        };
        said.is_unsent = !self.send(&format!("{phase}STATUS={}", said.status));
    }

    /// Returns whether there was room, or nobody listens.
    fn send(&self, text: &str) -> bool {
        let Some(to) = &self.to else { return true };
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let sent = rustix::io::retry_on_intr(|| send(to, text.as_bytes(), flags));
        !matches!(sent, Err(rustix::io::Errno::AGAIN | rustix::io::Errno::NOBUFS))
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::{Errno, read};
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    fn pair() -> (ServiceState, OwnedFd) {
        let (to, from) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )
        .unwrap();
        (ServiceState { to: Some(to), ..ServiceState::default() }, from)
    }

    fn next(from: &OwnedFd) -> Option<String> {
        let mut buffer = [0; 512];
        match read(from, &mut buffer) {
            Ok(len) => Some(String::from_utf8(buffer[..len].to_vec()).unwrap()),
            Err(Errno::AGAIN) => None,
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn phases_are_told_in_their_order() {
        let (state, from) = pair();
        state.set_status("too early".into());
        state.ready();
        state.set_status("2 devices".into());
        state.set_status("2 devices".into());
        state.reloading();
        state.ready();
        state.stopping();
        state.ready();
        assert_eq!(next(&from).unwrap(), "READY=1\nSTATUS=");
        assert_eq!(next(&from).unwrap(), "READY=1\nSTATUS=2 devices");
        let reloading = next(&from).unwrap();
        assert!(reloading.starts_with("RELOADING=1\nMONOTONIC_USEC="), "{reloading}");
        assert_eq!(next(&from).unwrap(), "READY=1\nSTATUS=2 devices");
        assert!(next(&from).unwrap().starts_with("STOPPING=1\nSTATUS=Waits"));
        assert_eq!(next(&from), None);
    }

    #[test]
    fn a_manager_that_reads_nothing_holds_nobody_and_learns_the_last_state() {
        let (state, from) = pair();
        while state.has_unsent().is_none() {
            state.ready();
        }
        state.feed();
        state.stopping();
        assert!(state.has_unsent().is_some());
        while next(&from).is_some() {}
        state.try_again();
        assert!(state.has_unsent().is_none());
        assert!(next(&from).unwrap().starts_with("STOPPING=1\n"));
    }
}
