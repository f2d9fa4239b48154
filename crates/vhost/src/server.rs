//! The server of a device, for one front-end after another.

use crate::Ended;
use crate::channel::Waits;
use crate::session::Session;
use crate::slot::Slot;
use crate::statistics::Statistics;
use crate::wait;
use crate::waiting_frontends::WaitingFrontends;
use kickless_device::{Device, Executor};
use kickless_memory::Mapper;
use kickless_sync::lock;
use kickless_vhost_user::Backend;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use tracing::{info, warn};

/// A server of one device. A front-end that connects while another is served waits, so two never share the
/// device.
pub struct Server {
    device: Arc<dyn Device>,
    executor: Arc<dyn Executor>,
    statistics: Arc<Statistics>,
    mapper: Mapper,
    visits: Arc<Visits>,
    /// The last session that opened the device could not close it.
    keeps_device: AtomicBool,
}

/// The front-ends of a server, one after another.
pub(crate) struct Visits {
    pub(crate) presence: Mutex<Presence>,
    /// The index at which each ring stopped last. It confirms the index that a front-end sends when it
    /// reconnects.
    pub(crate) stops: Mutex<Vec<Option<u16>>>,
    pub(crate) slot: Slot<Box<Session>>,
}

/// The presence of a front-end. It decides between a front-end that connects and [`Server::close_if_free`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Presence {
    Free,
    Connected,
    /// As `Connected`, and no front-end is served after this one.
    Last,
    Closed,
}

impl Server {
    /// Makes a server of this device, whose queues run in this executor.
    pub fn new(device: Arc<dyn Device>, executor: Arc<dyn Executor>) -> Self {
        let statistics = Arc::new(Statistics::new(&*device));
        let (presence, stops) = (Mutex::new(Presence::Free), Mutex::default());
        let visits = Arc::new(Visits { presence, stops, slot: Slot::new() });
        let (mapper, keeps_device) = (Mapper::default(), AtomicBool::new(false));
        Self { device, executor, statistics, mapper, visits, keeps_device }
    }

    /// Maps the memory that front-ends share with `mapper`, which may refuse it. The default maps everything.
    #[must_use]
    pub fn with_mapper(self, mapper: Mapper) -> Self {
        Self { mapper, ..self }
    }

    /// Returns the counters of the queues.
    pub fn statistics(&self) -> &Arc<Statistics> {
        &self.statistics
    }

    /// Returns whether a front-end is connected.
    pub fn is_connected(&self) -> bool {
        matches!(*lock(&self.visits.presence), Presence::Connected | Presence::Last)
    }

    /// Refuses all later front-ends, unless one is connected now. Returns whether none is. The caller then
    /// stops [`Server::serve`].
    pub fn close_if_free(&self) -> bool {
        let mut presence = lock(&self.visits.presence);
        if *presence == Presence::Free {
            *presence = Presence::Closed;
        }
        *presence == Presence::Closed
    }

    /// Refuses all later front-ends. Returns whether none is connected now. The caller then stops
    /// [`Server::serve`]. Otherwise it ends when the front-end leaves, unless [`Server::keep_open`] is called
    /// before.
    pub fn close_when_free(&self) -> bool {
        let mut presence = lock(&self.visits.presence);
        *presence = match *presence {
            Presence::Free | Presence::Closed => Presence::Closed,
            Presence::Connected | Presence::Last => Presence::Last,
        };
        *presence == Presence::Closed
    }

    /// Serves later front-ends again after [`Server::close_when_free`]. Returns `false` if it is too late for
    /// that.
    pub fn keep_open(&self) -> bool {
        let mut presence = lock(&self.visits.presence);
        if *presence == Presence::Last {
            *presence = Presence::Connected;
        }
        *presence != Presence::Closed
    }

    /// Returns whether the front-end that is connected is the last one.
    pub fn closes_when_free(&self) -> bool {
        *lock(&self.visits.presence) == Presence::Last
    }

    /// Returns whether the device keeps its resources although no session uses it, because it could not be
    /// closed.
    pub fn keeps_device(&self) -> bool {
        self.keeps_device.load(Ordering::Relaxed)
    }

    /// Returns whether no front-end is served any more.
    pub fn is_closed(&self) -> bool {
        *lock(&self.visits.presence) == Presence::Closed
    }

    /// Serves one connection after another until `stop` becomes readable, or until the last front-end leaves
    /// ([`Server::close_when_free`]).
    ///
    /// # Errors
    /// The listener fails, a worker has ended, or the device could not be closed at the end. A front-end's
    /// mistakes end its connection only.
    pub fn serve(&self, listener: &UnixListener, stop: BorrowedFd<'_>) -> Result<(), Ended> {
        let (mut session, _presence) = self.enter();
        listener.set_nonblocking(true).map_err(Ended::Host)?;
        loop {
            let next = match session.take() {
                Some(session) => Ok(session),
                None => match accept(listener, stop, self.visits.slot.asked()).map_err(Ended::Host)? {
                    Accepted::Connection(connection) => self.begin(connection),
                    Accepted::Asked => {
                        session = self.visits.slot.park(None);
                        continue;
                    }
                    Accepted::Stopped => return Ok(()),
                },
            };
            match next.and_then(|session| self.run(session, stop, Some(listener.as_fd()))) {
                Ok(()) => info!("front-end left"),
                Err(Ended::Stopped) => return Ok(()),
                Err(error @ Ended::Worker) => return Err(error),
                Err(error @ Ended::NotClosed(_)) if wait::is_readable(stop) => return Err(error),
                Err(error) => warn!(%error, "connection dropped"),
            }
            if self.is_closed() {
                return Ok(());
            }
            info!("the socket listens again");
        }
    }

    /// Serves one connection until its front-end leaves. No queue runs afterwards.
    ///
    /// # Errors
    /// The reason for any other end.
    pub fn serve_connection(&self, connection: UnixStream, stop: BorrowedFd<'_>) -> Result<(), Ended> {
        let (_, _presence) = self.enter();
        self.run(self.begin(connection)?, stop, None)
    }

    /// Serves the session that another process has given ([`Server::restore`]) until its front-end leaves.
    /// Does nothing if there is none.
    ///
    /// # Errors
    /// The reason for any other end.
    pub fn serve_restored(&self, stop: BorrowedFd<'_>) -> Result<(), Ended> {
        match self.enter() {
            (Some(session), _presence) => self.run(session, stop, None),
            (None, _) => Ok(()),
        }
    }

    /// Begins to serve on this thread. Waits while the server is parked. Returns the session to serve first.
    fn enter(&self) -> (Option<Box<Session>>, ThreadPresence<'_>) {
        (self.visits.slot.enter(), ThreadPresence(&self.visits.slot))
    }

    /// Begins a session.
    fn begin(&self, connection: UnixStream) -> Result<Box<Session>, Ended> {
        let mut presence = lock(&self.visits.presence);
        if *presence == Presence::Closed {
            return Err(Ended::Stopped);
        }
        *presence = Presence::Connected;
        drop(presence);
        info!("front-end connected");
        let mut session = self.new_session(Backend::new(connection));
        session.begin(&lock(&self.visits.stops));
        Ok(session)
    }

    /// Makes a session in which nothing is set.
    pub(crate) fn new_session(&self, backend: Backend) -> Box<Session> {
        let (device, executor) = (self.device.clone(), self.executor.clone());
        Box::new(Session::new(backend, device, executor, self.statistics.clone(), self.mapper.clone()))
    }

    fn run(
        &self,
        session: Box<Session>,
        stop: BorrowedFd<'_>,
        listener: Option<BorrowedFd<'_>>,
    ) -> Result<(), Ended> {
        let slot = &self.visits.slot;
        let waiting_frontends = WaitingFrontends::new(listener);
        let mut waits = Waits { stop, asked: slot.asked(), waiting_frontends };
        let (ended, after, has_closed) = session.run(&mut waits, slot);
        // The next front-end may need what this one had of the quota. At the end of the process, the kernel
        // unmaps everything.
        let unused = self.mapper.unused();
        while !unused.wait(wait::CHECK_INTERVAL) && !wait::is_readable(stop) {}
        *lock(&self.visits.stops) = after;
        // A session that did not open the device says nothing.
        if has_closed || matches!(ended, Err(Ended::NotClosed(_))) {
            self.keeps_device.store(!has_closed, Ordering::Relaxed);
        }
        let mut presence = lock(&self.visits.presence);
        *presence = if *presence == Presence::Last { Presence::Closed } else { Presence::Free };
        ended
    }

    pub(crate) fn queues_max(&self) -> u16 {
        self.device.queues_max()
    }

    pub(crate) fn visits(&self) -> &Arc<Visits> {
        &self.visits
    }
}

/// Tells that the thread of a server is there, until it is dropped.
struct ThreadPresence<'s>(&'s Slot<Box<Session>>);

impl Drop for ThreadPresence<'_> {
    fn drop(&mut self) {
        self.0.leave();
    }
}

/// The event for which a server without a session has waited.
enum Accepted {
    Connection(UnixStream),
    /// The server is asked to park.
    Asked,
    Stopped,
}

/// Waits for the next connection, or until `stop` or `asked` is readable.
fn accept(
    listener: &UnixListener,
    stop: BorrowedFd<'_>,
    asked: Option<BorrowedFd<'_>>,
) -> io::Result<Accepted> {
    loop {
        let readable = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let mut fds = [listener.as_fd(), stop, asked.unwrap_or(stop)].map(readable);
        match poll(&mut fds, None) {
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        }
        if !fds[1].revents().is_empty() {
            return Ok(Accepted::Stopped);
        }
        if !fds[2].revents().is_empty() {
            return Ok(Accepted::Asked);
        }
        // Another process has shut the socket down. It would be readable for ever, without a connection.
        if fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL) {
            return Err(io::Error::other("the socket no longer listens"));
        }
        // Another owner of the socket can have changed this, and a connection that it took would block this
        // thread.
        listener.set_nonblocking(true)?;
        match listener.accept() {
            Ok((connection, _)) => return Ok(Accepted::Connection(connection)),
            // The front-end has connected and left already.
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted
                ) => {}
            // The host lacks a resource. The front-end still waits a moment later.
            Err(error) if is_shortage(&error) => {
                warn!(%error, "no connection can be accepted at present");
                let moment = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
                let _ = poll(&mut [PollFd::from_borrowed_fd(stop, PollFlags::IN)], Some(&moment));
            }
            Err(error) => return Err(error),
        }
    }
}

fn is_shortage(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    matches!(errno, Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM))
}
