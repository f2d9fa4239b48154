//! What may happen on a connection besides the rings: it closes, the back-end reports an error, or has something to say.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll::{CreateFlags, Event as Ready, EventData, EventFlags, add, create, wait};

use crate::error::Error;
use crate::event::Event;

/// One descriptor for all of it, which sleepers watch beside their queue.
#[derive(Debug)]
pub(crate) struct Control {
    epoll: OwnedFd,
    /// The back-end signals it when it cannot read a ring.
    pub(crate) error: Event,
}

/// What has happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ConnectionEvents {
    pub(crate) closed: bool,
    pub(crate) message: bool,
    pub(crate) error: bool,
}

const SOCKET: u64 = 0;
const REQUESTS: u64 = 1;
const ERROR: u64 = 2;

impl Control {
    pub(crate) fn new() -> Result<Self, Error> {
        let epoll = create(CreateFlags::CLOEXEC).map_err(Error::os("epoll"))?;
        let error = Event::new()?;
        add(&epoll, &error, EventData::new_u64(ERROR), EventFlags::IN).map_err(Error::os("epoll"))?;
        Ok(Self { epoll, error })
    }

    /// Watches a connection, until its sockets are closed. What comes on the first is a reply that somebody waits for, so
    /// only its end is looked for.
    pub(crate) fn watch(
        &self,
        socket: BorrowedFd<'_>,
        requests: Option<BorrowedFd<'_>>,
    ) -> Result<(), Error> {
        let closed = EventFlags::RDHUP | EventFlags::HUP;
        add(&self.epoll, socket, EventData::new_u64(SOCKET), closed).map_err(Error::os("epoll"))?;
        if let Some(requests) = requests {
            let tag = EventData::new_u64(REQUESTS);
            add(&self.epoll, requests, tag, EventFlags::IN).map_err(Error::os("epoll"))?;
        }
        Ok(())
    }

    /// What has happened since it was last dealt with.
    pub(crate) fn poll_events(&self) -> ConnectionEvents {
        let mut events = [Ready { flags: EventFlags::empty(), data: EventData::new_u64(0) }; 4];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut happened = ConnectionEvents::default();
        // An error can only be a signal that interrupts, and then the next look tells.
        let count = wait(&self.epoll, &mut events, Some(&now)).unwrap_or_default();
        for event in events.iter().take(count) {
            match event.data.u64() {
                SOCKET => happened.closed = true,
                REQUESTS => happened.message = true,
                _ => happened.error = true,
            }
        }
        happened
    }
}

impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
