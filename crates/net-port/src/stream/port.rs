//! The port, and its thread, which keeps it connected.

use super::connection::{Connection, StreamReceiver, StreamSender};
use crate::user::Passt;
use kickless_sync::lock;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// The time between two attempts to connect.
const RETRY: Duration = Duration::from_secs(1);
/// The longest time between two starts of a program that ends at once, as with an option that it does not
/// have.
const RESTART_MAX: Duration = Duration::from_secs(64);

/// A port over a stream socket.
#[derive(Debug)]
pub struct StreamPort {
    pub(super) connection: Arc<Connection>,
    peer: Peer,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// The other end of a port.
#[derive(Clone, Debug)]
enum Peer {
    /// A program that listens on this socket.
    Listener(PathBuf),
    /// A child of this program.
    Passt(Passt),
}

impl StreamPort {
    /// Makes a port that connects to the unix socket `path`, once it has started.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub fn to(path: &Path) -> io::Result<Self> {
        Self::new(Peer::Listener(path.to_owned()))
    }

    /// Makes a port with a `passt` process behind it, once it has started.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub fn to_passt(passt: Passt) -> io::Result<Self> {
        Self::new(Peer::Passt(passt))
    }

    fn new(peer: Peer) -> io::Result<Self> {
        Ok(Self { connection: Arc::new(Connection::new()?), peer, thread: Mutex::default() })
    }

    /// Starts the thread that keeps the port connected, unless it runs.
    ///
    /// # Errors
    /// The process cannot have another thread.
    pub fn start(&self) -> io::Result<()> {
        let mut thread = lock(&self.thread);
        if thread.is_none() {
            self.connection.set_ending(false);
            let (connection, peer) = (self.connection.clone(), self.peer.clone());
            *thread =
                Some(thread::Builder::new().name("stream".into()).spawn(move || peer.run(&connection))?);
        }
        Ok(())
    }

    /// Disconnects the port and ends its thread.
    pub fn end(&self) {
        let Some(thread) = lock(&self.thread).take() else { return };
        self.connection.set_ending(true);
        // The thread does not panic. If it did, the port would keep its connection.
        let _ = thread.join();
    }

    /// Returns the part that receives.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub fn receiver(&self) -> io::Result<StreamReceiver> {
        StreamReceiver::new(self.connection.clone())
    }

    /// Returns the part that sends.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub fn sender(&self) -> io::Result<StreamSender> {
        StreamSender::new(self.connection.clone())
    }
}

impl Drop for StreamPort {
    fn drop(&mut self) {
        self.end();
    }
}

impl Peer {
    /// Keeps the port connected until the thread is to end.
    fn run(&self, connection: &Connection) {
        let mut is_running = !connection.begin_taken_over() || self.keep_taken_over(connection);
        let mut pauses = Pauses::default();
        while is_running {
            let start = Instant::now();
            let pause;
            (is_running, pause) = match self {
                Self::Listener(path) => (keep_connected(path, connection), RETRY),
                Self::Passt(passt) => (keep_passt(passt, connection), pauses.after(start.elapsed())),
            };
            // Removing a socket cannot fail.
            let _ = connection.set(None);
            is_running = is_running && connection.pause(pause);
        }
    }

    /// Waits until a connection is lost that another process has made. Returns `false` if the thread is to
    /// end.
    fn keep_taken_over(&self, connection: &Connection) -> bool {
        connection.log_present_errors();
        let is_running = connection.wait_until_lost();
        // Removing a socket cannot fail.
        let _ = connection.set(None);
        // A child of another process, whose status is not known here.
        if let (Self::Passt(_), true) = (self, is_running) {
            warn!(parent: connection.span(), "passt has ended: its errors are in this log; it is started again");
        }
        is_running
    }
}

/// The pauses before a program is started again. They grow while it ends at once.
struct Pauses {
    next: Duration,
}

impl Default for Pauses {
    fn default() -> Self {
        Self { next: RETRY }
    }
}

impl Pauses {
    /// Returns the pause after a program that ran for this time.
    fn after(&mut self, ran: Duration) -> Duration {
        if ran >= RETRY {
            self.next = RETRY;
        }
        let pause = self.next;
        self.next = (2 * pause).min(RESTART_MAX);
        pause
    }
}

/// Connects the port, and waits until the connection is lost. Returns `false` if the thread is to end.
fn keep_connected(path: &Path, connection: &Connection) -> bool {
    match connect_to(path).and_then(|socket| connection.set(Some(socket))) {
        Ok(()) => info!(parent: connection.span(), path = %path.display(), "the port is connected"),
        Err(error) => {
            connection.warn("the port cannot connect, and tries again each second", &error);
            return true;
        }
    }
    connection.wait_until_lost()
}

/// Starts a child, and waits until it ends. Returns `false` if the thread is to end.
fn keep_passt(passt: &Passt, connection: &Connection) -> bool {
    let (child, socket, errors) = match passt.start() {
        Ok(started) => started,
        Err(error) => {
            connection.warn("passt cannot be started; this is tried again each second", &error);
            return true;
        }
    };
    connection.log_errors(errors);
    let is_running = match connection.set(Some(socket)) {
        Ok(()) => {
            info!(parent: connection.span(), pid = child.id(), "passt is running");
            connection.wait_until_lost()
        }
        Err(error) => {
            connection.warn("passt cannot be watched; this is tried again each second", &error);
            true
        }
    };
    // passt ends when its socket closes, which the port does first.
    let _ = connection.set(None);
    let status = child.end();
    if is_running {
        // Each start is a line, so each end may be one too.
        warn!(parent: connection.span(), %status, "passt has ended: its errors are in this log; it is started again");
    }
    is_running
}

/// Connects without waiting, which a listener with a full backlog could cause.
fn connect_to(path: &Path) -> io::Result<OwnedFd> {
    kickless_opener::connect(path).map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => io::Error::other("the listener accepts no connections"),
        _ => error,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_ends_at_once_is_started_ever_more_rarely() {
        let mut pauses = Pauses::default();
        let [short, long] = [10, 1000].map(Duration::from_millis);
        assert_eq!([long, long, short].map(|ran| pauses.after(ran).as_secs()), [1, 1, 2]);
        assert_eq!([short; 7].map(|ran| pauses.after(ran).as_secs()), [4, 8, 16, 32, 64, 64, 64]);
        assert_eq!([long, short].map(|ran| pauses.after(ran).as_secs()), [1, 2]);
    }
}
