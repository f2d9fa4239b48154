//! Tests that workers keep the limits of a device.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod echo;

use echo::{DEADLINE, Fixture, options, start, task};
use kickless_device::{Limit, Limiter, Limits, Rate, TaskHandle, Update};
use kickless_testing::eventually;
use kickless_worker::{Poll, WorkerPool};
use std::sync::Arc;

/// Limits a device to so many requests at once. Further ones are so rare that none comes during a test.
fn burst(limiter: &Limiter, burst: u64) {
    let limit = Limit { sustained: Rate { per_second: 1, burst }, peak: Rate::default() };
    limiter.set(&Limits { requests: [limit, Limit::default(), Limit::default()], ..Limits::default() });
}

/// A limited device with one queue.
struct Device {
    fixture: Fixture,
    handle: Box<dyn TaskHandle>,
    limiter: Arc<Limiter>,
    /// Its drop waits for the task.
    _pool: Arc<WorkerPool>,
}

impl Device {
    fn start(pool: &Arc<WorkerPool>, hold: bool) -> Self {
        let (limiter, (mut fixture, task)) = (Arc::<Limiter>::default(), task(hold));
        // A bucket that holds nothing admits one more request.
        burst(&limiter, 4);
        fixture.driver.submit(20);
        let handle = pool.limited_executor(1, limiter.clone()).spawn(task).unwrap();
        fixture.wait_popped(4);
        // A task that holds requests waits for them.
        handle.update(Update::Poll).recv_timeout(DEADLINE).unwrap();
        fixture.wait_popped(1);
        Self { fixture, handle, limiter, _pool: pool.clone() }
    }

    fn used(&self) -> u16 {
        self.fixture.driver.used()
    }
}

#[test]
fn requests_wait_in_the_ring_and_a_change_lets_them_go_on() {
    for poll in [Poll::Never, Poll::Always] {
        let device = Device::start(&start(&options(1, poll)), false);
        // A kick does not end the wait.
        device.fixture.driver.kick();
        eventually("not throttled", || device.fixture.driver.counters.throttled_ns.get() > 0);
        assert_eq!(device.used(), 5);
        burst(&device.limiter, 9);
        eventually("the limit is the old one", || device.used() == 15);
        device.limiter.set(&Limits::default());
        eventually("there is a limit still", || device.used() == 20);
        assert_eq!(device.handle.stop().recv_timeout(DEADLINE).unwrap().next_avail, 20);
    }
}

#[test]
fn requests_that_were_popped_complete_beyond_the_limit() {
    let device = Device::start(&start(&options(1, Poll::Never)), true);
    assert_eq!(device.used(), 0);
    *device.fixture.release.lock().unwrap() = true;
    device.handle.update(Update::Poll).recv_timeout(DEADLINE).unwrap();
    eventually("they wait for tokens", || device.used() == 5);
    assert_eq!(device.fixture.popped.try_iter().count(), 0, "another was popped");
    // A stop does not wait for tokens.
    assert_eq!(device.handle.stop().recv_timeout(DEADLINE).unwrap().next_avail, 5);
}

/// A queue that moves to another worker keeps its limits.
#[test]
fn a_moved_queue_is_limited() {
    let pool = start(&options(2, Poll::Never));
    let device = Device::start(&pool, false);
    pool.move_all(0, 1);
    let counters = device.fixture.driver.counters.clone();
    eventually("it does not move", || counters.moves.get() == 1);
    let throttled_ns = counters.throttled_ns.get();
    eventually("not throttled there", || counters.throttled_ns.get() > throttled_ns);
    assert_eq!(device.used(), 5);
}

#[test]
fn devices_with_one_limiter_share_it() {
    let pool = start(&options(2, Poll::Never));
    let first = Device::start(&pool, false);
    let (mut fixture, task) = task(false);
    fixture.driver.submit(20);
    let _handle = pool.limited_executor(1, first.limiter.clone()).spawn(task).unwrap();
    eventually("not throttled", || fixture.driver.counters.throttled_ns.get() > 0);
    assert_eq!((first.used(), fixture.driver.used()), (5, 0));
}
