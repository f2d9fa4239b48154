//! Tests tasks that wait for a far side. They sleep on its event, and nothing waits for their credit.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod echo;

use echo::{DEADLINE, Driver, SIZE, options, start};
use kickless_device::{Context, Event, Interest, Next, Polled, QueueTask, TaskHandle, Update, Vring};
use kickless_io::Engine;
use kickless_memory::IovaRange;
use kickless_testing::eventually;
use kickless_virtqueue::{Chain, ChainId};
use kickless_worker::Poll;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::io::Errno;
use rustix::pipe::{fcntl_getpipe_size, pipe};
use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

type Calls = Arc<Mutex<Vec<&'static str>>>;

/// A task that puts frames into the buffers of its ring: as many as an eventfd counts.
struct Receiver {
    vring: Vring,
    chain: Chain,
    frames: OwnedFd,
    interest: Interest,
    calls: Calls,
    looks: Arc<AtomicU32>,
    interval: Duration,
    group: Option<u32>,
    /// The credit, oldest first.
    credit: VecDeque<ChainId>,
}

/// The amount of credit that is enough.
const ENOUGH: usize = 4;

impl Receiver {
    fn call(&self, name: &'static str) {
        self.calls.lock().unwrap().push(name);
    }

    /// Takes one unit of credit. Returns `false` if there is none.
    fn take_credit(&mut self) -> bool {
        while self.credit.len() < ENOUGH && self.vring.pop_credit(&mut self.chain) {
            self.credit.push_back(self.chain.id);
        }
        !self.credit.is_empty()
    }
}

impl QueueTask for Receiver {
    fn vring(&mut self) -> &mut Vring {
        &mut self.vring
    }

    fn detach(&mut self, _: &mut Engine) {
        self.call("detach");
    }

    fn poll(&mut self, context: &mut Context<'_>, budget: u32) -> Polled {
        let mut served = 0;
        let next = loop {
            if budget == 0 || !self.take_credit() {
                self.interest = Interest::None;
                break Next::Idle;
            }
            if served == budget {
                break Next::More;
            }
            self.interest = Interest::Readable;
            if !context.far_side_due {
                break Next::Quiet;
            }
            self.looks.fetch_add(1, Ordering::Relaxed);
            if rustix::io::read(&self.frames, &mut [0; 8]) == Err(Errno::AGAIN) {
                break Next::Quiet;
            }
            assert!(self.vring.use_credit(1), "the task did not learn that its credit was returned");
            self.vring.push(self.credit.pop_front().unwrap(), 0);
            served += 1;
        };
        self.vring.publish();
        Polled { served, cost: served, next }
    }

    fn in_flight(&self) -> usize {
        0
    }

    fn event(&self) -> Option<Event<'_>> {
        Some(Event { fd: self.frames.as_fd(), interest: self.interest })
    }

    fn far_side_interval(&self) -> Duration {
        self.interval
    }

    fn affinity(&self) -> Option<u32> {
        self.group
    }

    fn return_credit(&mut self) {
        self.vring.unpop(self.credit.len() as u16);
        self.credit.clear();
        self.call("return_credit");
    }

    fn set_enabled(&mut self, enabled: bool) {
        self.call(if enabled { "enabled" } else { "disabled" });
    }

    fn memory_changed(&mut self) {
        self.call("memory_changed");
    }
}

/// A driver of a receive ring, and the other end of its far side.
struct Fixture {
    driver: Driver,
    frames: OwnedFd,
    calls: Calls,
    looks: Arc<AtomicU32>,
}

fn far_side() -> OwnedFd {
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE;
    eventfd(0, flags).unwrap()
}

fn receiver() -> (Fixture, Box<dyn QueueTask>) {
    receiver_of(far_side(), Duration::ZERO, None)
}

fn receiver_of(frames: OwnedFd, interval: Duration, group: Option<u32>) -> (Fixture, Box<dyn QueueTask>) {
    let (driver, vring) = Driver::new();
    let (calls, looks, theirs) = (Calls::default(), Arc::<AtomicU32>::default(), frames.try_clone().unwrap());
    let receiver = Receiver {
        vring,
        chain: Chain::default(),
        frames: theirs,
        interest: Interest::None,
        calls: calls.clone(),
        looks: looks.clone(),
        interval,
        group,
        credit: VecDeque::new(),
    };
    (Fixture { driver, frames, calls, looks }, Box::new(receiver))
}

impl Fixture {
    fn send(&self, frames: u64) {
        rustix::io::write(&self.frames, &frames.to_ne_bytes()).unwrap();
    }

    fn wait_used(&self, count: u16) {
        eventually("the task sleeps", || self.driver.used() == count);
    }

    fn take_calls(&self) -> Vec<&'static str> {
        std::mem::take(&mut *self.calls.lock().unwrap())
    }
}

/// Waits until all earlier updates are in force.
fn look(handle: &dyn TaskHandle) {
    handle.update(Update::Poll).recv_timeout(DEADLINE).unwrap();
}

#[test]
fn a_task_with_credit_sleeps_on_its_event_and_asks_for_no_kicks() {
    let pool = start(&options(1, Poll::Never));
    let (mut fixture, task) = receiver();
    fixture.driver.submit(10);
    let handle = pool.executor(1).spawn(task).unwrap();
    for frame in 1..=5 {
        look(&*handle);
        assert!(!fixture.driver.submit_and_kick_if_asked(), "kicks are of no use to it");
        fixture.send(1);
        fixture.wait_used(frame);
    }
    fixture.send(7);
    fixture.wait_used(12);
    assert_eq!(fixture.driver.counters.kicks.get(), 0);
    assert_eq!(handle.stop().recv_timeout(DEADLINE).unwrap().next_avail, 12);
}

#[test]
fn quiet_time_does_not_count_as_polled_time() {
    let pool = start(&options(1, Poll::Never));
    let (mut fixture, task) = receiver();
    fixture.driver.submit(10);
    let handle = pool.executor(1).spawn(task).unwrap();
    let counters = fixture.driver.counters.clone();
    // It is quiet nearly all the time, and the time is counted when that ends.
    eventually("the task sleeps", || {
        std::thread::sleep(Duration::from_millis(5));
        look(&*handle);
        counters.notified_ns.get() > 10_000_000
    });
    assert_eq!(counters.kicks.get(), 0);
    handle.stop().recv_timeout(DEADLINE).unwrap();
}

#[test]
fn a_task_without_credit_sleeps_on_kicks_and_not_on_its_event() {
    let pool = start(&options(1, Poll::Never));
    let (mut fixture, task) = receiver();
    // It watches its event before it has too little credit.
    fixture.driver.submit(1);
    let handle = pool.executor(1).spawn(task).unwrap();
    look(&*handle);
    fixture.send(1);
    fixture.wait_used(1);
    // It is armed by now, or soon is.
    let looks = || fixture.driver.counters.polls_without_work.get();
    look(&*handle);
    std::thread::sleep(Duration::from_millis(20));
    let before = looks();
    for _ in 0..20 {
        fixture.send(1);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(looks() < before + 5, "frames that nothing can be done with wake the worker");
    assert!(fixture.driver.submit_and_kick_if_asked());
    fixture.wait_used(2);
    for used in 3..=21 {
        eventually("the task sleeps", || fixture.driver.used() == used - 1);
        fixture.driver.submit_and_kick_if_asked();
    }
    fixture.wait_used(21);
    handle.stop().recv_timeout(DEADLINE).unwrap();
}

#[test]
fn credit_is_returned_before_an_update_invalidates_it() {
    let pool = start(&options(2, Poll::Never));
    let (mut fixture, task) = receiver();
    fixture.driver.submit(10);
    let handle = pool.executor(1).spawn(task).unwrap();
    look(&*handle);
    assert!(fixture.take_calls().is_empty());
    let answered = |update| handle.update(update).recv_timeout(DEADLINE).unwrap();
    answered(Update::Memory(fixture.driver.view.clone()));
    assert_eq!(fixture.take_calls(), ["return_credit", "memory_changed"]);
    let (done, all_done) = channel();
    answered(Update::Invalidate(IovaRange::ALL, done));
    assert!(all_done.recv_timeout(DEADLINE).is_err(), "something holds the invalidation up");
    assert_eq!(fixture.take_calls(), ["return_credit"]);
    answered(Update::Addresses(Driver::areas()));
    assert_eq!(fixture.take_calls(), ["return_credit"]);
    answered(Update::Enable(false));
    answered(Update::Enable(true));
    assert_eq!(fixture.take_calls(), ["disabled", "enabled"]);
    // A task that moves keeps its credit.
    pool.move_all(0, 1);
    eventually("the task sleeps", || fixture.driver.counters.moves.get() == 1);
    assert_eq!(fixture.take_calls(), ["detach"]);
    fixture.send(3);
    fixture.wait_used(3);
    assert_eq!(handle.stop().recv_timeout(DEADLINE).unwrap().next_avail, 3);
    assert_eq!(fixture.take_calls(), ["return_credit", "detach"]);
}

#[test]
fn tasks_share_a_far_side_by_duplicates_of_its_descriptor() {
    let pool = start(&options(1, Poll::Never));
    let executor = pool.executor(1);
    let (mut first, task) = receiver();
    first.driver.submit(100);
    let one = executor.spawn(task).unwrap();
    let (mut second, task) = receiver_of(first.frames.try_clone().unwrap(), Duration::ZERO, None);
    second.driver.submit(100);
    let two = executor.spawn(task).unwrap();
    look(&*one);
    look(&*two);
    for sent in 1..=50 {
        first.send(1);
        eventually("the task sleeps", || first.driver.used() + second.driver.used() == sent);
    }
    one.stop().recv_timeout(DEADLINE).unwrap();
    let before = second.driver.used();
    first.send(5);
    second.wait_used(before + 5);
    two.stop().recv_timeout(DEADLINE).unwrap();
}

/// Frames and buffers come while something disturbs the workers. A frame that is lost, or during which the
/// task sleeps, hangs the test.
#[test]
fn no_event_and_no_kick_is_lost_under_any_rule() {
    const FRAMES: u16 = 4000;
    let rules = [
        Poll::Never,
        Poll::Auto { latency: Duration::from_micros(100), kick_price: Poll::KICK_PRICE },
        Poll::Always,
        Poll::Rate { start_per_sec: 1, stop_idle: Duration::from_micros(10) },
    ];
    for rule in rules {
        let pool = start(&options(2, rule));
        let (mut fixture, task) = receiver();
        let handle = pool.executor(1).spawn(task).unwrap();
        let (far_side, view) = (fixture.frames.try_clone().unwrap(), fixture.driver.view.clone());
        let pool = &pool;
        let handle = std::thread::scope(|scope| {
            scope.spawn(move || {
                for frame in 0..u32::from(FRAMES) {
                    rustix::io::write(&far_side, &1u64.to_ne_bytes()).unwrap();
                    for _ in 0..frame * 7 % 41 * 20 {
                        std::hint::spin_loop();
                    }
                }
            });
            let disturber = scope.spawn(move || {
                for step in 0..40 {
                    match step % 4 {
                        0 => pool.move_all(0, 1),
                        1 => look(&*handle),
                        2 => pool.move_all(1, 0),
                        _ => {
                            let update = handle.update(Update::Memory(view.clone()));
                            update.recv_timeout(DEADLINE).expect("no answer");
                        }
                    }
                    std::thread::sleep(Duration::from_micros(300));
                }
                handle
            });
            let since = Instant::now();
            while fixture.driver.used() != FRAMES {
                assert!(since.elapsed() < DEADLINE, "{rule:?}: {} of {FRAMES}", fixture.driver.used());
                let offered = fixture.driver.avail.wrapping_sub(fixture.driver.used());
                if offered < SIZE && fixture.driver.avail < FRAMES {
                    fixture.driver.submit_and_kick_if_asked();
                }
            }
            disturber.join().unwrap()
        });
        assert_eq!(handle.stop().recv_timeout(DEADLINE).unwrap().next_avail, FRAMES);
    }
}

/// A task that writes a page to a pipe for each chain. It holds a chain that the pipe refuses.
struct Transmitter {
    vring: Vring,
    chain: Chain,
    pipe: OwnedFd,
    held: Option<ChainId>,
}

const PAGE: [u8; 4096] = [0; 4096];

impl QueueTask for Transmitter {
    fn vring(&mut self) -> &mut Vring {
        &mut self.vring
    }

    fn poll(&mut self, _: &mut Context<'_>, budget: u32) -> Polled {
        let mut served = 0;
        let next = loop {
            if self.held.is_none() && served < budget && self.vring.pop_credit(&mut self.chain) {
                self.held = Some(self.chain.id);
            }
            let Some(id) = self.held else {
                break if served == budget && budget > 0 { Next::More } else { Next::Idle };
            };
            if budget == 0 || rustix::io::write(&self.pipe, &PAGE) == Err(Errno::AGAIN) {
                break Next::Quiet;
            }
            self.held = None;
            assert!(self.vring.use_credit(1));
            self.vring.push(id, 0);
            served += 1;
        };
        self.vring.publish();
        Polled { served, cost: served, next }
    }

    fn in_flight(&self) -> usize {
        0
    }

    fn event(&self) -> Option<Event<'_>> {
        let interest = if self.held.is_some() { Interest::Writable } else { Interest::None };
        Some(Event { fd: self.pipe.as_fd(), interest })
    }

    fn return_credit(&mut self) {
        if self.held.take().is_some() {
            self.vring.unpop(1);
        }
    }
}

#[test]
fn a_refused_frame_waits_for_writability_and_no_stop_waits_for_it() {
    let pool = start(&options(1, Poll::Never));
    let (mut driver, vring) = Driver::new();
    let (far_side, pipe) = pipe().unwrap();
    fcntl_setfl(&pipe, OFlags::NONBLOCK).unwrap();
    let capacity = (fcntl_getpipe_size(&pipe).unwrap() / PAGE.len()) as u16;
    let task = Transmitter { vring, chain: Chain::default(), pipe, held: None };
    let handle = pool.executor(1).spawn(Box::new(task)).unwrap();
    driver.submit(100);
    driver.kick();
    for pages in 0..100 {
        // The frame after those that fill the pipe is held, and kicks cannot help it.
        let sent = (pages + capacity).min(100);
        eventually("the task sleeps", || driver.used() == sent);
        assert_eq!(rustix::io::read(&far_side, &mut PAGE.clone()).unwrap(), PAGE.len());
    }
    driver.submit(50);
    driver.kick();
    eventually("the task sleeps", || driver.used() == 100 + capacity.min(50));
    look(&*handle);
    let stopped = handle.stop().recv_timeout(DEADLINE).expect("it waits for the far side");
    assert_eq!(stopped.next_avail, driver.used(), "the next task sends the held chains");
}

#[test]
fn a_spinning_task_checks_its_far_side_now_and_then() {
    let pool = start(&options(1, Poll::Always));
    let (mut fixture, task) = receiver_of(far_side(), Duration::from_millis(5), None);
    fixture.driver.submit(10);
    let since = Instant::now();
    let handle = pool.executor(1).spawn(task).unwrap();
    let polls = || fixture.driver.counters.polls_without_work.get();
    eventually("the task sleeps", || since.elapsed() > Duration::from_millis(50) && polls() > 1000);
    let looks = fixture.looks.load(Ordering::Relaxed);
    let elapsed = since.elapsed();
    assert!(u128::from(looks) <= 2 + elapsed.as_millis() / 5, "{looks} looks in {elapsed:?}");
    fixture.send(3);
    fixture.wait_used(3);
    handle.stop().recv_timeout(DEADLINE).unwrap();
    drop(pool);
    // It checks the far side before it sleeps, however seldom it does so while it spins.
    let pool = start(&options(1, Poll::Never));
    let (mut fixture, task) = receiver_of(far_side(), Duration::from_secs(3600), None);
    fixture.driver.submit(200);
    let handle = pool.executor(1).spawn(task).unwrap();
    for frame in 1..=100 {
        fixture.send(1);
        fixture.wait_used(frame);
    }
    handle.stop().recv_timeout(DEADLINE).unwrap();
}

#[test]
fn a_check_of_a_far_side_does_not_count_as_an_avoided_kick() {
    for rule in [Poll::Always, Poll::default()] {
        let pool = start(&options(1, rule));
        let (mut fixture, task) = receiver_of(far_side(), Duration::ZERO, None);
        fixture.driver.submit(SIZE);
        let handle = pool.executor(1).spawn(task).unwrap();
        // The load is one under which naps pay.
        for frame in 1..=3000 {
            fixture.send(1);
            std::thread::sleep(Duration::from_micros(20));
            if fixture.driver.avail.wrapping_sub(fixture.driver.used()) < SIZE {
                fixture.driver.submit_and_kick_if_asked();
            }
            if frame % 100 == 0 {
                fixture.wait_used(frame);
            }
        }
        assert_eq!(fixture.driver.counters.kicks_avoided.get(), 0, "{rule:?}");
        handle.stop().recv_timeout(DEADLINE).unwrap();
    }
}

#[test]
fn tasks_of_a_group_are_on_one_worker_and_move_together() {
    let pool = start(&options(3, Poll::Never));
    let executor = pool.executor(1);
    let mut tasks = Vec::new();
    let spawn = |tasks: &mut Vec<(Fixture, Box<dyn TaskHandle>)>| {
        let (fixture, task) = receiver_of(far_side(), Duration::ZERO, Some(7));
        tasks.push((fixture, executor.spawn(task).unwrap()));
    };
    let moves = |tasks: &[(Fixture, Box<dyn TaskHandle>)]| -> Vec<u64> {
        tasks.iter().map(|(fixture, _)| fixture.driver.counters.moves.get()).collect()
    };
    (0..3).for_each(|_| spawn(&mut tasks));
    // Without the group, each would be on a worker of its own.
    pool.move_all(0, 2);
    eventually("the task sleeps", || moves(&tasks) == [1, 1, 1]);
    // While they move, other tasks come. They end up with the group, wherever they start.
    pool.move_all(2, 1);
    (0..3).for_each(|_| spawn(&mut tasks));
    eventually("the task sleeps", || moves(&tasks)[..3] == [2, 2, 2]);
    (0..20).for_each(|_| tasks.iter().for_each(|(_, handle)| look(&**handle)));
    let before = moves(&tasks);
    assert!(before[3..].iter().all(|moves| *moves <= 1), "{before:?}");
    pool.move_all(1, 0);
    let after: Vec<u64> = before.iter().map(|moves| moves + 1).collect();
    eventually("the task sleeps", || moves(&tasks) == after);
    for (_, handle) in &tasks {
        handle.stop().recv_timeout(DEADLINE).unwrap();
    }
}
