//! Serves a disk in memory to our driver as a vhost-user-blk back-end, and lies about it as a test's rules say.

mod chaos;
pub mod lies;
mod ring;
mod session;
mod shared;

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

use crate::hostile_backend::lies::Rules;
use crate::hostile_backend::session::Session;
use crate::hostile_backend::shared::Shared;

/// Safety net for everything that takes a moment.
pub const LIMIT: Duration = Duration::from_secs(60);

/// What `run` returns. A test that hangs fails.
///
/// # Panics
/// It hangs, or panics itself.
#[allow(clippy::panic, reason = "a test fails by panicking")]
pub fn ends<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = channel();
    let runner = thread::spawn(move || sender.send(run()));
    match receiver.recv_timeout(LIMIT) {
        Ok(value) => value,
        Err(RecvTimeoutError::Timeout) => panic!("it hangs"),
        Err(RecvTimeoutError::Disconnected) => match runner.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(_) => panic!("nothing was returned"),
        },
    }
}

/// An error with all that it is caused by, as a program would print it.
pub fn whole(error: &Error) -> String {
    let mut text = error.to_string();
    let mut next = std::error::Error::source(error);
    while let Some(error) = next {
        text = format!("{text}: {error}");
        next = error.source();
    }
    text
}

/// A back-end on a thread, which ends when this is dropped.
pub struct HostileBackend {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    socket: PathBuf,
    _dir: TempDir,
}

impl HostileBackend {
    /// Listens, and serves one connection after the other.
    ///
    /// # Errors
    /// It cannot listen.
    pub fn start(rules: Rules) -> Result<HostileBackend> {
        let dir = tempfile::Builder::new().prefix("kickless-").tempdir()?;
        let socket = dir.path().join("backend.sock");
        let listener = UnixListener::bind(&socket)?;
        let shared = Arc::new(Shared::new(rules)?);
        let theirs = shared.clone();
        let thread =
            thread::Builder::new().name("hostile".into()).spawn(move || serve(&theirs, &listener))?;
        Ok(HostileBackend { shared, thread: Some(thread), socket, _dir: dir })
    }

    /// Where it listens.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// What it goes by; can be changed at any time.
    pub fn rules(&self) -> MutexGuard<'_, Rules> {
        self.shared.rules()
    }

    /// The bytes of its disk.
    pub fn disk(&self) -> MutexGuard<'_, Vec<u8>> {
        self.shared.disk()
    }

    /// The features that the driver acknowledged last.
    pub fn acked(&self) -> Features {
        Features::from_bits_retain(self.shared.acked.load(Ordering::Acquire))
    }

    /// Connections that were taken so far.
    pub fn connections(&self) -> u64 {
        self.shared.connections.load(Ordering::Acquire)
    }

    /// Requests that came out of the rings so far.
    pub fn requests(&self) -> u64 {
        self.shared.requests.load(Ordering::Acquire)
    }

    /// What the driver did that an honest one does not.
    pub fn faults(&self) -> Vec<String> {
        self.shared.faults().clone()
    }

    /// Descriptors of memory, kicks, calls and errors that the driver handed over, in this order.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn handed(&self) -> Result<Vec<OwnedFd>> {
        self.shared.handed().iter().map(|fd| Ok(fd.try_clone()?)).collect()
    }

    /// Sends bytes on the channel for its own requests.
    ///
    /// # Errors
    /// There is none, or the driver has closed it.
    pub fn say(&self, bytes: &[u8]) -> Result<()> {
        let channel = self.shared.channel();
        let channel = channel.as_ref().context("no channel")?;
        let mut sent = 0;
        while sent < bytes.len() {
            sent += send(channel, &bytes[sent..], SendFlags::NOSIGNAL)?;
        }
        Ok(())
    }

    /// Closes the connection, wherever it is. The next one is taken.
    pub fn drop_connection(&self) {
        self.shared.leave.signal();
    }

    /// Closes the channel for its own requests.
    pub fn hang_up(&self) {
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

fn serve(shared: &Shared, listener: &UnixListener) {
    while ready(listener, shared) {
        let Ok((socket, _)) = listener.accept() else { continue };
        shared.connections.fetch_add(1, Ordering::Release);
        // It ends as it is told to, or because the driver leaves.
        if let Err(end) = serve_one(shared, socket) {
            tracing(&end);
        }
        *shared.channel() = None;
    }
}

fn serve_one(shared: &Shared, socket: UnixStream) -> Result<()> {
    Session::new(shared, socket)?.run()
}

/// Shown by the test harness if the test fails.
fn tracing(end: &anyhow::Error) {
    eprintln!("the back-end ends a connection: {end:#}");
}

/// Waits for a connection; `false`: it is to end.
fn ready(listener: &UnixListener, shared: &Shared) -> bool {
    loop {
        let mut fds = [PollFd::new(listener, PollFlags::IN), PollFd::new(&shared.stop, PollFlags::IN)];
        match poll(&mut fds, None) {
            Err(rustix::io::Errno::INTR) => {}
            Ok(_) if fds[1].revents().is_empty() => return true,
            _ => return false,
        }
    }
}
