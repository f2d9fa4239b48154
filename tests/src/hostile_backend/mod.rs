//! Serves a disk in memory to our driver as a vhost-user-blk back-end, with the faults that a test's rules
//! name.

mod backend_state;
pub mod card;
mod chaos;
pub mod faults;
mod ring;
mod session;

use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result};
use kickless_driver::Error;
use kickless_spec::features::Features;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{SendFlags, send};
use tempfile::TempDir;

use crate::hostile_backend::backend_state::BackendState;
use crate::hostile_backend::faults::Rules;
use crate::hostile_backend::session::Session;

/// Time limit for steps that take a moment.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Runs `run` on a thread and returns its result. Turns a hang into a failure.
///
/// # Panics
/// `run` panics or does not return in time.
pub fn returns_in_time<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> T {
    returns_within(LIMIT, run)
}

/// Does the same with another limit.
///
/// # Panics
/// As for [`returns_in_time`].
#[allow(clippy::panic, reason = "a test fails by panicking")]
pub fn returns_within<T: Send + 'static>(limit: Duration, run: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = channel();
    let runner = thread::spawn(move || sender.send(run()));
    match receiver.recv_timeout(limit) {
        Ok(value) => value,
        Err(RecvTimeoutError::Timeout) => panic!("it hangs"),
        Err(RecvTimeoutError::Disconnected) => match runner.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(_) => panic!("nothing was returned"),
        },
    }
}

/// Returns an error and its causes as one line, as a program prints it.
pub fn with_causes(error: &Error) -> String {
    let mut text = error.to_string();
    let mut next = std::error::Error::source(error);
    while let Some(error) = next {
        text = format!("{text}: {error}");
        next = error.source();
    }
    text
}

/// A back-end on a thread. Dropping it ends the thread.
pub struct HostileBackend {
    shared: Arc<BackendState>,
    thread: Option<JoinHandle<()>>,
    socket: PathBuf,
    _dir: TempDir,
}

impl HostileBackend {
    /// Listens, and serves one connection after the other.
    ///
    /// # Errors
    /// The socket cannot be created.
    pub fn start(rules: Rules) -> Result<HostileBackend> {
        let dir = tempfile::Builder::new().prefix("kickless-").tempdir()?;
        let socket = dir.path().join("backend.sock");
        let listener = UnixListener::bind(&socket)?;
        let shared = Arc::new(BackendState::new(rules)?);
        let theirs = shared.clone();
        let thread =
            thread::Builder::new().name("hostile".into()).spawn(move || serve(&theirs, &listener))?;
        Ok(HostileBackend { shared, thread: Some(thread), socket, _dir: dir })
    }

    /// Returns its socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns the rules. A test can change them at any time.
    pub fn rules(&self) -> MutexGuard<'_, Rules> {
        self.shared.rules()
    }

    /// Returns the bytes of the disk.
    pub fn disk(&self) -> MutexGuard<'_, Vec<u8>> {
        self.shared.disk()
    }

    /// Returns the features that the driver acknowledged last.
    pub fn acked(&self) -> Features {
        Features::from_bits_retain(self.shared.acked.load(Ordering::Acquire))
    }

    /// Returns the number of connections so far.
    pub fn connections(&self) -> u64 {
        self.shared.connections.load(Ordering::Acquire)
    }

    /// Returns the number of requests that it has taken out of the rings so far.
    pub fn requests(&self) -> u64 {
        self.shared.requests.load(Ordering::Acquire)
    }

    /// Returns the mistakes of the driver that it has noticed.
    pub fn faults(&self) -> Vec<String> {
        self.shared.faults().clone()
    }

    /// Returns the driver's descriptors of memory, kicks, calls and errors in this order.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn received_fds(&self) -> Result<Vec<OwnedFd>> {
        self.shared.received_fds().iter().map(|fd| Ok(fd.try_clone()?)).collect()
    }

    /// Sends bytes on the channel for the back-end's own requests.
    ///
    /// # Errors
    /// The channel does not exist, or the driver has closed it.
    pub fn send_on_channel(&self, bytes: &[u8]) -> Result<()> {
        let channel = self.shared.channel();
        let channel = channel.as_ref().context("no channel")?;
        let mut sent = 0;
        while sent < bytes.len() {
            sent += send(channel, &bytes[sent..], SendFlags::NOSIGNAL)?;
        }
        Ok(())
    }

    /// Closes the connection in any state. The back-end then accepts the next one.
    pub fn drop_connection(&self) {
        self.shared.leave.signal();
    }

    /// Closes the channel for the back-end's own requests.
    pub fn close_channel(&self) {
        *self.shared.channel() = None;
    }
}

impl Drop for HostileBackend {
    fn drop(&mut self) {
        self.shared.stop.signal();
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(thread::panicking() || !matches!(ended, Some(Err(_))), "the back-end panicked");
    }
}

fn serve(shared: &BackendState, listener: &UnixListener) {
    while ready(listener, shared) {
        let Ok((socket, _)) = listener.accept() else { continue };
        shared.connections.fetch_add(1, Ordering::Release);
        // An error is normal: a fault ends the connection, or the driver leaves.
        if let Err(end) = serve_one(shared, socket) {
            print_end(&end);
        }
        *shared.channel() = None;
    }
}

fn serve_one(shared: &BackendState, socket: UnixStream) -> Result<()> {
    Session::new(shared, socket)?.run()
}

/// Prints the end of a connection. The test harness shows it if the test fails.
fn print_end(end: &anyhow::Error) {
    eprintln!("the back-end ends a connection: {end:#}");
}

/// Waits for a connection. Returns `false` if the back-end is to stop.
fn ready(listener: &UnixListener, shared: &BackendState) -> bool {
    loop {
        let mut fds = [PollFd::new(listener, PollFlags::IN), PollFd::new(&shared.stop, PollFlags::IN)];
        match poll(&mut fds, None) {
            Err(rustix::io::Errno::INTR) => {}
            Ok(_) if fds[1].revents().is_empty() => return true,
            _ => return false,
        }
    }
}
