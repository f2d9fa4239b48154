//! One wait for all that can happen.

use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

/// What became ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ready {
    /// The mailbox, or somebody used the waker.
    Mailbox,
    /// The engine may have completions.
    Engine,
    /// The driver kicked the source with this number.
    Kick(u32),
}

const MAILBOX: u64 = u64::MAX;
const ENGINE: u64 = u64::MAX - 1;
/// Events taken at once; more are left for the next wait.
const EVENTS: usize = 64;

/// The worker's epoll instance.
pub(crate) struct Waiter {
    epoll: OwnedFd,
    events: Vec<epoll::Event>,
}

impl Waiter {
    pub(crate) fn new(mailbox: BorrowedFd<'_>, engine: BorrowedFd<'_>) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, mailbox, EventData::new_u64(MAILBOX), EventFlags::IN)?;
        epoll::add(&epoll, engine, EventData::new_u64(ENGINE), EventFlags::IN)?;
        Ok(Self { epoll, events: Vec::with_capacity(EVENTS) })
    }

    /// Waits for kicks of `source` too. One that has come already counts.
    pub(crate) fn add(&self, kick: BorrowedFd<'_>, source: u32) -> io::Result<()> {
        // Edge-triggered: the descriptor is never read, and each kick is an event.
        Ok(epoll::add(&self.epoll, kick, EventData::new_u64(source.into()), EventFlags::IN | EventFlags::ET)?)
    }

    pub(crate) fn remove(&self, kick: BorrowedFd<'_>) {
        // It was added; a failure would leave events for a source that is gone, which are ignored.
        let _ = epoll::delete(&self.epoll, kick);
    }

    /// Waits until something is ready, but no longer than `timeout`.
    pub(crate) fn wait(&mut self, timeout: Option<Duration>) -> io::Result<impl Iterator<Item = Ready> + '_> {
        let timeout =
            timeout.map(|t| Timespec { tv_sec: t.as_secs() as i64, tv_nsec: t.subsec_nanos().into() });
        self.events.clear();
        match epoll::wait(&self.epoll, spare_capacity(&mut self.events), timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        Ok(self.events.iter().map(|event| match event.data.u64() {
            MAILBOX => Ready::Mailbox,
            ENGINE => Ready::Engine,
            source => Ready::Kick(source as u32),
        }))
    }
}
