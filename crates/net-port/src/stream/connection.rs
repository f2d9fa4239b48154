//! The present connection of a port, as its tasks and its thread share it.

use super::framing::{Deframer, Framer, LEN_BYTES, LEN_MAX};
use crate::user::log_errors;
use kickless_sync::lock;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, read, write};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::fmt::Display;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tracing::{Span, debug, warn};

/// Bytes that may wait for the peer when one more frame is accepted: as many as the longest frame has.
const WAITING_MAX: usize = LEN_BYTES + LEN_MAX;
/// The most reads for one frame in one turn. A peer that sends single bytes would keep a worker otherwise.
const READS_MAX: u32 = 16;
/// The time between two warnings about lost connections.
const WARNING_INTERVAL: Duration = Duration::from_mins(1);

/// The connection of a port. A task locks its direction for a turn. The thread of the port locks both when
/// connections come and go, and never waits with a lock held.
///
/// Lock order: the incoming direction, the outgoing one, the state.
#[derive(Debug)]
pub(super) struct Connection {
    incoming: Mutex<Direction<Deframer>>,
    outgoing: Mutex<Direction<Framer>>,
    state: Mutex<State>,
    changed: Condvar,
    /// The span of log lines about the card.
    span: Span,
}

#[derive(Debug)]
pub(super) struct Direction<Frames> {
    pub(super) socket: Option<Arc<OwnedFd>>,
    pub(super) frames: Frames,
    /// An epoll instance with the socket, and with `changed`.
    ready: OwnedFd,
    interest: EventFlags,
    /// An eventfd that wakes the task when the socket was replaced, and whether it is signalled.
    changed: OwnedFd,
    is_changed: bool,
}

#[derive(Debug, Default)]
pub(super) struct State {
    is_lost: bool,
    is_ending: bool,
    warned_at: Option<Instant>,
    /// The number of changes of the connection, and that number when the next process was given it.
    pub(super) changes: u64,
    pub(super) given: Option<u64>,
    /// Another process has made the connection, and the thread of the port has not begun with it.
    pub(super) is_taken_over: bool,
    /// The standard error of the program at the other end, which a thread logs.
    pub(super) errors: Option<Arc<OwnedFd>>,
}

impl<Frames: Default> Direction<Frames> {
    fn new(interest: EventFlags) -> io::Result<Self> {
        let ready = epoll::create(CreateFlags::CLOEXEC)?;
        let changed = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&ready, &changed, EventData::new_u64(0), EventFlags::IN)?;
        Ok(Self { socket: None, frames: Frames::default(), ready, interest, changed, is_changed: false })
    }

    /// Begins a turn of the task, which finds out now that the socket was replaced.
    fn begin(&mut self) {
        if std::mem::take(&mut self.is_changed) {
            // It is signalled, so the read cannot fail.
            let _ = read(&self.changed, &mut [0; 8]);
        }
    }

    fn set(&mut self, socket: Option<&Arc<OwnedFd>>) -> io::Result<()> {
        if let Some(socket) = self.socket.take() {
            // Removing a socket that was added cannot fail.
            let _ = epoll::delete(&self.ready, &*socket);
        }
        if let Some(socket) = socket {
            epoll::add(&self.ready, &**socket, EventData::new_u64(0), self.interest)?;
        }
        self.socket = socket.cloned();
        if !std::mem::replace(&mut self.is_changed, true) {
            // The counter is 0, so the write cannot fail.
            let _ = write(&self.changed, &1u64.to_ne_bytes());
        }
        Ok(())
    }
}

impl Connection {
    /// Makes a port without a connection.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            incoming: Mutex::new(Direction::new(EventFlags::IN)?),
            outgoing: Mutex::new(Direction::new(EventFlags::OUT)?),
            state: Mutex::default(),
            changed: Condvar::new(),
            span: Span::current(),
        })
    }

    /// Makes `socket` the connection. Without one, frames are dropped.
    ///
    /// # Errors
    /// The kernel has no memory to watch the socket. There is no connection then.
    pub(super) fn set(&self, socket: Option<OwnedFd>) -> io::Result<()> {
        let socket = socket.map(Arc::new);
        let (mut incoming, mut outgoing) = (lock(&self.incoming), lock(&self.outgoing));
        let mut state = lock(&self.state);
        (state.is_lost, state.is_taken_over) = (false, false);
        state.changes += 1;
        // A program that has lost its connection ends.
        state.errors = state.errors.take().filter(|_| socket.is_some());
        drop(state);
        incoming.frames.clear();
        outgoing.frames.clear();
        let set = incoming.set(socket.as_ref()).and_then(|()| outgoing.set(socket.as_ref()));
        set.or_else(|error| {
            incoming.set(None)?;
            outgoing.set(None)?;
            Err(error)
        })
    }

    /// Logs the errors of the program at the other end, until it ends.
    pub(super) fn log_errors(&self, errors: OwnedFd) {
        lock(&self.state).errors = Some(Arc::new(errors));
        self.log_present_errors();
    }

    /// Logs the errors of a program that another process has started.
    pub(super) fn log_present_errors(&self) {
        let Some(errors) = lock(&self.state).errors.clone() else { return };
        if let Err(error) = log_errors("passt", errors, self.span.clone()) {
            self.warn("the errors of passt cannot be logged", &error);
        }
    }

    /// Returns the number of changes of the connection.
    pub(super) fn changes(&self) -> u64 {
        lock(&self.state).changes
    }

    /// Looks at both directions and the state together.
    pub(super) fn with_directions<T>(
        &self,
        look: impl FnOnce(&mut Direction<Deframer>, &mut Direction<Framer>, &mut State) -> T,
    ) -> T {
        let (mut incoming, mut outgoing) = (lock(&self.incoming), lock(&self.outgoing));
        look(&mut incoming, &mut outgoing, &mut lock(&self.state))
    }

    /// Returns whether another process has made the connection, once.
    pub(super) fn begin_taken_over(&self) -> bool {
        std::mem::take(&mut lock(&self.state).is_taken_over)
    }

    /// Waits until the connection is lost. Returns `false` if the thread is to end.
    pub(super) fn wait_until_lost(&self) -> bool {
        let mut state = lock(&self.state);
        while !state.is_lost && !state.is_ending {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        !state.is_ending
    }

    /// Waits for this time. Returns `false` if the thread is to end.
    pub(super) fn pause(&self, time: Duration) -> bool {
        let state = lock(&self.state);
        let waited = self.changed.wait_timeout_while(state, time, |state| !state.is_ending);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        !state.is_ending
    }

    pub(super) fn set_ending(&self, is_ending: bool) {
        lock(&self.state).is_ending = is_ending;
        self.changed.notify_all();
    }

    pub(super) fn span(&self) -> &Span {
        &self.span
    }

    /// Logs a warning, at most one a minute. A peer can cause any number of them.
    pub(super) fn warn(&self, what: &str, error: &dyn Display) {
        let mut state = lock(&self.state);
        if state.warned_at.is_some_and(|at| at.elapsed() < WARNING_INTERVAL) {
            debug!(parent: &self.span, %error, "{what}");
            return;
        }
        state.warned_at = Some(Instant::now());
        drop(state);
        warn!(parent: &self.span, %error, "{what}");
    }

    /// Tells the thread of the port that the connection is lost, of which one direction has been closed.
    fn lost(&self, error: &dyn Display) {
        self.warn("the connection of the port is lost: frames are dropped until there is another", error);
        let mut state = lock(&self.state);
        state.is_lost = true;
        state.changes += 1;
        drop(state);
        self.changed.notify_all();
    }
}

/// The part of a port that receives, for one task.
#[derive(Debug)]
pub struct StreamReceiver {
    connection: Arc<Connection>,
    ready: OwnedFd,
}

/// The direction of received frames, for one turn.
#[derive(Debug)]
pub struct Incoming<'a> {
    connection: &'a Connection,
    direction: MutexGuard<'a, Direction<Deframer>>,
}

/// The result of looking for a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// There is a frame ([`Incoming::frame`]).
    Frame,
    /// There is none. The descriptor becomes readable.
    Nothing,
    /// There may be one in the next turn.
    More,
}

impl StreamReceiver {
    pub(super) fn new(connection: Arc<Connection>) -> io::Result<Self> {
        let ready = lock(&connection.incoming).ready.try_clone()?;
        Ok(Self { connection, ready })
    }

    /// Begins a turn.
    pub fn turn(&self) -> Incoming<'_> {
        let mut direction = lock(&self.connection.incoming);
        direction.begin();
        Incoming { connection: &self.connection, direction }
    }
}

impl AsFd for StreamReceiver {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ready.as_fd()
    }
}

impl Incoming<'_> {
    /// Looks for the next frame among the bytes that have come. Reads more of them only if `may_read`. Never
    /// waits.
    pub fn find(&mut self, may_read: bool) -> Received {
        for _ in 0..READS_MAX {
            match self.direction.frames.find() {
                Ok(true) => return Received::Frame,
                Ok(false) => {}
                Err(error) => return self.close(&error),
            }
            let Direction { socket: Some(socket), frames, .. } = &mut *self.direction else {
                return Received::Nothing;
            };
            if !may_read {
                return Received::Nothing;
            }
            match recv(&**socket, frames.space(), RecvFlags::DONTWAIT) {
                Ok((0, _)) => return self.close(&"the peer has closed it"),
                Ok((len, _)) => frames.filled(len),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Received::Nothing,
                Err(error) => return self.close(&error),
            }
        }
        Received::More
    }

    /// Returns the frame that was found, behind space for a virtio-net header. The caller may change the
    /// space, and the frame if it consumes it.
    pub fn frame(&mut self) -> &mut [u8] {
        self.direction.frames.frame()
    }

    /// Removes the frame that was found.
    pub fn consume(&mut self) {
        self.direction.frames.consume();
    }

    fn close(&mut self, error: &dyn Display) -> Received {
        self.direction.frames.clear();
        // Removing a socket cannot fail.
        let _ = self.direction.set(None);
        self.connection.lost(error);
        Received::Nothing
    }
}

/// The part of a port that sends, for one task.
#[derive(Debug)]
pub struct StreamSender {
    connection: Arc<Connection>,
    ready: OwnedFd,
}

/// The direction of sent frames, for one turn.
#[derive(Debug)]
pub struct Outgoing<'a> {
    connection: &'a Connection,
    direction: MutexGuard<'a, Direction<Framer>>,
}

impl StreamSender {
    pub(super) fn new(connection: Arc<Connection>) -> io::Result<Self> {
        let ready = lock(&connection.outgoing).ready.try_clone()?;
        Ok(Self { connection, ready })
    }

    /// Begins a turn.
    pub fn turn(&self) -> Outgoing<'_> {
        let mut direction = lock(&self.connection.outgoing);
        direction.begin();
        Outgoing { connection: &self.connection, direction }
    }
}

/// Returns a descriptor that is readable while the peer takes bytes.
impl AsFd for StreamSender {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ready.as_fd()
    }
}

impl Outgoing<'_> {
    /// Returns whether there is a connection.
    pub fn is_connected(&self) -> bool {
        self.direction.socket.is_some()
    }

    /// Returns whether another frame may be added. Without a connection it is dropped.
    pub fn has_room(&self) -> bool {
        self.direction.frames.rest().len() < WAITING_MAX
    }

    /// Returns whether frames wait for the peer.
    pub fn is_waiting(&self) -> bool {
        !self.direction.frames.rest().is_empty()
    }

    /// Adds a frame, which [`Outgoing::flush`] sends. Drops it if there is no connection.
    pub fn push(&mut self, frame: &[u8]) {
        if self.is_connected() {
            self.direction.frames.push(frame);
        }
    }

    /// Sends what waits, as much as the peer takes. Never waits.
    pub fn flush(&mut self) {
        loop {
            let Direction { socket: Some(socket), frames, .. } = &mut *self.direction else { return };
            if frames.rest().is_empty() {
                return;
            }
            match send(&**socket, frames.rest(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(len) => frames.taken(len),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(error) => {
                    self.direction.frames.clear();
                    // Removing a socket cannot fail.
                    let _ = self.direction.set(None);
                    self.connection.lost(&error);
                    return;
                }
            }
        }
    }
}
