//! A pool with sources that do no I/O of their own: who is called, when, and what is answered.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

use kickless_device::{Context, Kick, Next, Parts, Place, Polled, Source, Stopped, Update, Vring};
use kickless_io::{Completion, Engine, EngineKind};
use kickless_memory::{Gpa, Map, Slot, UserAddr};
use kickless_virtqueue::Chain;
use kickless_virtqueue::device::{Addresses, Options};
use kickless_worker::{Poll, Pool};
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Only a net for a test that hangs.
const DEADLINE: Duration = Duration::from_secs(60);
const USER: u64 = 0x10_0000;
const AVAIL: u64 = 0x1000;
const USED: u64 = 0x2000;
const SIZE: u16 = 256;

fn guest_map() -> Arc<Map> {
    let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 1 << 20).unwrap();
    Arc::new(Map::new(vec![Slot::map(&file, 0, Gpa(0), UserAddr(USER), 1 << 20).unwrap()]).unwrap())
}

/// The driver's end of a ring whose descriptors are all one empty chain each.
struct Driver {
    map: Arc<Map>,
    avail: u16,
    kick: OwnedFd,
}

impl Driver {
    fn new() -> (Self, Vring) {
        let map = guest_map();
        let kick = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let driver = Self { map, avail: 0, kick };
        let vring = driver.ring(Stopped { next_avail: 0, held: Vec::new() });
        (driver, vring)
    }

    /// The ring, as it goes on after this.
    fn ring(&self, Stopped { next_avail, held }: Stopped) -> Vring {
        Vring::new(Parts {
            index: 0,
            options: Options::new(SIZE, true, false).unwrap(),
            addresses: Addresses {
                desc: UserAddr(USER),
                avail: UserAddr(USER + AVAIL),
                used: UserAddr(USER + USED),
            },
            next_avail,
            held,
            map: self.map.clone(),
            kick: Some(Kick::new(self.kick.try_clone().unwrap()).unwrap()),
            call: None,
            err: None,
            counters: Arc::default(),
        })
        .unwrap()
    }

    fn submit(&mut self, count: u16) {
        for _ in 0..count {
            let head = self.avail % SIZE;
            self.map.write(Gpa(AVAIL + 4 + 2 * u64::from(head)), &head.to_le_bytes()).unwrap();
            self.avail = self.avail.wrapping_add(1);
        }
        self.map.write(Gpa(AVAIL + 2), &self.avail.to_le_bytes()).unwrap();
    }

    fn kick(&self) {
        rustix::io::write(&self.kick, &1u64.to_ne_bytes()).unwrap();
    }

    fn used(&self) -> u16 {
        let mut idx = [0; 2];
        self.map.read(Gpa(USED + 2), &mut idx).unwrap();
        u16::from_le_bytes(idx)
    }
}

/// What a test sees of its source.
#[derive(Default)]
struct Seen {
    attached: AtomicU32,
    detached: AtomicU32,
    memory_changed: AtomicU32,
    dropped: AtomicU32,
}

/// Pops everything and pushes it at once, or holds it back until it is told.
struct Echo {
    vring: Vring,
    chain: Chain,
    held: Vec<u16>,
    hold: bool,
    /// What it says while it holds something back.
    holding: Next,
    release: Arc<Mutex<bool>>,
    seen: Arc<Seen>,
    /// A message for each batch that was popped.
    popped: Sender<u32>,
}

impl Source for Echo {
    fn vring(&mut self) -> &mut Vring {
        &mut self.vring
    }

    fn attach(&mut self, _: &mut Engine) -> io::Result<()> {
        self.seen.attached.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn detach(&mut self, _: &mut Engine) {
        assert!(self.held.is_empty(), "detached with requests in flight");
        self.seen.detached.fetch_add(1, Ordering::SeqCst);
    }

    fn poll(&mut self, _: &mut Context<'_>, budget: u32) -> Polled {
        if *self.release.lock().unwrap() {
            self.held.drain(..).for_each(|head| self.vring.push(head, 0));
        }
        let mut served = 0;
        while served < budget && self.vring.pop(&mut self.chain) {
            served += 1;
            if self.hold {
                self.held.push(self.chain.head);
            } else {
                self.vring.push(self.chain.head, 0);
            }
        }
        self.vring.publish();
        if served > 0 {
            let _ = self.popped.send(served);
        }
        let next = match (self.held.is_empty(), served == budget && budget > 0) {
            (false, _) => self.holding,
            (true, true) => Next::More,
            (true, false) => Next::Idle,
        };
        Polled { served, cost: served, next }
    }

    fn complete(&mut self, _: &mut Context<'_>, completions: &mut Vec<Completion>) -> bool {
        completions.clear();
        false
    }

    fn in_flight(&self) -> usize {
        self.held.len()
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

struct Fixture {
    driver: Driver,
    seen: Arc<Seen>,
    release: Arc<Mutex<bool>>,
    popped: Receiver<u32>,
}

fn source(hold: bool) -> (Fixture, Box<dyn Source>) {
    source_that(hold, Next::Blocked)
}

fn source_that(hold: bool, holding: Next) -> (Fixture, Box<dyn Source>) {
    let (driver, vring) = Driver::new();
    echo_over(driver, vring, hold, holding)
}

fn echo_over(driver: Driver, vring: Vring, hold: bool, holding: Next) -> (Fixture, Box<dyn Source>) {
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

fn start(workers: usize, poll: Poll) -> Arc<Pool> {
    let engine = EngineKind::Threads;
    let options =
        kickless_worker::Options { workers, engine, depth: 16, cpus: Vec::new(), poll, call_coalesce: None };
    Arc::new(Pool::start(&options).unwrap())
}

/// The only one that holds on to its pool.
fn pool(workers: usize) -> Arc<dyn Place> {
    start(workers, Poll::default()).place(1)
}

impl Fixture {
    fn wait_popped(&self, count: u32) {
        let mut left = count;
        while left > 0 {
            left -= self.popped.recv_timeout(DEADLINE).expect("the worker did not look");
        }
    }
}

#[test]
fn a_ring_is_looked_at_once_without_a_kick() {
    let pool = pool(1);
    let (mut fixture, echo) = source(false);
    fixture.driver.submit(200);
    let placed = pool.put(echo).unwrap();
    fixture.wait_popped(200);
    let stopped = placed.stop().recv_timeout(DEADLINE).unwrap();
    assert_eq!(stopped, Stopped { next_avail: 200, held: Vec::new() });
    assert_eq!(fixture.driver.used(), 200);
    for count in [&fixture.seen.attached, &fixture.seen.detached, &fixture.seen.dropped] {
        assert_eq!(count.load(Ordering::SeqCst), 1);
    }
}

#[test]
fn every_kick_is_heard_whenever_it_comes() {
    let pool = pool(2);
    let (mut fixture, echo) = source(false);
    let placed = pool.put(echo).unwrap();
    // Between these the worker is now polling, now arming, now asleep.
    for round in 0..2000u32 {
        fixture.driver.submit(1);
        fixture.driver.kick();
        fixture.wait_popped(1);
        for _ in 0..round % 97 * 20 {
            std::hint::spin_loop();
        }
    }
    assert_eq!(placed.stop().recv_timeout(DEADLINE).unwrap().next_avail, 2000);
    // What is left in the kick descriptor would be a kick that was served already.
    rustix::io::ioctl_fionbio(&fixture.driver.kick, true).unwrap();
    assert!(rustix::io::read(&fixture.driver.kick, &mut [0u8; 8]).is_err());
}

#[test]
fn updates_come_in_order_and_do_not_stop_it() {
    let pool = pool(1);
    let (mut fixture, echo) = source(false);
    let placed = pool.put(echo).unwrap();
    // Memory without the ring: it rests. With it: it goes on where it was, and is looked at without a kick.
    placed.update(Update::Memory(Arc::default())).recv_timeout(DEADLINE).unwrap();
    fixture.driver.submit(3);
    fixture.driver.kick();
    placed.update(Update::Look).recv_timeout(DEADLINE).unwrap();
    assert!(fixture.popped.try_recv().is_err());
    placed.update(Update::Memory(fixture.driver.map.clone())).recv_timeout(DEADLINE).unwrap();
    fixture.wait_popped(3);
    assert_eq!(fixture.seen.memory_changed.load(Ordering::SeqCst), 2);
    // A new kick descriptor that was signalled before it came.
    let kick = eventfd(1, EventfdFlags::CLOEXEC).unwrap();
    fixture.driver.submit(1);
    placed.update(Update::Kick(Some(Kick::new(kick).unwrap())));
    fixture.wait_popped(1);
    assert_eq!(placed.stop().recv_timeout(DEADLINE).unwrap().next_avail, 4);
    // A source that has stopped is asked in vain, but never without an answer.
    placed.update(Update::Look).recv_timeout(DEADLINE).unwrap();
}

#[test]
fn stopping_waits_for_what_is_in_flight() {
    let pool = pool(1);
    let (mut fixture, echo) = source(true);
    let placed = pool.put(echo).unwrap();
    fixture.driver.submit(5);
    fixture.driver.kick();
    fixture.wait_popped(5);
    let stopping = placed.stop();
    // What comes after the stop is not popped.
    fixture.driver.submit(2);
    placed.update(Update::Look).recv_timeout(DEADLINE).unwrap();
    assert!(stopping.try_recv().is_err(), "stopped with requests in flight");
    *fixture.release.lock().unwrap() = true;
    placed.update(Update::Look).recv_timeout(DEADLINE).unwrap();
    assert_eq!(stopping.recv_timeout(DEADLINE).unwrap().next_avail, 5);
    assert_eq!(fixture.driver.used(), 5);
}

#[test]
fn a_source_that_waits_hears_kicks() {
    let pool = pool(1);
    let (mut fixture, echo) = source_that(true, Next::Waiting);
    let placed = pool.put(echo).unwrap();
    for _ in 0..50 {
        fixture.driver.submit(2);
        fixture.driver.kick();
        fixture.wait_popped(2);
    }
    assert_eq!(fixture.driver.used(), 0);
    let stopping = placed.stop();
    placed.update(Update::Look).recv_timeout(DEADLINE).unwrap();
    assert!(stopping.try_recv().is_err(), "stopped with requests in flight");
    *fixture.release.lock().unwrap() = true;
    placed.update(Update::Look).recv_timeout(DEADLINE).unwrap();
    assert_eq!(stopping.recv_timeout(DEADLINE).unwrap().next_avail, 100);
    assert_eq!(fixture.driver.used(), 100);
}

/// The ring's memory goes away, and never comes back to this source.
#[test]
fn completions_that_cannot_be_shown_are_handed_on() {
    let pool = pool(1);
    let (mut fixture, echo) = source(true);
    let placed = pool.put(echo).unwrap();
    fixture.driver.submit(3);
    fixture.driver.kick();
    fixture.wait_popped(3);
    placed.update(Update::Memory(Arc::default())).recv_timeout(DEADLINE).unwrap();
    *fixture.release.lock().unwrap() = true;
    placed.update(Update::Look).recv_timeout(DEADLINE).unwrap();
    let stopped = placed.stop().recv_timeout(DEADLINE).unwrap();
    assert_eq!(fixture.driver.used(), 0);
    assert_eq!(stopped.held.iter().map(|held| held.id).collect::<Vec<_>>(), [0, 1, 2]);

    let vring = fixture.driver.ring(stopped);
    let (fixture, echo) = echo_over(fixture.driver, vring, false, Next::Blocked);
    let placed = pool.put(echo).unwrap();
    assert_eq!(placed.stop().recv_timeout(DEADLINE).unwrap(), Stopped { next_avail: 3, held: Vec::new() });
    assert_eq!(fixture.driver.used(), 3);
}

#[test]
fn a_pool_that_ends_drains_its_sources() {
    let pool = pool(1);
    let (mut fixture, echo) = source(false);
    fixture.driver.submit(1);
    let placed = pool.put(echo).unwrap();
    fixture.wait_popped(1);
    drop(pool);
    assert_eq!(fixture.seen.dropped.load(Ordering::SeqCst), 1);
    // Nobody answers any more, and that can be told from a late answer.
    assert!(placed.update(Update::Look).recv_timeout(DEADLINE).is_err());
    assert!(placed.stop().recv_timeout(DEADLINE).is_err());
}

#[test]
fn many_sources_share_a_worker() {
    let pool = pool(1);
    let mut all: Vec<_> = (0..64)
        .map(|_| {
            let (fixture, echo) = source(false);
            (fixture, pool.put(echo).unwrap())
        })
        .collect();
    for (fixture, _) in &mut all {
        fixture.driver.submit(100);
        fixture.driver.kick();
    }
    for (fixture, placed) in &all {
        fixture.wait_popped(100);
        assert_eq!(placed.stop().recv_timeout(DEADLINE).unwrap().next_avail, 100);
    }
}
