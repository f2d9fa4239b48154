//! Tasks that do no I/O of their own, and the drivers of their rings.
#![allow(dead_code, reason = "no test needs all of it")]

use kickless_device::{
    Areas, Call, Context, Counters, Direction, Executor, Kick, Next, Polled, QueueTask, Stopped, Traffic,
    Vring, VringParts,
};
use kickless_io::{Engine, EngineKind, EngineOptions};
use kickless_memory::{Gpa, UserAddr, View};
use kickless_spec::ring::event_passed;
use kickless_testing::{guest_memory, vring_parts};
use kickless_virtqueue::device::{Addresses, Options};
use kickless_virtqueue::{Chain, ChainId};
use kickless_worker::{Poll, WorkerPool};
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The time after which a test that hangs fails.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);
pub(crate) const USER: u64 = 0x10_0000;
pub(crate) const AVAIL: u64 = 0x1000;
pub(crate) const USED: u64 = 0x2000;
pub(crate) const SIZE: u16 = 256;

/// The driver's end of a ring whose descriptors are all one empty chain each.
pub(crate) struct Driver {
    pub(crate) view: Arc<View>,
    pub(crate) avail: u16,
    pub(crate) kick: OwnedFd,
    pub(crate) call: OwnedFd,
    pub(crate) counters: Arc<Counters>,
}

impl Driver {
    pub(crate) fn new() -> (Self, Vring) {
        let view = guest_memory(1 << 20, USER);
        let kick = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let call = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let driver = Self { view, avail: 0, kick, call, counters: Arc::default() };
        let vring = driver.ring(Stopped { next_avail: 0, has_work: false, left: 0, unpublished: Vec::new() });
        (driver, vring)
    }

    /// Returns the addresses of the ring.
    pub(crate) fn areas() -> Areas {
        Areas::User(Addresses {
            desc: UserAddr(USER),
            avail: UserAddr(USER + AVAIL),
            used: UserAddr(USER + USED),
            log: None,
        })
    }

    /// Makes the ring anew, as it continues after this stop.
    pub(crate) fn ring(&self, Stopped { next_avail, unpublished, .. }: Stopped) -> Vring {
        Vring::new(VringParts {
            next_avail,
            unpublished,
            kick: Some(Kick::new(self.kick.try_clone().unwrap()).unwrap()),
            call: Some(Call::new(self.call.try_clone().unwrap()).unwrap()),
            counters: self.counters.clone(),
            ..vring_parts(&self.view, Options::new(SIZE, true, false).unwrap(), Self::areas())
        })
        .unwrap()
    }

    pub(crate) fn submit(&mut self, count: u16) {
        for _ in 0..count {
            let head = self.avail % SIZE;
            self.view.map().write(Gpa(AVAIL + 4 + 2 * u64::from(head)), &head.to_le_bytes()).unwrap();
            self.avail = self.avail.wrapping_add(1);
        }
        self.view.map().write(Gpa(AVAIL + 2), &self.avail.to_le_bytes()).unwrap();
    }

    pub(crate) fn kick(&self) {
        rustix::io::write(&self.kick, &1u64.to_ne_bytes()).unwrap();
    }

    /// Submits one chain, and kicks if the device asks for it.
    pub(crate) fn submit_and_kick_if_asked(&mut self) -> bool {
        let old = self.avail;
        self.submit(1);
        fence(Ordering::SeqCst);
        let mut event = [0; 2];
        self.view.read(Gpa(USED + 4 + 8 * u64::from(SIZE)), &mut event).unwrap();
        let asked = event_passed(u16::from_le_bytes(event), self.avail, old);
        if asked {
            self.kick();
        }
        asked
    }

    /// Sets the event index of calls.
    pub(crate) fn ask_for_a_call(&self, after: u16) {
        self.view.map().write(Gpa(AVAIL + 4 + 2 * u64::from(SIZE)), &after.to_le_bytes()).unwrap();
    }

    pub(crate) fn used(&self) -> u16 {
        let mut idx = [0; 2];
        self.view.read(Gpa(USED + 2), &mut idx).unwrap();
        u16::from_le_bytes(idx)
    }
}

/// The part of a task that its test sees.
#[derive(Default)]
pub(crate) struct Seen {
    /// The number of polls that came while a test had the lock that releases requests. Its worker goes no
    /// further then.
    pub(crate) kept: AtomicU32,
    /// The number of held chains that the task keeps until an operator acts.
    pub(crate) keeps: AtomicU32,
    pub(crate) attached: AtomicU32,
    pub(crate) detached: AtomicU32,
    pub(crate) memory_changed: AtomicU32,
    pub(crate) dropped: AtomicU32,
}

/// A task that pops everything and pushes it at once, or holds it until it is released.
pub(crate) struct Echo {
    vring: Vring,
    chain: Chain,
    held: Vec<ChainId>,
    hold: bool,
    /// The result of a poll while the task holds chains.
    holding: Next,
    pub(crate) release: Arc<Mutex<bool>>,
    pub(crate) seen: Arc<Seen>,
    /// A message for each batch that was popped.
    pub(crate) popped: Sender<u32>,
}

impl QueueTask for Echo {
    fn vring(&mut self) -> &mut Vring {
        &mut self.vring
    }

    fn attach(&mut self, _: &mut Engine) -> io::Result<()> {
        self.seen.attached.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn detach(&mut self, _: &mut Engine) {
        assert_eq!(self.held.len(), self.kept(), "detached with requests in flight");
        self.seen.detached.fetch_add(1, Ordering::SeqCst);
    }

    fn poll(&mut self, _: &mut Context<'_>, budget: u32) -> Polled {
        let release = *self.release.try_lock().unwrap_or_else(|_| {
            self.seen.kept.fetch_add(1, Ordering::SeqCst);
            self.release.lock().unwrap()
        });
        if release {
            self.held.drain(..).for_each(|id| self.vring.push(id, 0));
        }
        let held_ns = self.vring.held_ns();
        let mut served = 0;
        while served < budget && held_ns.is_none() && self.vring.pop(&mut self.chain) {
            self.vring.charge_request(Direction::Write, 512);
            served += 1;
            if self.hold {
                self.held.push(self.chain.id);
            } else {
                self.vring.push(self.chain.id, 0);
            }
        }
        self.vring.publish();
        if served > 0 {
            let _ = self.popped.send(served);
        }
        let next = match (self.held.is_empty(), served == budget && budget > 0) {
            (false, _) => self.holding,
            (true, true) => Next::More,
            (true, false) => match held_ns.filter(|_| self.vring.has_work()) {
                Some(wait_ns) => Next::Throttled { wait_ns },
                None => Next::Idle,
            },
        };
        Polled { served, cost: served, next }
    }

    fn in_flight(&self) -> usize {
        self.held.len()
    }

    fn kept(&self) -> usize {
        self.seen.keeps.load(Ordering::SeqCst) as usize
    }

    fn traffic(&self) -> Option<Traffic> {
        Some(Traffic::Requests)
    }

    fn memory_changed(&mut self) {
        self.seen.memory_changed.fetch_add(1, Ordering::SeqCst);
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.seen.dropped.fetch_add(1, Ordering::SeqCst);
    }
}

pub(crate) struct Fixture {
    pub(crate) driver: Driver,
    pub(crate) seen: Arc<Seen>,
    pub(crate) release: Arc<Mutex<bool>>,
    pub(crate) popped: Receiver<u32>,
}

pub(crate) fn task(hold: bool) -> (Fixture, Box<dyn QueueTask>) {
    task_that(hold, Next::Blocked)
}

pub(crate) fn task_that(hold: bool, holding: Next) -> (Fixture, Box<dyn QueueTask>) {
    let (driver, vring) = Driver::new();
    echo_over(driver, vring, hold, holding)
}

pub(crate) fn echo_over(
    driver: Driver,
    vring: Vring,
    hold: bool,
    holding: Next,
) -> (Fixture, Box<dyn QueueTask>) {
    let (seen, release) = (Arc::<Seen>::default(), Arc::new(Mutex::new(false)));
    let (sender, popped) = channel();
    let echo = Echo {
        vring,
        chain: Chain::default(),
        held: Vec::new(),
        hold,
        holding,
        release: release.clone(),
        seen: seen.clone(),
        popped: sender,
    };
    (Fixture { driver, seen, release, popped }, Box::new(echo))
}

pub(crate) fn options(workers: usize, poll: Poll) -> kickless_worker::Options {
    let engine = EngineOptions::new(EngineKind::Threads, 16);
    kickless_worker::Options { workers, engine, cpus: Vec::new(), poll }
}

pub(crate) fn start(options: &kickless_worker::Options) -> Arc<WorkerPool> {
    Arc::new(WorkerPool::start(options).unwrap())
}

/// Starts a pool. Returns its only executor, which owns the pool.
pub(crate) fn pool(workers: usize) -> Arc<dyn Executor> {
    start(&options(workers, Poll::default())).executor(1)
}

impl Fixture {
    pub(crate) fn wait_popped(&self, count: u32) {
        let mut left = count;
        while left > 0 {
            left -= self.popped.recv_timeout(DEADLINE).expect("the worker did not look");
        }
    }
}
