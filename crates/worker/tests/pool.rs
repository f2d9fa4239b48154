//! Tests kicks, updates and stops of a pool's tasks.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may")]

mod echo;

use echo::{DEADLINE, Driver, echo_over, options, pool, start, task, task_that};
use kickless_device::{Context, Kick, Next, Polled, QueueTask, Stopped, Update, Vring};
use kickless_virtqueue::Chain;
use kickless_worker::{Poll, WorkerPool};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::sync::Arc;
use std::sync::atomic::Ordering;

#[test]
fn a_new_ring_is_polled_once_without_a_kick() {
    let pool = pool(1);
    let (mut fixture, echo) = task(false);
    fixture.driver.submit(200);
    let handle = pool.spawn(echo).unwrap();
    fixture.wait_popped(200);
    let stopped = handle.stop().recv_timeout(DEADLINE).unwrap();
    assert_eq!(stopped, Stopped { next_avail: 200, has_work: false, left: 0, unpublished: Vec::new() });
    assert_eq!(fixture.driver.used(), 200);
    for count in [&fixture.seen.attached, &fixture.seen.detached, &fixture.seen.dropped] {
        assert_eq!(count.load(Ordering::SeqCst), 1);
    }
}

#[test]
fn no_kick_is_lost_whenever_it_comes() {
    let pool = pool(2);
    let (mut fixture, echo) = task(false);
    let handle = pool.spawn(echo).unwrap();
    // In between, the worker polls, arms or sleeps.
    for round in 0..2000u32 {
        fixture.driver.submit(1);
        fixture.driver.kick();
        fixture.wait_popped(1);
        for _ in 0..round % 97 * 20 {
            std::hint::spin_loop();
        }
    }
    assert_eq!(handle.stop().recv_timeout(DEADLINE).unwrap().next_avail, 2000);
    // A kick left in the descriptor would look like one that is not served yet.
    rustix::io::ioctl_fionbio(&fixture.driver.kick, true).unwrap();
    assert!(rustix::io::read(&fixture.driver.kick, &mut [0u8; 8]).is_err());
}

#[test]
fn updates_come_in_order_and_do_not_stop_it() {
    let pool = pool(1);
    let (mut fixture, echo) = task(false);
    let handle = pool.spawn(echo).unwrap();
    // Without its memory, the ring rests. With it again, the ring goes on where it was, and is polled without
    // a kick.
    handle.update(Update::Memory(Arc::default())).recv_timeout(DEADLINE).unwrap();
    fixture.driver.submit(3);
    fixture.driver.kick();
    handle.update(Update::Poll).recv_timeout(DEADLINE).unwrap();
    assert!(fixture.popped.try_recv().is_err());
    handle.update(Update::Memory(fixture.driver.view.clone())).recv_timeout(DEADLINE).unwrap();
    fixture.wait_popped(3);
    assert_eq!(fixture.seen.memory_changed.load(Ordering::SeqCst), 2);
    // A new kick descriptor that was signalled before it was sent.
    let kick = eventfd(1, EventfdFlags::CLOEXEC).unwrap();
    fixture.driver.submit(1);
    handle.update(Update::Kick(Some(Kick::new(kick).unwrap())));
    fixture.wait_popped(1);
    assert_eq!(handle.stop().recv_timeout(DEADLINE).unwrap().next_avail, 4);
    // A task that has stopped ignores an update, but its sender gets an answer.
    handle.update(Update::Poll).recv_timeout(DEADLINE).unwrap();
}

#[test]
fn a_stop_waits_for_requests_in_flight() {
    let pool = pool(1);
    let (mut fixture, echo) = task(true);
    let handle = pool.spawn(echo).unwrap();
    fixture.driver.submit(5);
    fixture.driver.kick();
    fixture.wait_popped(5);
    let stopping = handle.stop();
    // Requests after the stop are not popped.
    fixture.driver.submit(2);
    handle.update(Update::Poll).recv_timeout(DEADLINE).unwrap();
    assert!(stopping.try_recv().is_err(), "stopped with requests in flight");
    *fixture.release.lock().unwrap() = true;
    handle.update(Update::Poll).recv_timeout(DEADLINE).unwrap();
    assert_eq!(stopping.recv_timeout(DEADLINE).unwrap().next_avail, 5);
    assert_eq!(fixture.driver.used(), 5);
}

#[test]
fn a_task_with_waiting_requests_reacts_to_kicks() {
    let pool = pool(1);
    let (mut fixture, echo) = task_that(true, Next::Waiting);
    let handle = pool.spawn(echo).unwrap();
    for _ in 0..50 {
        fixture.driver.submit(2);
        fixture.driver.kick();
        fixture.wait_popped(2);
    }
    assert_eq!(fixture.driver.used(), 0);
    let stopping = handle.stop();
    handle.update(Update::Poll).recv_timeout(DEADLINE).unwrap();
    assert!(stopping.try_recv().is_err(), "stopped with requests in flight");
    *fixture.release.lock().unwrap() = true;
    handle.update(Update::Poll).recv_timeout(DEADLINE).unwrap();
    assert_eq!(stopping.recv_timeout(DEADLINE).unwrap().next_avail, 100);
    assert_eq!(fixture.driver.used(), 100);
}

/// The ring's memory is removed, so the task cannot publish its completions. The stop returns them.
#[test]
fn unpublished_completions_are_returned_by_the_stop() {
    let pool = pool(1);
    let (mut fixture, echo) = task(true);
    let handle = pool.spawn(echo).unwrap();
    fixture.driver.submit(3);
    fixture.driver.kick();
    fixture.wait_popped(3);
    handle.update(Update::Memory(Arc::default())).recv_timeout(DEADLINE).unwrap();
    *fixture.release.lock().unwrap() = true;
    handle.update(Update::Poll).recv_timeout(DEADLINE).unwrap();
    let stopped = handle.stop().recv_timeout(DEADLINE).unwrap();
    assert_eq!(fixture.driver.used(), 0);
    assert_eq!(stopped.unpublished.iter().map(|unpublished| unpublished.id).collect::<Vec<_>>(), [0, 1, 2]);

    let vring = fixture.driver.ring(stopped);
    let (fixture, echo) = echo_over(fixture.driver, vring, false, Next::Blocked);
    let handle = pool.spawn(echo).unwrap();
    assert_eq!(
        handle.stop().recv_timeout(DEADLINE).unwrap(),
        Stopped { next_avail: 3, has_work: false, left: 0, unpublished: Vec::new() }
    );
    assert_eq!(fixture.driver.used(), 3);
}

#[test]
fn a_pool_that_ends_drains_its_tasks() {
    let pool = pool(1);
    let (mut fixture, echo) = task(false);
    fixture.driver.submit(1);
    let handle = pool.spawn(echo).unwrap();
    fixture.wait_popped(1);
    drop(pool);
    assert_eq!(fixture.seen.dropped.load(Ordering::SeqCst), 1);
    // No answer comes any more, and this differs from a late answer.
    assert!(handle.update(Update::Poll).recv_timeout(DEADLINE).is_err());
    assert!(handle.stop().recv_timeout(DEADLINE).is_err());
}

#[test]
fn many_tasks_share_a_worker() {
    let pool = pool(1);
    let mut all: Vec<_> = (0..64)
        .map(|_| {
            let (fixture, echo) = task(false);
            (fixture, pool.spawn(echo).unwrap())
        })
        .collect();
    for (fixture, _) in &mut all {
        fixture.driver.submit(100);
        fixture.driver.kick();
    }
    for (fixture, handle) in &all {
        fixture.wait_popped(100);
        assert_eq!(handle.stop().recv_timeout(DEADLINE).unwrap().next_avail, 100);
    }
}

/// A task that panics in every call except `vring`.
struct Faulty(Vring);

impl QueueTask for Faulty {
    fn vring(&mut self) -> &mut Vring {
        &mut self.0
    }

    fn poll(&mut self, _: &mut Context<'_>, _: u32) -> Polled {
        if self.0.pop(&mut Chain::default()) {
            panic!("a mistake");
        }
        Polled { served: 0, cost: 0, next: Next::Idle }
    }

    fn in_flight(&self) -> usize {
        0
    }
}

#[test]
fn a_pool_signals_that_a_worker_panicked() {
    let pool = start(&options(2, Poll::default()));
    let readable = |pool: &WorkerPool, seconds| {
        let timeout = Timespec { tv_sec: seconds, tv_nsec: 0 };
        poll(&mut [PollFd::from_borrowed_fd(pool.failed(), PollFlags::IN)], Some(&timeout)).unwrap() == 1
    };
    let (mut driver, vring) = Driver::new();
    let handle = pool.executor(1).spawn(Box::new(Faulty(vring))).unwrap();
    assert!(!readable(&pool, 0));
    driver.submit(1);
    driver.kick();
    assert!(readable(&pool, 60));
    assert!(handle.stop().recv_timeout(DEADLINE).is_err());
    drop(handle);

    let pool = start(&options(1, Poll::default()));
    let failed = pool.failed().try_clone_to_owned().unwrap();
    drop(pool);
    let timeout = Timespec { tv_sec: 0, tv_nsec: 0 };
    assert_eq!(poll(&mut [PollFd::new(&failed, PollFlags::IN)], Some(&timeout)).unwrap(), 0);
}
