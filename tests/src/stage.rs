//! A disk and the device behind it in one program, without threads of the device's: whoever measures the driver runs the
//! device itself.

use std::io;
use std::os::unix::net::UnixListener;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use anyhow::{Context as _, Result};
use kickless_blk::Blk;
use kickless_device::{Context, Executor, QueueTask, Stopped, TaskHandle, Update};
use kickless_disk::{Disk as Backing, DiskSpec};
use kickless_driver::{Disk, Options};
use kickless_io::{Engine, EngineKind, Waker};
use kickless_vhost::Server;
use tempfile::TempDir;

use crate::driver::Eventfd;

/// The queues of a device, as they come from its front-end.
struct Wings(Mutex<Sender<Box<dyn QueueTask>>>);

impl Executor for Wings {
    fn spawn(&self, task: Box<dyn QueueTask>) -> io::Result<Box<dyn TaskHandle>> {
        let stage = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        stage.send(task).map_err(|_| io::Error::other("nobody measures any more"))?;
        Ok(Box::new(Gone))
    }
}

/// A queue that is out of its front-end's reach.
struct Gone;

impl TaskHandle for Gone {
    fn update(&self, _: Update) -> Receiver<()> {
        let (done, receiver) = channel();
        let _ = done.send(());
        receiver
    }

    fn stop(&self) -> Receiver<Stopped> {
        let (done, receiver) = channel();
        let _ = done.send(Stopped { next_avail: 0, has_work: false, held: Vec::new() });
        receiver
    }
}

/// The device's end of the one queue of a disk that answers at once, as `null:SIZE` does.
pub struct Stage {
    task: Box<dyn QueueTask>,
    engine: Engine,
    waker: Waker,
}

/// Serves until it is dropped.
struct Serving {
    stop: Arc<Eventfd>,
    thread: Option<JoinHandle<()>>,
    _dir: TempDir,
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.stop.signal();
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// A disk and its device.
pub struct Pair {
    /// The driver's end. First, so that it leaves first.
    pub disk: Disk,
    /// The device's.
    pub stage: Stage,
    _serving: Serving,
}

impl Pair {
    /// A disk of `size` bytes; `options` says how to drive it, but for the socket.
    ///
    /// # Errors
    /// One of the two does not work.
    pub fn start(size: u64, options: Options) -> Result<Pair> {
        let dir = tempfile::Builder::new().prefix("kickless-").tempdir()?;
        let socket = dir.path().join("blk.sock");
        let listener = UnixListener::bind(&socket)?;
        let backing = Backing::open(&DiskSpec::Null(size), &kickless_disk::Options::default())?;
        let device = Blk::new(
            backing,
            kickless_blk::Options {
                serial: "stage".into(),
                queues_max: 1,
                queue_size_max: 1024,
                lock: false,
            },
        );
        let (sender, receiver) = channel();
        let server = Server::new(Arc::new(device), Arc::new(Wings(Mutex::new(sender))));
        let stop = Arc::new(Eventfd::new()?);
        let theirs = stop.clone();
        let thread = thread::Builder::new().name("stage".into()).spawn(move || {
            // Whatever it ends by, the driver sees the connection close.
            let _ = server.serve(&listener, std::os::fd::AsFd::as_fd(&*theirs));
        })?;
        let serving = Serving { stop, thread: Some(thread), _dir: dir };
        let disk = Disk::connect(Options { socket, queues: 1, ..options })?;
        let mut task = receiver.recv().context("no queue was started")?;
        let mut engine = Engine::open(EngineKind::Threads, 64)?;
        task.attach(&mut engine)?;
        task.vring().disarm();
        Ok(Pair { disk, stage: Stage { task, engine, waker: Waker::new()? }, _serving: serving })
    }
}

impl Stage {
    /// Serves reads of 4 KiB, up to so many. How many.
    pub fn poll(&mut self, reads: u32) -> u32 {
        // What a device may spend on a poll is counted in requests and blocks of data, and such a read is one of each.
        let budget = reads.saturating_mul(2);
        let mut context =
            Context { engine: &mut self.engine, task: 0, waker: &self.waker, far_side_due: true };
        self.task.poll(&mut context, budget).served
    }
}
