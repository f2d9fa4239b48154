//! Events on a connection besides the rings: it closes, the back-end reports an error, or sends a message.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll::{CreateFlags, Event as Ready, EventData, EventFlags, add, create, delete, wait};

use crate::error::Error;
use crate::event::Event;

/// One descriptor for all these events. Sleeping threads watch it beside their queue.
#[derive(Debug)]
pub(crate) struct Control {
    epoll: OwnedFd,
    /// The back-end signals it when it cannot read a ring.
    pub(crate) error: Event,
}

/// The events that have occurred.
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
        let epoll = create(CreateFlags::CLOEXEC).map_err(Error::os("an epoll descriptor"))?;
        let error = Event::new()?;
        add(&epoll, &error, EventData::new_u64(ERROR), EventFlags::IN)
            .map_err(Error::os("an epoll descriptor"))?;
        Ok(Self { epoll, error })
    }

    /// Watches a connection until [`Control::forget`].
    ///
    /// Data on the first socket are replies that another thread waits for. So only its end is an event.
    pub(crate) fn watch(
        &self,
        socket: BorrowedFd<'_>,
        requests: Option<BorrowedFd<'_>>,
    ) -> Result<(), Error> {
        let closed = EventFlags::RDHUP | EventFlags::HUP;
        add(&self.epoll, socket, EventData::new_u64(SOCKET), closed)
            .map_err(Error::os("an epoll descriptor"))?;
        if let Some(requests) = requests {
            let tag = EventData::new_u64(REQUESTS);
            add(&self.epoll, requests, tag, EventFlags::IN).map_err(Error::os("an epoll descriptor"))?;
        }
        Ok(())
    }

    /// Stops watching a socket. Closing it is not enough: a process that forks has a copy of it for a while,
    /// and its end would look like that of the next connection.
    pub(crate) fn forget(&self, socket: BorrowedFd<'_>) {
        // Fails only if the socket is not watched.
        let _ = delete(&self.epoll, socket);
    }

    /// Returns the events that are pending.
    pub(crate) fn poll_events(&self) -> ConnectionEvents {
        let mut events = [Ready { flags: EventFlags::empty(), data: EventData::new_u64(0) }; 4];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut happened = ConnectionEvents::default();
        // The only error is an interruption by a signal. The next call returns the events.
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
