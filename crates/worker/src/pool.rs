//! A pool of workers.

use crate::event_loop::EventLoop;
use crate::mailbox::{Item, Key, Mailbox};
use crate::poll::Poll;
use kickless_device::{Place, Placed, Source, Stopped, Update};
use kickless_io::{Engine, EngineKind, Waker};
use rustix::thread::{CpuSet, sched_setaffinity};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use tracing::{error, info, warn};

/// How a pool is made.
#[derive(Clone, Debug)]
pub struct Options {
    /// Worker threads; at least 1.
    pub workers: usize,
    /// The engine that each of them has.
    pub engine: EngineKind,
    /// Operations that an engine can have in flight.
    pub depth: u32,
    /// CPUs to run on, one worker on each in turn; empty: wherever the scheduler puts them.
    pub cpus: Vec<usize>,
    /// When rings are looked at without kicks.
    pub poll: Poll,
}

/// A fixed number of workers. Dropping it stops all sources, waits for what is in flight and ends the threads.
pub struct Pool {
    workers: Vec<Worker>,
    /// Counts sources ever put, which also spreads them over the workers.
    keys: AtomicU64,
}

struct Worker {
    mailbox: Arc<Mailbox>,
    thread: Option<JoinHandle<()>>,
}

impl Pool {
    /// Starts the workers and waits until each has its engine.
    ///
    /// # Errors
    /// A thread, an engine or a CPU cannot be had.
    pub fn start(options: &Options) -> io::Result<Self> {
        let mut workers = Vec::with_capacity(options.workers);
        for n in 0..options.workers.max(1) {
            let cpu = (!options.cpus.is_empty()).then(|| options.cpus[n % options.cpus.len()]);
            workers.push(Worker::start(n, cpu, options)?);
        }
        Ok(Self { workers, keys: AtomicU64::new(0) })
    }
}

impl Worker {
    fn start(n: usize, cpu: Option<usize>, options: &Options) -> io::Result<Self> {
        let mailbox = Arc::new(Mailbox::new(Waker::new()?));
        let (started, start) = channel();
        let (kind, depth, poll, theirs) = (options.engine, options.depth, options.poll, mailbox.clone());
        // The engine is made on the thread that uses it: io_uring's single issuer is bound to it.
        let thread = std::thread::Builder::new().name(format!("worker {n}")).spawn(move || {
            let event_loop = pin(cpu).and_then(|()| {
                kickless_io::prepare_to_signal();
                let engine = Engine::open(kind, depth).map_err(io::Error::other)?;
                if n == 0 {
                    announce(&engine);
                }
                EventLoop::new(theirs, engine, poll)
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
            if let Err(error) = event_loop.run() {
                error!(worker = n, %error, "worker ended");
            }
        })?;
        let worker = Self { mailbox, thread: Some(thread) };
        start.recv().map_err(|_| io::Error::other("the worker ended before it began"))??;
        Ok(worker)
    }
}

fn pin(cpu: Option<usize>) -> io::Result<()> {
    let Some(cpu) = cpu else { return Ok(()) };
    if cpu >= CpuSet::MAX_CPU {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("there is no CPU {cpu}")));
    }
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set)
        .map_err(|e| io::Error::new(e.kind(), format!("cannot run on CPU {cpu}: {e}")))
}

fn announce(engine: &Engine) {
    match engine.reason() {
        Some(reason) => warn!(engine = engine.name(), %reason, "no better engine can be had"),
        None => info!(engine = engine.name(), "engine"),
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        for worker in &self.workers {
            worker.mailbox.put(Item::End);
        }
        for worker in &mut self.workers {
            if let Some(thread) = worker.thread.take()
                && thread.join().is_err()
            {
                error!("a worker panicked");
            }
        }
    }
}

impl Place for Pool {
    fn put(&self, source: Box<dyn Source>) -> io::Result<Box<dyn Placed>> {
        let key = self.keys.fetch_add(1, Ordering::Relaxed);
        let worker = &self.workers[(key % self.workers.len() as u64) as usize];
        if worker.thread.as_ref().is_none_or(JoinHandle::is_finished) {
            return Err(io::Error::other("the worker has ended"));
        }
        worker.mailbox.put(Item::Put(key, source));
        Ok(Box::new(Running { key, mailbox: worker.mailbox.clone() }))
    }
}

/// A source on a worker.
struct Running {
    key: Key,
    mailbox: Arc<Mailbox>,
}

impl Running {
    fn ask<T>(&self, item: impl FnOnce(Sender<T>) -> Item) -> Receiver<T> {
        let (done, answer) = channel();
        self.mailbox.put(item(done));
        answer
    }
}

impl Placed for Running {
    fn update(&self, update: Update) -> Receiver<()> {
        self.ask(|done| Item::Update(self.key, update, done))
    }

    fn stop(&self) -> Receiver<Stopped> {
        self.ask(|done| Item::Stop(self.key, done))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Of a source that has stopped the worker knows nothing any more, and ignores this.
        drop(self.stop());
    }
}
