//! Connects a driver to a device in the same process. The device has no threads: a benchmark of the driver
//! polls the device itself.

use std::io;
use std::os::unix::net::UnixListener;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use anyhow::{Context as _, Result};
use kickless_blk::Blk;
use kickless_device::{Clock, Context, Executor, Leave, Position, QueueTask, Stopped, TaskHandle, Update};
use kickless_disk::{Disk as Backing, DiskSpec};
use kickless_driver::{Disk, Options};
use kickless_io::{Engine, EngineKind, Waker};
use kickless_vhost::Server;
use tempfile::TempDir;

use crate::driver::Eventfd;

/// An executor that sends the tasks to the benchmark.
struct TaskSender(Mutex<Sender<Box<dyn QueueTask>>>);

impl Executor for TaskSender {
    fn spawn(&self, task: Box<dyn QueueTask>) -> io::Result<Box<dyn TaskHandle>> {
        let sender = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sender.send(task).map_err(|_| io::Error::other("the benchmark has ended"))?;
        Ok(Box::new(DetachedHandle))
    }
}

/// The handle of a task that the front-end cannot reach any more.
struct DetachedHandle;

impl TaskHandle for DetachedHandle {
    fn update(&self, _: Update) -> Receiver<()> {
        let (done, receiver) = channel();
        let _ = done.send(());
        receiver
    }

    fn stop_leaving(&self, _: Leave) -> Receiver<Stopped> {
        let (done, receiver) = channel();
        let _ = done.send(Stopped { next_avail: 0, has_work: false, left: 0, unpublished: Vec::new() });
        receiver
    }

    fn park(&self) -> Receiver<Position> {
        channel().1
    }

    fn unpark(&self) {}
}

/// The device's end of the only queue. The disk answers at once, as `null:SIZE` does.
pub struct DeviceEnd {
    task: Box<dyn QueueTask>,
    engine: Engine,
    waker: Waker,
    clock: Clock,
    /// The end of the last poll that served a request. As in a worker, the next one begins then, so that each
    /// poll reads the clock once.
    now_ns: u64,
}

/// The thread of the vhost-user server. Dropping it stops the thread.
struct ServerThread {
    stop: Arc<Eventfd>,
    thread: Option<JoinHandle<()>>,
    _dir: TempDir,
}

impl Drop for ServerThread {
    fn drop(&mut self) {
        self.stop.signal();
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// A driver and its device.
pub struct DriverAndDevice {
    /// The driver's end. It is the first field, so that it is dropped first.
    pub disk: Disk,
    /// The device's end.
    pub device_end: DeviceEnd,
    _serving: ServerThread,
}

impl DriverAndDevice {
    /// Connects a driver to a disk of `size` bytes. `options` are the driver's; the socket is set here.
    ///
    /// # Errors
    /// The driver or the device cannot start.
    pub fn start(size: u64, options: Options) -> Result<DriverAndDevice> {
        let dir = tempfile::Builder::new().prefix("kickless-").tempdir()?;
        let socket = dir.path().join("blk.sock");
        let listener = UnixListener::bind(&socket)?;
        let backing = Backing::open(&DiskSpec::Null(size), &kickless_disk::Options::default())?;
        let device = Blk::new(
            backing,
            kickless_blk::Options {
                serial: "benchmark".into(),
                queues_max: 1,
                queue_size_max: 1024,
                lock: false,
            },
        );
        let (sender, receiver) = channel();
        let server = Server::new(Arc::new(device), Arc::new(TaskSender(Mutex::new(sender))));
        let stop = Arc::new(Eventfd::new()?);
        let stop_signal = stop.clone();
        let thread = thread::Builder::new().name("vhost-user".into()).spawn(move || {
            // An error needs no report, because it closes the driver's connection.
            let _ = server.serve(&listener, std::os::fd::AsFd::as_fd(&*stop_signal));
        })?;
        let serving = ServerThread { stop, thread: Some(thread), _dir: dir };
        let disk = Disk::connect(Options { socket, queues: 1, ..options })?;
        let mut task = receiver.recv().context("no queue was started")?;
        let mut engine = Engine::open(EngineKind::Threads, 64)?;
        task.attach(&mut engine)?;
        task.vring().disarm();
        Ok(DriverAndDevice {
            disk,
            device_end: DeviceEnd { task, engine, waker: Waker::new()?, clock: Clock::start(), now_ns: 0 },
            _serving: serving,
        })
    }
}

impl DeviceEnd {
    /// Serves reads of 4 KiB, at most `reads` of them. Returns their number.
    pub fn poll(&mut self, reads: u32) -> u32 {
        // The budget of a poll counts requests and blocks of data. Such a read counts as one of each.
        let budget = reads.saturating_mul(2);
        let Self { task, engine, waker, clock, now_ns } = self;
        let (clock, now) = (*clock, *now_ns);
        let mut context = Context {
            engine,
            task: 0,
            waker,
            far_side_due: true,
            clock,
            now_ns: now,
            served_others: 0,
            neighbours: None,
        };
        let served = task.poll(&mut context, budget).served;
        *now_ns = context.now_ns;
        served
    }
}
