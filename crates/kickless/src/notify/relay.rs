//! Passes messages of the process that serves on to the service manager.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread;
use std::time::Duration;
use std::{io, str};

use anyhow::{Context, Result};
use rustix::io::{Errno, read};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::manager::Notify;

/// The longest message: a status of some words, and a few assignments.
const MESSAGE_BYTES_MAX: usize = 512;
/// The time until a message is tried again that the service manager did not take.
const RETRY: Duration = Duration::from_secs(1);

/// The end of the pair for the process that serves.
pub(crate) struct Messages(OwnedFd);

impl Messages {
    /// Returns the end of the pair.
    pub(super) fn into_fd(self) -> OwnedFd {
        self.0
    }
}

impl AsFd for Messages {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The end of the pair for the process that passes messages on, and the socket of the service manager.
pub(crate) struct Relay {
    from: OwnedFd,
    manager: Notify,
}

/// Makes the pair, if a service manager has started this process and takes messages.
///
/// # Errors
/// The service manager cannot be reached. The error is one sentence.
pub(crate) fn messages() -> Result<Option<(Messages, Relay)>> {
    let Some(manager) = Notify::connect()? else { return Ok(None) };
    let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let (to, from) = pair.context("no free descriptor")?;
    Ok(Some((Messages(to), Relay { from, manager })))
}

impl Relay {
    /// Returns the descriptors that other processes must not keep.
    pub(crate) fn fds(&self) -> [BorrowedFd<'_>; 2] {
        [self.from.as_fd(), self.manager.as_fd()]
    }

    /// Passes messages on, on a thread of its own, until the other end closes.
    ///
    /// # Errors
    /// The process cannot start a thread.
    pub(crate) fn start(self) -> io::Result<()> {
        thread::Builder::new().name("notify".into()).spawn(move || self.run()).map(drop)
    }

    fn run(self) {
        let mut buffer = [0; MESSAGE_BYTES_MAX];
        loop {
            let message = match read(&self.from, &mut buffer) {
                Ok(0) => return,
                Ok(len) => &buffer[..len],
                Err(Errno::INTR) => continue,
                Err(_) => return,
            };
            if is_allowed(message) {
                // A lost state would hold the unit in the one before.
                while self.manager.tell_again(message).is_err() {
                    thread::sleep(RETRY);
                }
            }
        }
    }
}

/// Returns whether a daemon may say this. The process that serves may be an attacker's.
fn is_allowed(message: &[u8]) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_allowed = |line: &str| match line.split_once('=') {
        Some(("READY" | "RELOADING" | "STOPPING" | "WATCHDOG", value)) => value == "1",
        Some(("MONOTONIC_USEC" | "WATCHDOG_USEC", value)) => is_number(value),
        Some(("STATUS", value)) => !value.chars().any(char::is_control),
        _ => false,
    };
    str::from_utf8(message).is_ok_and(|text| text.split('\n').all(is_allowed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_says_how_it_is_and_nothing_else() {
        for allowed in [
            "READY=1",
            "RELOADING=1\nMONOTONIC_USEC=12",
            "STOPPING=1\nSTATUS=ends",
            "STATUS=MAINPID=1",
            "WATCHDOG=1",
            "WATCHDOG_USEC=60000000",
        ] {
            assert!(is_allowed(allowed.as_bytes()), "{allowed}");
        }
        for refused in [
            "",
            "MAINPID=1",
            "READY=1\nMAINPID=1",
            "STATUS=x\n\nFDSTORE=1",
            "FDSTORE=1",
            "FDSTOREREMOVE=1\nFDNAME=kickless-device",
            "BARRIER=1",
            "WATCHDOG=trigger",
            "WATCHDOG_USEC=",
            "MONOTONIC_USEC=-1",
            "STATUS=\u{1b}[2J",
            "EXTEND_TIMEOUT_USEC=9",
            "READY=1\n",
        ] {
            assert!(!is_allowed(refused.as_bytes()), "{refused}");
        }
        assert!(!is_allowed(b"STATUS=\xff"));
    }
}
