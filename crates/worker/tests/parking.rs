//! Tests tasks that are parked and go on.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod echo;

use echo::{DEADLINE, Fixture, options, pool, start, task, task_that};
use kickless_device::{Next, Position, Stopped, TaskHandle, Update};
use kickless_worker::Poll;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Duration;

const QUEUES: usize = 4;
const REQUESTS: u16 = 8000;

/// The position of an intact ring with nothing in flight.
fn position(next_avail: u16) -> Position {
    Position { next_avail, in_flight: 0, unpublished: Vec::new(), is_broken: false }
}

fn wait<T>(answer: &Receiver<T>) -> T {
    answer.recv_timeout(DEADLINE).expect("no answer")
}

fn poll(handle: &dyn TaskHandle) {
    wait(&handle.update(Update::Poll));
}

/// Lets the task complete what it holds.
fn release(fixture: &Fixture, handle: &dyn TaskHandle) {
    *fixture.release.lock().unwrap() = true;
    poll(handle);
}

fn stop(handle: &dyn TaskHandle) -> Stopped {
    wait(&handle.stop())
}

#[test]
fn a_task_is_parked_when_nothing_is_in_flight_and_goes_on() {
    let pool = pool(2);
    let (mut fixture, echo) = task(true);
    let handle = pool.spawn(echo).unwrap();
    fixture.driver.submit(5);
    fixture.driver.kick();
    fixture.wait_popped(5);
    let parked = handle.park();
    poll(&*handle);
    fixture.driver.submit(2);
    fixture.driver.kick();
    poll(&*handle);
    assert_eq!(parked.try_recv(), Err(TryRecvError::Empty), "parked with requests in flight");
    assert!(fixture.popped.try_recv().is_err(), "popped by a task that is to be parked");
    release(&fixture, &*handle);
    assert_eq!(wait(&parked), position(5));
    assert_eq!(fixture.driver.used(), 5);
    let attached = || fixture.seen.attached.load(Ordering::SeqCst);
    let is_dropped = || fixture.seen.dropped.load(Ordering::SeqCst) == 1;
    // An item that came right before the answer can have delayed it.
    assert!(attached() <= 2 && fixture.seen.detached.load(Ordering::SeqCst) == attached() && !is_dropped());
    let attached_before = attached();

    // Changes wait, in their order, and so does a stop.
    let changes = [handle.update(Update::Memory(fixture.driver.view.clone())), handle.update(Update::Poll)];
    let stopped = handle.stop();
    fixture.driver.kick();
    std::thread::sleep(Duration::from_millis(20));
    assert!(changes.iter().all(|change| change.try_recv().is_err()));
    assert!(stopped.try_recv().is_err() && fixture.popped.try_recv().is_err());
    handle.unpark();
    changes.iter().for_each(wait);
    // The worker may have polled it before the stop.
    assert_eq!(wait(&stopped).next_avail, fixture.driver.used());
    assert!(attached() == attached_before + 1 && is_dropped());
    assert_eq!(fixture.seen.memory_changed.load(Ordering::SeqCst), 1);
    assert_eq!(fixture.driver.counters.moves.get(), 0);
}

#[test]
fn a_task_that_is_not_parked_yet_goes_on() {
    let pool = pool(1);
    let (mut fixture, echo) = task_that(true, Next::Waiting);
    let handle = pool.spawn(echo).unwrap();
    // Nothing to go on from.
    handle.unpark();
    for _ in 0..3 {
        fixture.driver.submit(3);
        fixture.driver.kick();
        fixture.wait_popped(3);
        let parked = handle.park();
        poll(&*handle);
        fixture.driver.submit(2);
        poll(&*handle);
        assert!(fixture.popped.try_recv().is_err());
        handle.unpark();
        // It takes what it left in the ring, although no kick comes.
        fixture.wait_popped(2);
        assert_eq!(parked.try_recv(), Err(TryRecvError::Disconnected));
    }
    release(&fixture, &*handle);
    assert_eq!((stop(&*handle).next_avail, fixture.driver.used()), (15, 15));
    assert_eq!(fixture.seen.attached.load(Ordering::SeqCst), 1);
}

#[test]
fn a_stop_goes_before_a_park() {
    let pool = pool(1);
    for stops_first in [false, true] {
        let (mut fixture, echo) = task(true);
        let handle = pool.spawn(echo).unwrap();
        fixture.driver.submit(3);
        fixture.driver.kick();
        fixture.wait_popped(3);
        let (stopped, parked) = if stops_first {
            let stopped = handle.stop();
            (stopped, handle.park())
        } else {
            let parked = handle.park();
            (handle.stop(), parked)
        };
        // This changes nothing for a task that stops.
        handle.unpark();
        release(&fixture, &*handle);
        assert_eq!(wait(&stopped).next_avail, 3);
        assert!(parked.recv_timeout(DEADLINE).is_err());
        assert_eq!(fixture.seen.dropped.load(Ordering::SeqCst), 1);
        // The task is gone.
        assert!(handle.park().recv_timeout(DEADLINE).is_err());
        handle.unpark();
    }
}

/// A task takes the requests along that it keeps, when it is parked and when it moves.
#[test]
fn kept_requests_go_along() {
    let pool = start(&options(2, Poll::Never));
    let (mut fixture, echo) = task_that(true, Next::Throttled { wait_ns: 1_000_000 });
    let handle = pool.executor(1).spawn(echo).unwrap();
    fixture.driver.submit(3);
    fixture.driver.kick();
    fixture.wait_popped(3);
    fixture.seen.keeps.store(2, Ordering::SeqCst);
    let parked = handle.park();
    poll(&*handle);
    assert_eq!(parked.try_recv(), Err(TryRecvError::Empty), "one is not kept");
    fixture.seen.keeps.store(3, Ordering::SeqCst);
    assert_eq!(wait(&parked), Position { in_flight: 3, ..position(3) });
    handle.unpark();
    poll(&*handle);
    pool.move_all(0, 1);
    kickless_testing::eventually("it moves", || fixture.driver.counters.moves.get() == 1);
    // A stop does not leave them.
    let stopped = handle.stop();
    poll(&*handle);
    assert!(stopped.try_recv().is_err());
    fixture.seen.keeps.store(0, Ordering::SeqCst);
    *fixture.release.lock().unwrap() = true;
    assert_eq!((wait(&stopped).next_avail, fixture.driver.used()), (3, 3));
}

/// Completions that cannot be shown are in the position, and the task has them when it goes on.
#[test]
fn unpublished_completions_are_told_and_kept() {
    let pool = pool(1);
    let (mut fixture, echo) = task(true);
    let handle = pool.spawn(echo).unwrap();
    fixture.driver.submit(3);
    fixture.driver.kick();
    fixture.wait_popped(3);
    wait(&handle.update(Update::Memory(std::sync::Arc::default())));
    release(&fixture, &*handle);
    let Position { next_avail, in_flight, unpublished, is_broken } = wait(&handle.park());
    assert_eq!((next_avail, in_flight, is_broken, fixture.driver.used()), (3, 0, false, 0));
    assert_eq!(unpublished.iter().map(|unpublished| unpublished.id).collect::<Vec<_>>(), [0, 1, 2]);
    handle.unpark();
    wait(&handle.update(Update::Memory(fixture.driver.view.clone())));
    assert_eq!((stop(&*handle).unpublished, fixture.driver.used()), (Vec::new(), 3));
}

#[test]
fn a_parked_task_goes_with_its_handle_and_leaves_its_ring() {
    let pool = pool(1);
    let (mut fixture, echo) = task(false);
    fixture.driver.submit(1);
    let handle = pool.spawn(echo).unwrap();
    fixture.wait_popped(1);
    let before = wait(&handle.park());
    let bytes = || {
        let mut ring = vec![0; 0x3000];
        fixture.driver.view.read(kickless_memory::Gpa(0), &mut ring).unwrap();
        ring
    };
    let ring = bytes();
    let change = handle.update(Update::Poll);
    drop(handle);
    assert_eq!((fixture.seen.dropped.load(Ordering::SeqCst), before.next_avail), (1, 1));
    assert!(bytes() == ring, "the ring was used");
    assert!(change.recv_timeout(DEADLINE).is_err());
}

#[test]
fn a_pool_can_end_beside_parked_tasks() {
    let pool = pool(1);
    let (mut fixture, echo) = task(false);
    fixture.driver.submit(1);
    let handle = pool.spawn(echo).unwrap();
    fixture.wait_popped(1);
    wait(&handle.park());
    drop(pool);
    let change = handle.update(Update::Poll);
    assert_eq!(fixture.seen.dropped.load(Ordering::SeqCst), 0);
    handle.unpark();
    assert_eq!(fixture.seen.dropped.load(Ordering::SeqCst), 1);
    assert!(change.recv_timeout(DEADLINE).is_err());
    assert!(handle.park().recv_timeout(DEADLINE).is_err());
}

/// Drivers that kick only if the device wants kicks, and wait for each answer, beside parks and moves. A lost
/// kick blocks its driver for ever.
#[test]
fn no_kick_is_lost_when_tasks_are_parked_and_move() {
    for rule in [Poll::Never, Poll::default(), Poll::Always] {
        let pool = start(&options(3, rule));
        let executor = pool.executor(1);
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let drivers: Vec<_> = (0..QUEUES)
                .map(|queue| {
                    let (mut fixture, echo) = task(false);
                    let handle = executor.spawn(echo).unwrap();
                    scope.spawn(move || {
                        for request in 0..REQUESTS / QUEUES as u16 {
                            let parked = handle.park();
                            fixture.driver.submit_and_kick_if_asked();
                            if request % 3 != 0 {
                                // All that was popped has been completed.
                                let parked = wait(&parked);
                                assert!(request + 1 - parked.next_avail <= 1, "{request} {parked:?}");
                                assert_eq!(fixture.driver.used(), parked.next_avail);
                            }
                            if request % 16 == 0 {
                                drop(handle.update(Update::Poll));
                            }
                            handle.unpark();
                            fixture.wait_popped(1);
                            for _ in 0..(usize::from(request) * 7 + queue) % 41 * 20 {
                                std::hint::spin_loop();
                            }
                        }
                        let expected = REQUESTS / QUEUES as u16;
                        assert_eq!((stop(&*handle).next_avail, fixture.driver.used()), (expected, expected));
                    })
                })
                .collect();
            let mover = scope.spawn(|| {
                for step in 0.. {
                    if is_over.load(Ordering::Relaxed) {
                        return;
                    }
                    pool.move_all(step % 3, (step + 1 + step / 3 % 2) % 3);
                    std::thread::sleep(Duration::from_micros(200));
                }
            });
            drivers.into_iter().for_each(|driver| driver.join().unwrap());
            is_over.store(true, Ordering::Relaxed);
            mover.join().unwrap();
        });
    }
}
