//! A pool of workers.

use crate::affinity::GroupHomes;
use crate::clock::Clock;
use crate::event_loop::EventLoop;
use crate::mailbox::{Holder, Mailbox, Placement, TaskKey, WorkItem};
use crate::peers::{Peer, Peers};
use crate::poll::Poll;
use crate::times::WorkerTimes;
use kickless_device::{Executor, Leave, Limiter, Position, QueueTask, Stopped, TaskHandle, Update};
use kickless_io::{Engine, EngineOptions, Waker};
use kickless_sync::Mutex;
use kickless_sync::mpsc::{Receiver, Sender, channel};
use rustix::thread::{CpuSet, sched_setaffinity};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;
use tracing::{error, info, warn};

/// The options of a pool.
#[derive(Clone, Debug)]
pub struct Options {
    /// The number of worker threads, at least 1.
    pub workers: usize,
    /// The engine of each worker.
    pub engine: EngineOptions,
    /// CPUs to run on, one worker on each in turn. If empty, the kernel chooses.
    pub cpus: Vec<usize>,
    /// The rule for polling rings without kicks.
    pub poll: Poll,
}

/// A fixed number of workers. Dropping the pool stops all tasks, waits for their requests in flight and ends
/// the threads.
pub struct WorkerPool {
    peers: Arc<Peers>,
    threads: Vec<JoinHandle<()>>,
    /// The number of tasks ever spawned, which also spreads them over the workers.
    keys: AtomicU64,
    /// The number of devices ever made.
    devices: AtomicU64,
    /// Signalled when a worker has ended without being asked to.
    failed: Waker,
    engine: EngineMade,
}

/// The engine that the workers have.
#[derive(Debug, Default)]
struct EngineMade {
    name: &'static str,
    /// The reason for which it is no better one.
    reason: Option<String>,
}

/// Signals `failed` when dropped, unless the worker has ended on request.
struct FailureGuard {
    failed: Waker,
    ended_on_request: bool,
}

impl Drop for FailureGuard {
    fn drop(&mut self) {
        if !self.ended_on_request {
            self.failed.wake();
        }
    }
}

impl WorkerPool {
    /// Starts the workers and waits until each has its engine.
    ///
    /// # Errors
    /// A thread, an engine or a CPU cannot be had.
    pub fn start(options: &Options) -> io::Result<Self> {
        let mailboxes = (0..options.workers.max(1))
            .map(|_| Ok(Arc::new(Mailbox::new(Waker::of_worker()?))))
            .collect::<io::Result<Vec<_>>>()?;
        let peers = Arc::new(Peers::new(Clock::start(), mailboxes));
        let mut pool = Self {
            peers,
            threads: Vec::new(),
            keys: AtomicU64::new(0),
            devices: AtomicU64::new(0),
            failed: Waker::new()?,
            engine: EngineMade::default(),
        };
        for worker_id in 0..pool.peers.workers.len() {
            let (thread, engine) = start_worker(&pool.peers, worker_id, options, pool.failed.clone())?;
            pool.threads.push(thread);
            pool.engine = engine;
        }
        Ok(pool)
    }

    /// Logs the engine of the workers. A caller does so when it serves, so that a start that fails says
    /// nothing but why.
    pub fn log_engine(&self) {
        let EngineMade { name, reason } = &self.engine;
        match reason {
            Some(reason) => warn!(engine = name, reason, "no better engine can be had"),
            None => info!(engine = name, "engine"),
        }
    }

    /// Makes an executor for a device. On a busy worker, the tasks of each device together get a share of the
    /// time that is proportional to `weight` (at least 1).
    pub fn executor(self: &Arc<Self>, weight: u32) -> Arc<dyn Executor> {
        self.limited_executor(weight, Arc::default())
    }

    /// Does the same as [`WorkerPool::executor`], for a device whose tasks keep the limits of `limiter`.
    /// Several devices can share a limiter.
    pub fn limited_executor(self: &Arc<Self>, weight: u32, limiter: Arc<Limiter>) -> Arc<dyn Executor> {
        let device = self.devices.fetch_add(1, Ordering::Relaxed);
        let weight = Arc::new(AtomicU32::new(weight));
        Arc::new(DeviceExecutor { pool: self.clone(), device, weight, limiter, homes: GroupHomes::default() })
    }

    /// Changes the polling rule of all present and future tasks. Does not wait. When a later
    /// [`WorkerPool::pass`] is answered, the rule is in force.
    pub fn request_poll(&self, poll: Poll) {
        for peer in &self.peers.workers {
            // A worker that has ended polls nothing.
            let _ = peer.mailbox.put(WorkItem::Poll(poll));
        }
    }

    /// Returns the clock that the workers and their tasks use.
    pub fn clock(&self) -> Clock {
        self.peers.clock
    }

    /// Returns the times of each worker. Waits for none of them.
    pub fn times(&self) -> Vec<WorkerTimes> {
        let now = self.peers.clock.now();
        self.peers.workers.iter().map(|peer| peer.times.read(now)).collect()
    }

    /// Asks each worker to answer after its present round. A later round finds everything that the caller did
    /// before. Does not wait. The receiver of a worker that has ended is disconnected.
    pub fn pass(&self) -> Vec<Receiver<()>> {
        let ask = |peer: &Peer| {
            let (done, answer) = channel();
            let _ = peer.mailbox.put(WorkItem::Pass(done));
            answer
        };
        self.peers.workers.iter().map(ask).collect()
    }

    /// Keeps a worker until the sender is dropped, as a file system can that never answers. For tests.
    #[cfg(debug_assertions)]
    #[doc(hidden)]
    pub fn block(&self, worker: usize) -> Sender<()> {
        let (until, blocked) = channel();
        if let Some(peer) = self.peers.workers.get(worker) {
            let _ = peer.mailbox.put(WorkItem::Block(blocked));
        }
        until
    }

    /// Returns a descriptor that becomes readable, and stays so, when a worker has ended without being asked
    /// to: by an error of the host, or by a panic. Its tasks are gone and their drivers get no more answers.
    /// Only a new process can serve them.
    pub fn failed(&self) -> BorrowedFd<'_> {
        self.failed.as_fd()
    }

    /// Moves all present tasks of one worker to another, each as soon as its requests in flight are done. No
    /// request is lost, and no other request waits. Balancing may move tasks back later. Workers are counted
    /// from 0. A number that is too large is ignored.
    pub fn move_all(&self, from: usize, to: usize) {
        if let Some(peer) = self.peers.workers.get(from) {
            // A worker that has ended has no tasks.
            let _ = peer.mailbox.put(WorkItem::MoveAll(to));
        }
    }
}

fn start_worker(
    peers: &Arc<Peers>,
    worker_id: usize,
    options: &Options,
    failed: Waker,
) -> io::Result<(JoinHandle<()>, EngineMade)> {
    let cpu = (!options.cpus.is_empty()).then(|| options.cpus[worker_id % options.cpus.len()]);
    let (started, start) = channel();
    let (peers, options) = (peers.clone(), options.clone());
    // The engine is made on the thread that uses it, because io_uring's single issuer is bound to its thread.
    let thread = std::thread::Builder::new().name(format!("worker {worker_id}")).spawn(move || {
        let event_loop = pin(cpu).and_then(|()| {
            kickless_io::prepare_to_signal();
            let engine = Engine::open_with(options.engine).map_err(io::Error::other)?;
            let reason = engine.reason().map(ToString::to_string);
            let made = EngineMade { name: engine.name(), reason };
            Ok((EventLoop::new(peers, worker_id, engine, options.poll)?, made))
        });
        let event_loop = match event_loop {
            Ok((event_loop, made)) => {
                let _ = started.send(Ok(made));
                event_loop
            }
            Err(error) => {
                let _ = started.send(Err(error));
                return;
            }
        };
        let mut guard = FailureGuard { failed, ended_on_request: false };
        match event_loop.run() {
            Ok(()) => guard.ended_on_request = true,
            Err(error) => error!(worker = worker_id, %error, "worker ended"),
        }
    })?;
    let engine = start.recv().map_err(|_| io::Error::other("the worker ended before it began"))??;
    Ok((thread, engine))
}

fn pin(cpu: Option<usize>) -> io::Result<()> {
    let Some(cpu) = cpu else { return Ok(()) };
    if cpu >= CpuSet::MAX_CPU {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("there is no CPU {cpu}")));
    }
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).map_err(|e| {
        io::Error::new(e.kind(), format!("cannot run on CPU {cpu}, which its cpuset may forbid: {e}"))
    })
}

impl Drop for WorkerPool {
    fn drop(&mut self) {
        for peer in &self.peers.workers {
            // A worker that has ended already does not need this.
            let _ = peer.mailbox.put(WorkItem::End);
        }
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                error!("a worker panicked");
            }
        }
    }
}

/// Runs the tasks of one device on a pool.
struct DeviceExecutor {
    pool: Arc<WorkerPool>,
    device: u64,
    weight: Arc<AtomicU32>,
    limiter: Arc<Limiter>,
    homes: GroupHomes,
}

impl Executor for DeviceExecutor {
    fn spawn(&self, task: Box<dyn QueueTask>) -> io::Result<Box<dyn TaskHandle>> {
        let (peers, key) = (&self.pool.peers, self.pool.keys.fetch_add(1, Ordering::Relaxed));
        let next = (key % peers.workers.len() as u64) as usize;
        let home = task.affinity().map(|group| self.homes.of(group, next));
        let worker_id = home.as_ref().map_or(next, |home| home.load(Ordering::Relaxed));
        let holder = Arc::new(Mutex::new(Holder::Worker(worker_id)));
        let (device, weight, limiter) = (self.device, self.weight.clone(), self.limiter.clone());
        let placement = Placement { device, weight, limiter, home, holder };
        let put = peers.put(&placement.holder, WorkItem::Spawn(key, placement.clone(), task));
        put.map_err(|_| io::Error::other("the worker has ended"))?;
        Ok(Box::new(RunningTask { key, peers: peers.clone(), placement }))
    }

    fn set_weight(&self, weight: u32) {
        // Tasks that start or move later read it. Those that run learn of it by the item.
        self.weight.store(weight, Ordering::Relaxed);
        for peer in &self.pool.peers.workers {
            let _ = peer.mailbox.put(WorkItem::Weight(self.device, weight));
        }
    }
}

/// The handle of a task on a worker.
struct RunningTask {
    key: TaskKey,
    peers: Arc<Peers>,
    placement: Placement,
}

impl RunningTask {
    fn send<T>(&self, item: impl FnOnce(Sender<T>) -> WorkItem) -> Receiver<T> {
        let (done, answer) = channel();
        // If the worker has ended, the receiver is disconnected.
        let _ = self.peers.put(&self.placement.holder, item(done));
        answer
    }
}

impl TaskHandle for RunningTask {
    fn update(&self, update: Update) -> Receiver<()> {
        self.send(|done| WorkItem::Update(self.key, update, done))
    }

    fn stop_leaving(&self, leave: Leave) -> Receiver<Stopped> {
        self.send(|done| WorkItem::Stop(self.key, leave, done))
    }

    fn park(&self) -> Receiver<Position> {
        self.send(|done| WorkItem::Park(self.key, done))
    }

    fn unpark(&self) {
        self.peers.unpark(self.key, &self.placement);
    }
}

impl Drop for RunningTask {
    fn drop(&mut self) {
        // The worker ignores this if the task has stopped already. A parked task is dropped with its handle.
        drop(self.stop_leaving(Leave::Failed));
    }
}
