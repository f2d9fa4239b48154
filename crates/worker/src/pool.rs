//! A pool of workers.

use crate::affinity::Homes;
use crate::clock::{Clock, nanos};
use crate::event_loop::EventLoop;
use crate::mailbox::{Item, Key, Mailbox, Tenant};
use crate::peers::{Peer, Peers};
use crate::poll::Poll;
use kickless_device::{Executor, QueueTask, Stopped, TaskHandle, Update};
use kickless_io::{Engine, EngineOptions, Waker};
use kickless_sync::Mutex;
use kickless_sync::mpsc::{Receiver, Sender, channel};
use rustix::thread::{CpuSet, sched_setaffinity};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use tracing::{error, info, warn};

/// How a pool is made.
#[derive(Clone, Debug)]
pub struct Options {
    /// Worker threads; at least 1.
    pub workers: usize,
    /// The engine that each of them has.
    pub engine: EngineOptions,
    /// CPUs to run on, one worker on each in turn; empty: wherever the scheduler puts them.
    pub cpus: Vec<usize>,
    /// When rings are looked at without kicks.
    pub poll: Poll,
    /// How long a call to a driver may be put off, so that it tells of more than one batch; `None`: it is made with its batch.
    pub call_coalesce: Option<Duration>,
}

/// A fixed number of workers. Dropping it stops all tasks, waits for what is in flight and ends the threads.
pub struct Pool {
    peers: Arc<Peers>,
    threads: Vec<JoinHandle<()>>,
    /// Counts tasks ever spawned, which also spreads them over the workers.
    keys: AtomicU64,
    /// Counts devices.
    devices: AtomicU64,
    /// Signalled when a worker has ended by itself.
    failed: Waker,
}

/// Signals `failed` when it is dropped, unless the worker has ended as it was asked to.
struct Alive {
    failed: Waker,
    asked: bool,
}

impl Drop for Alive {
    fn drop(&mut self) {
        if !self.asked {
            self.failed.wake();
        }
    }
}

impl Pool {
    /// Starts the workers and waits until each has its engine.
    ///
    /// # Errors
    /// A thread, an engine or a CPU cannot be had.
    pub fn start(options: &Options) -> io::Result<Self> {
        let mailboxes = (0..options.workers.max(1))
            .map(|_| Ok(Arc::new(Mailbox::new(Waker::new()?))))
            .collect::<io::Result<Vec<_>>>()?;
        let peers = Arc::new(Peers::new(Clock::start(), mailboxes));
        let mut pool = Self {
            peers,
            threads: Vec::new(),
            keys: AtomicU64::new(0),
            devices: AtomicU64::new(0),
            failed: Waker::new()?,
        };
        for worker_id in 0..pool.peers.workers.len() {
            let thread = start_worker(&pool.peers, worker_id, options, pool.failed.clone())?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    /// A device's share of the pool: its tasks have as much of a crowded worker's time together as those of any other device, times
    /// `weight` (at least 1).
    pub fn executor(self: &Arc<Self>, weight: u32) -> Arc<dyn Executor> {
        let device = self.devices.fetch_add(1, Ordering::Relaxed);
        Arc::new(Share { pool: self.clone(), device, weight, homes: Homes::default() })
    }

    /// Changes when rings are polled, of all tasks that there are and that come; returns when it is in force.
    pub fn set_poll(&self, poll: Poll) {
        let ask = |peer: &Peer| {
            let (done, answer) = channel();
            peer.mailbox.put(Item::Poll(poll, done)).ok().map(|()| answer)
        };
        let answers: Vec<_> = self.peers.workers.iter().map(ask).collect();
        for answer in answers.into_iter().flatten() {
            // A worker that has ended polls nothing.
            let _ = answer.recv();
        }
    }

    /// Becomes readable, and stays so, when a worker has ended without being asked to: by an error of the host, or by a panic.
    /// Its tasks are gone, and their drivers wait for ever: only a new process can serve them.
    pub fn failed(&self) -> BorrowedFd<'_> {
        self.failed.as_fd()
    }

    /// Moves all tasks that are on one worker now to another, each as soon as what is in flight of it is done. Nothing is lost and
    /// nothing stops; the load may bring them back. Workers are counted from 0; those that there are not are ignored.
    pub fn move_all(&self, from: usize, to: usize) {
        if let Some(peer) = self.peers.workers.get(from) {
            // A worker that has ended has no tasks.
            let _ = peer.mailbox.put(Item::MoveAll(to));
        }
    }
}

fn start_worker(
    peers: &Arc<Peers>,
    worker_id: usize,
    options: &Options,
    failed: Waker,
) -> io::Result<JoinHandle<()>> {
    let cpu = (!options.cpus.is_empty()).then(|| options.cpus[worker_id % options.cpus.len()]);
    let (started, start) = channel();
    let (peers, options) = (peers.clone(), options.clone());
    // The engine is made on the thread that uses it: io_uring's single issuer is bound to it.
    let thread = std::thread::Builder::new().name(format!("worker {worker_id}")).spawn(move || {
        let event_loop = pin(cpu).and_then(|()| {
            kickless_io::prepare_to_signal();
            let engine = Engine::open_with(options.engine).map_err(io::Error::other)?;
            if worker_id == 0 {
                announce(&engine);
            }
            EventLoop::new(peers, worker_id, engine, options.poll, options.call_coalesce.map(nanos))
        });
        let event_loop = match event_loop {
            Ok(event_loop) => {
                let _ = started.send(Ok(()));
                event_loop
            }
            Err(error) => {
                let _ = started.send(Err(error));
                return;
            }
        };
        let mut alive = Alive { failed, asked: false };
        match event_loop.run() {
            Ok(()) => alive.asked = true,
            Err(error) => error!(worker = worker_id, %error, "worker ended"),
        }
    })?;
    start.recv().map_err(|_| io::Error::other("the worker ended before it began"))??;
    Ok(thread)
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

fn announce(engine: &Engine) {
    match engine.reason() {
        Some(reason) => warn!(engine = engine.name(), %reason, "no better engine can be had"),
        None => info!(engine = engine.name(), "engine"),
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        for peer in &self.peers.workers {
            // One that has ended already is asked in vain.
            let _ = peer.mailbox.put(Item::End);
        }
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                error!("a worker panicked");
            }
        }
    }
}

/// A device's share of a pool.
struct Share {
    pool: Arc<Pool>,
    device: u64,
    weight: u32,
    homes: Homes,
}

impl Executor for Share {
    fn spawn(&self, task: Box<dyn QueueTask>) -> io::Result<Box<dyn TaskHandle>> {
        let (peers, key) = (&self.pool.peers, self.pool.keys.fetch_add(1, Ordering::Relaxed));
        let next = (key % peers.workers.len() as u64) as usize;
        let home = task.affinity().map(|group| self.homes.of(group, next));
        let worker_id = home.as_ref().map_or(next, |home| home.load(Ordering::Relaxed));
        let worker_id = Arc::new(Mutex::new(worker_id));
        let tenant = Tenant { device: self.device, weight: self.weight, home, worker_id };
        let worker_id = tenant.worker_id.clone();
        let put = peers.put(&worker_id, Item::Spawn(key, tenant, task));
        put.map_err(|_| io::Error::other("the worker has ended"))?;
        Ok(Box::new(Running { key, peers: peers.clone(), worker_id }))
    }
}

/// A task on a worker.
struct Running {
    key: Key,
    peers: Arc<Peers>,
    worker_id: Arc<Mutex<usize>>,
}

impl Running {
    fn ask<T>(&self, item: impl FnOnce(Sender<T>) -> Item) -> Receiver<T> {
        let (done, answer) = channel();
        // From a worker that has ended there is no answer, which the receiver tells.
        let _ = self.peers.put(&self.worker_id, item(done));
        answer
    }
}

impl TaskHandle for Running {
    fn update(&self, update: Update) -> Receiver<()> {
        self.ask(|done| Item::Update(self.key, update, done))
    }

    fn stop(&self) -> Receiver<Stopped> {
        self.ask(|done| Item::Stop(self.key, done))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Of a task that has stopped the worker knows nothing any more, and ignores this.
        drop(self.stop());
    }
}
