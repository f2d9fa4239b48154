//! Tests which queue is named when a visit blocks its worker.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod echo;

use echo::{DEADLINE, Fixture, options, start, task};
use kickless_worker::Poll;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

/// Twice as long as the shortest stall.
const STALL: Duration = Duration::from_millis(100);

/// Blocks the worker in a visit of this queue, which then pops one chain.
fn block(fixture: &mut Fixture) {
    let before = fixture.seen.kept.load(Ordering::SeqCst);
    let held = fixture.release.lock().unwrap();
    fixture.driver.submit(1);
    fixture.driver.kick();
    let began = Instant::now();
    while fixture.seen.kept.load(Ordering::SeqCst) == before {
        assert!(began.elapsed() < DEADLINE, "the worker does not visit the queue");
        thread::yield_now();
    }
    thread::sleep(STALL);
    drop(held);
    fixture.wait_popped(1);
}

#[test]
fn the_queue_that_blocks_its_worker_again_is_counted() {
    let pool = start(&options(1, Poll::default()));
    let ((mut blocks, blocking), (mut works, working)) = (task(false), task(false));
    let _first = pool.executor(1).spawn(blocking).unwrap();
    let _second = pool.executor(1).spawn(working).unwrap();
    let stalls = |fixture: &Fixture| fixture.driver.counters.stalls.get();
    block(&mut blocks);
    assert_eq!(stalls(&blocks), 0, "visits are timed after a stall");
    for round in 1..=3 {
        works.driver.submit(1);
        works.driver.kick();
        works.wait_popped(1);
        block(&mut blocks);
        // The next visit comes after the count.
        works.driver.submit(1);
        works.driver.kick();
        works.wait_popped(1);
        assert_eq!((stalls(&blocks), stalls(&works)), (round, 0));
    }
}
