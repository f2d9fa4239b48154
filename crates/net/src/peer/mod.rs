//! The port of a card that is the front-end of another vhost-user-net back-end.
//!
//! A thread of the port connects, and carries frames between two queues and the rings that it shares with the
//! back-end. The rings of the card exchange frames with the queues as those of a loop port do. So a back-end
//! that does not answer, or breaks the rules, costs frames, and no worker waits for it.

mod link;
mod offload;
mod queues;

use kickless_io::Waker;
use link::{Link, Stop};
use queues::PeerQueues;
use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use tracing::Span;

/// The time to wait for the end of the thread. It may wait for a reply of the back-end, and ends then.
const END_WAIT_MAX: Duration = Duration::from_secs(2);

/// A port that is the front-end of a back-end.
#[derive(Debug)]
pub(crate) struct PeerPort {
    path: PathBuf,
    pub(crate) queues: Arc<PeerQueues>,
    running: Mutex<Option<Running>>,
}

/// The thread of a port.
#[derive(Debug)]
struct Running {
    stop: Stop,
    thread: JoinHandle<()>,
    /// Closed by the thread when it ends.
    ended: Receiver<()>,
}

impl Running {
    /// Waits until the thread has ended, up to [`END_WAIT_MAX`]. Returns whether it has.
    fn has_ended(&self) -> bool {
        self.ended.recv_timeout(END_WAIT_MAX) == Err(RecvTimeoutError::Disconnected)
    }
}

impl PeerPort {
    /// Makes a port to the back-end that listens on `path`.
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path, queues: Arc::default(), running: Mutex::default() }
    }

    fn running(&self) -> MutexGuard<'_, Option<Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the thread that keeps the port connected, unless it runs.
    ///
    /// # Errors
    /// The process cannot have another thread or descriptor, or the thread before still waits for a reply.
    pub(crate) fn start(&self) -> io::Result<()> {
        let mut running = self.running();
        match &*running {
            Some(present) if !present.stop.is_set() => return Ok(()),
            Some(before) if !before.has_ended() => {
                return Err(io::Error::other("its back-end has not answered yet"));
            }
            _ => {}
        }
        let (stop, frames) = (Stop::new()?, Waker::new()?);
        let (path, queues) = (self.path.clone(), self.queues.clone());
        let link = Link { path, queues, stop: stop.clone(), frames, span: Span::current() };
        let (ending, ended) = channel::<()>();
        let thread = thread::Builder::new().name("vhost-user".into()).spawn(move || {
            link.run();
            drop(ending);
        })?;
        *running = Some(Running { stop, thread, ended });
        Ok(())
    }

    /// Disconnects the port. A thread that waits for a reply of the back-end ends when the reply is late.
    pub(crate) fn end(&self) {
        let mut running = self.running();
        let Some(present) = running.take() else { return };
        present.stop.set();
        match present.has_ended() {
            // The thread does not panic. If it did, it would have ended as well.
            true => drop(present.thread.join()),
            false => *running = Some(present),
        }
    }
}

impl Drop for PeerPort {
    fn drop(&mut self) {
        self.end();
    }
}
