//! Tests when and on which worker a pool polls: rules, their changes, moves between workers, calls.
#![expect(clippy::unwrap_used, clippy::expect_used, unsafe_code, reason = "a test may")]

mod echo;

use echo::{DEADLINE, Fixture, options, start, task, task_that};
use kickless_device::{Call, Next, TaskHandle, Update};
use kickless_io::Signaller;
use kickless_testing::eventually;
use kickless_worker::{Poll, WorkerPool};
use rustix::io::{Errno, dup2};
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const QUEUES: usize = 8;
const REQUESTS: u16 = 20_000;

const RULES: [Poll; 6] = [
    Poll::Never,
    Poll::Auto { latency: Duration::from_micros(100), kick_price: Poll::KICK_PRICE },
    Poll::Always,
    Poll::Rate { start_per_sec: 1, stop_idle: Duration::from_micros(10) },
    Poll::Auto { latency: Duration::ZERO, kick_price: Duration::ZERO },
    Poll::Rate { start_per_sec: 0, stop_idle: Duration::from_secs(3) },
];

/// Runs eight drivers, which kick only if the device wants kicks and wait for each answer, beside a
/// disturbance. A lost kick blocks its driver for ever.
fn stress(
    workers: usize,
    poll: Poll,
    disturb: impl Fn(&WorkerPool, usize) + Sync,
) -> Vec<(Fixture, Box<dyn TaskHandle>)> {
    let pool = start(&options(workers, poll));
    let executor = pool.executor(1);
    let done = AtomicBool::new(false);
    let all: Vec<_> = std::thread::scope(|scope| {
        let drivers: Vec<_> = (0..QUEUES)
            .map(|queue| {
                let (mut fixture, echo) = task(false);
                let handle = executor.spawn(echo).unwrap();
                scope.spawn(move || {
                    for request in 0..REQUESTS / QUEUES as u16 {
                        fixture.driver.submit_and_kick_if_asked();
                        fixture.wait_popped(1);
                        // Let the worker fall asleep, too.
                        for _ in 0..(usize::from(request) * 7 + queue) % 41 * 20 {
                            std::hint::spin_loop();
                        }
                        if request % 512 == 0 {
                            handle.update(Update::Poll).recv_timeout(DEADLINE).expect("no answer");
                        }
                    }
                    (fixture, handle)
                })
            })
            .collect();
        let disturber = scope.spawn(|| {
            for step in 0.. {
                if done.load(Ordering::Relaxed) {
                    return;
                }
                disturb(&pool, step);
                std::thread::sleep(Duration::from_micros(200));
            }
        });
        let all = drivers.into_iter().map(|driver| driver.join().unwrap()).collect();
        done.store(true, Ordering::Relaxed);
        disturber.join().unwrap();
        all
    });
    for (fixture, handle) in &all {
        assert_eq!(handle.stop().recv_timeout(DEADLINE).unwrap().next_avail, REQUESTS / QUEUES as u16);
        assert_eq!(fixture.driver.used(), REQUESTS / QUEUES as u16);
        assert_eq!(fixture.seen.dropped.load(Ordering::SeqCst), 1);
    }
    all
}

#[test]
fn no_kick_is_lost_under_any_rule() {
    for rule in RULES {
        stress(2, rule, |_, _| {});
    }
}

/// Changes the polling rule, and waits until it is in force.
fn set_poll(pool: &WorkerPool, poll: Poll) {
    pool.request_poll(poll);
    pool.pass().into_iter().for_each(|answer| answer.recv_timeout(DEADLINE).unwrap());
}

#[test]
fn rules_can_change_while_queues_run() {
    stress(2, Poll::default(), |pool, step| set_poll(pool, RULES[step % RULES.len()]));
}

#[test]
fn queues_move_between_workers_and_nothing_is_lost() {
    let all = stress(3, Poll::default(), |pool, step| pool.move_all(step % 3, (step + 1 + step / 3 % 2) % 3));
    let moves: u64 = all.iter().map(|(fixture, _)| fixture.driver.counters.moves.get()).sum();
    assert!(moves > 0);
    let (attached, detached) = all.iter().fold((0, 0), |(attached, detached), (fixture, _)| {
        (
            attached + fixture.seen.attached.load(Ordering::SeqCst),
            detached + fixture.seen.detached.load(Ordering::SeqCst),
        )
    });
    assert_eq!(attached, detached);
    assert_eq!(u64::from(attached), moves + QUEUES as u64);
}

#[test]
fn a_queue_moves_when_its_requests_in_flight_are_done() {
    let pool = start(&options(2, Poll::Never));
    let (mut fixture, echo) = task(true);
    let handle = pool.executor(1).spawn(echo).unwrap();
    fixture.driver.submit(3);
    fixture.driver.kick();
    fixture.wait_popped(3);
    pool.move_all(0, 1);
    fixture.driver.submit(2);
    fixture.driver.kick();
    handle.update(Update::Poll).recv_timeout(DEADLINE).unwrap();
    assert!(fixture.popped.try_recv().is_err(), "popped by a worker that is to give it away");
    *fixture.release.lock().unwrap() = true;
    handle.update(Update::Poll).recv_timeout(DEADLINE).unwrap();
    // It takes here what it could not take there.
    fixture.wait_popped(2);
    assert_eq!(fixture.driver.counters.moves.get(), 1);
    handle.update(Update::Poll).recv_timeout(DEADLINE).unwrap();
    assert_eq!(handle.stop().recv_timeout(DEADLINE).unwrap().next_avail, 5);
}

#[test]
fn a_moving_queue_can_be_stopped() {
    let pool = start(&options(2, Poll::Never));
    let (mut fixture, echo) = task(true);
    let handle = pool.executor(1).spawn(echo).unwrap();
    fixture.driver.submit(1);
    fixture.driver.kick();
    fixture.wait_popped(1);
    pool.move_all(0, 1);
    let stopping = handle.stop();
    handle.update(Update::Poll).recv_timeout(DEADLINE).unwrap();
    assert!(stopping.try_recv().is_err(), "stopped with requests in flight");
    *fixture.release.lock().unwrap() = true;
    handle.update(Update::Poll).recv_timeout(DEADLINE).unwrap();
    assert_eq!(stopping.recv_timeout(DEADLINE).unwrap().next_avail, 1);
    assert_eq!(fixture.driver.counters.moves.get(), 0);
}

/// The rule changes after a queue has left one worker and before it comes to another.
#[test]
fn a_moving_queue_gets_a_new_rule() {
    let pool = start(&options(2, Poll::Always));
    let executor = pool.executor(1);
    let (mut moved, echo) = task_that(true, Next::Waiting);
    let on_first = executor.spawn(echo).unwrap();
    moved.driver.submit(1);
    moved.wait_popped(1);
    let (mut other, echo) = task(false);
    let on_second = executor.spawn(echo).unwrap();
    pool.move_all(0, 1);
    on_first.update(Update::Poll).recv_timeout(DEADLINE).unwrap();
    let asks_for_kicks = |fixture: &mut Fixture| {
        let deadline = Instant::now() + DEADLINE;
        while !fixture.driver.submit_and_kick_if_asked() {
            assert!(Instant::now() < deadline, "still polled");
            fixture.wait_popped(1);
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    let mut release = moved.release.lock().unwrap();
    // The first worker reaches its queue and goes no further. The second learns of the rule.
    let _looks = on_first.update(Update::Poll);
    eventually("never polled", || moved.seen.kept.load(Ordering::SeqCst) > 0);
    pool.request_poll(Poll::Never);
    asks_for_kicks(&mut other);
    *release = true;
    drop(release);
    on_first.update(Update::Poll).recv_timeout(DEADLINE).unwrap();
    asks_for_kicks(&mut moved);
    for handle in [on_first, on_second] {
        handle.stop().recv_timeout(DEADLINE).unwrap();
    }
}

#[test]
fn no_time_is_counted_twice() {
    let pool = start(&options(1, Poll::Never));
    let start = Instant::now();
    let (mut fixture, echo) = task(false);
    let handle = pool.executor(1).spawn(echo).unwrap();
    for _ in 0..5 {
        // Long enough that loads are compared after each sleep. The first comparison has no effect.
        std::thread::sleep(Duration::from_millis(120));
        fixture.driver.kick();
        std::thread::sleep(Duration::from_millis(120));
        fixture.driver.submit_and_kick_if_asked();
        fixture.wait_popped(1);
    }
    handle.stop().recv_timeout(DEADLINE).unwrap();
    let counters = &fixture.driver.counters;
    let counted = Duration::from_nanos(counters.notified_ns.get() + counters.polled_ns.get());
    assert!(counted <= start.elapsed(), "{counted:?}");
}

#[test]
fn a_move_to_a_missing_worker_does_nothing() {
    let pool = start(&options(1, Poll::Never));
    let (mut fixture, echo) = task(false);
    let handle = pool.executor(1).spawn(echo).unwrap();
    pool.move_all(0, 7);
    pool.move_all(9, 0);
    pool.move_all(0, 0);
    fixture.driver.submit(1);
    fixture.driver.kick();
    fixture.wait_popped(1);
    assert_eq!(handle.stop().recv_timeout(DEADLINE).unwrap().next_avail, 1);
    assert_eq!(fixture.driver.counters.moves.get(), 0);
}

/// A pool ends while queues move.
#[test]
fn a_pool_can_end_while_queues_move() {
    for _ in 0..50 {
        let pool = start(&options(3, Poll::default()));
        let executor = pool.executor(1);
        let all: Vec<_> = (0..QUEUES)
            .map(|_| {
                let (mut fixture, echo) = task(false);
                fixture.driver.submit(1);
                (executor.spawn(echo).unwrap(), fixture)
            })
            .collect();
        (0..3).for_each(|worker_id| pool.move_all(worker_id, (worker_id + 1) % 3));
        drop((pool, executor));
        for (handle, fixture) in all {
            assert_eq!(fixture.seen.dropped.load(Ordering::SeqCst), 1);
            assert!(handle.stop().recv_timeout(DEADLINE).is_err());
        }
    }
}

#[test]
fn kicks_without_work_are_counted_and_change_nothing() {
    let pool = start(&options(1, Poll::Never));
    let (mut fixture, echo) = task(false);
    let handle = pool.executor(1).spawn(echo).unwrap();
    for _ in 0..1000 {
        fixture.driver.kick();
    }
    // The worker has seen the last kick, in one event or in many.
    let deadline = Instant::now() + DEADLINE;
    while fixture.driver.counters.kicks_in_vain.get() == 0 {
        assert!(Instant::now() < deadline, "no kick was heard");
        std::thread::yield_now();
    }
    assert!(fixture.popped.try_recv().is_err());
    for _ in 0..10 {
        fixture.driver.submit_and_kick_if_asked();
        fixture.wait_popped(1);
    }
    assert_eq!(handle.stop().recv_timeout(DEADLINE).unwrap().next_avail, 10);
}

fn calls(fixture: &Fixture) -> u64 {
    let mut count = [0; 8];
    match rustix::io::read(&fixture.driver.call, &mut count) {
        Ok(_) => u64::from_ne_bytes(count),
        Err(Errno::AGAIN) => 0,
        Err(error) => unreachable!("an eventfd fails: {error}"),
    }
}

/// Sends `count` batches as a driver that wants a call for each.
fn batches(fixture: &mut Fixture, handle: &dyn TaskHandle, count: u32) {
    for _ in 0..count {
        let used = fixture.driver.used();
        fixture.driver.ask_for_a_call(used);
        fixture.driver.submit(1);
        fixture.driver.kick();
        fixture.wait_popped(1);
        handle.update(Update::Poll).recv_timeout(DEADLINE).unwrap();
    }
}

/// The kernel refuses a call for a while, because its descriptor is no eventfd during that time.
#[test]
fn a_call_that_the_kernel_refuses_is_sent_later() {
    if Signaller::new().is_err() {
        return println!("SKIPPED: no kernel AIO here");
    }
    for rule in [Poll::Never, Poll::Always] {
        let pool = start(&options(1, rule));
        let (mut fixture, echo) = task(false);
        let handle = pool.executor(1).spawn(echo).unwrap();
        let call = fixture.driver.call.try_clone().unwrap();
        // SAFETY: the task keeps this descriptor open as long as it lives, and closes it. This code does not
        // close it.
        let mut kept = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(call.as_raw_fd()) });
        handle.update(Update::Call(Some(Call::new(call).unwrap()))).recv_timeout(DEADLINE).unwrap();
        assert_ne!(calls(&fixture), 0);
        dup2(std::fs::File::open("/dev/null").unwrap(), &mut kept).unwrap();
        batches(&mut fixture, handle.as_ref(), 1);
        // At least one more attempt is made meanwhile.
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(calls(&fixture), 0);
        dup2(&fixture.driver.call, &mut kept).unwrap();
        eventually("the call is lost", || calls(&fixture) > 0);
    }
}
