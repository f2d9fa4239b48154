//! Tests one queue of our driver with several threads. Some sleep on `Events`; others wait, block, await or
//! poll. No wake-up may be lost.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use kickless_driver::{Choice, Disk, Events, Options, Queue, Request};
use kickless_tests::block_on::block_on;
use kickless_tests::daemon::{Daemon, DaemonConfig};
use kickless_tests::hostile_backend::returns_in_time;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

fn serve(disk: &str) -> Daemon {
    Daemon::start(&DaemonConfig::new(disk)).unwrap()
}

/// Returns each combination of ring format and EVENT_IDX.
fn shapes() -> impl Iterator<Item = (Choice, Choice)> {
    [Choice::Off, Choice::On]
        .into_iter()
        .flat_map(|packed| [Choice::Off, Choice::On].map(|event_idx| (packed, event_idx)))
}

fn connect(daemon: &Daemon, (packed, event_idx): (Choice, Choice)) -> Disk {
    let options = Options { queues: 1, packed, event_idx, ..Options::new(daemon.socket()) };
    let disk = Disk::connect(options).unwrap();
    // The back-end calls once when a ring starts.
    disk.flush().unwrap();
    disk
}

/// Sleeps on the descriptor. Returns whether it became readable.
fn sleep(events: &Events, limit: Duration) -> bool {
    let limit = Timespec::try_from(limit).unwrap();
    poll(&mut [PollFd::new(events, PollFlags::IN)], Some(&limit)).unwrap() == 1
}

fn read(disk: &Disk, token: u64) -> Request {
    Request::read(token * 512, disk.buffer(512).unwrap()).token(token)
}

const LONG: Duration = Duration::from_secs(30);
const AT_ONCE: Duration = Duration::ZERO;

/// Sleeps until it has taken one completion.
fn take_one(queue: &Queue, events: &Events) {
    while queue.poll(1, drop).unwrap() == 0 {
        assert!(!events.arm() || sleep(events, LONG), "lost");
    }
}

/// Runs `other` on a queue with one request in flight and one sleeper. The sleeper must wake.
fn while_one_sleeps(other: impl Fn(&Disk, &Queue) + Send + 'static) {
    returns_in_time(move || {
        let daemon = serve("fault:delay=100ms@read:mem:1M");
        for shape in shapes() {
            let disk = connect(&daemon, shape);
            let queue = disk.queue(0);
            let events = queue.events().unwrap();
            queue.submit_one(read(&disk, 1)).unwrap();
            assert!(events.arm());
            other(&disk, &queue);
            assert!(sleep(&events, LONG), "{shape:?}: lost");
            take_one(&queue, &events);
        }
    });
}

/// Another thread polls without success and does not poll again.
#[test]
fn an_empty_poll_does_not_lose_a_wake_up() {
    while_one_sleeps(|_, queue| {
        thread::scope(|scope| {
            scope.spawn(|| assert_eq!(queue.poll(8, drop).unwrap(), 0));
        });
    });
}

/// Another thread waits for a completion, takes it, and does not come back.
#[test]
fn a_wait_does_not_lose_a_wake_up() {
    while_one_sleeps(|disk, queue| {
        assert_eq!(queue.wait(1, Some(LONG), drop).unwrap(), 1);
        queue.submit_one(read(disk, 2)).unwrap();
    });
}

/// Two completions come together. One sleeper takes one, arms its descriptor, and does not come back. The
/// other sleeper must wake.
#[test]
fn a_completion_left_by_one_sleeper_wakes_another() {
    returns_in_time(|| {
        let daemon = serve("mem:1M");
        for shape in shapes() {
            let disk = connect(&daemon, shape);
            let queue = disk.queue(0);
            let [first, second] = [(); 2].map(|()| queue.events().unwrap());
            for _ in 0..20 {
                assert!(first.arm() && second.arm());
                queue.submit(&mut vec![read(&disk, 1), read(&disk, 2)]).unwrap();
                assert!(sleep(&first, LONG), "{shape:?}: lost");
                take_one(&queue, &first);
                if first.arm() {
                    // In this case the second completion had not come yet.
                    assert!(sleep(&second, LONG), "{shape:?}: lost");
                } else {
                    assert!(sleep(&second, AT_ONCE), "{shape:?}: taken away");
                }
                while queue.poll(1, drop).unwrap() == 0 {}
            }
        }
    });
}

/// The end of the disk wakes all sleepers.
#[test]
fn the_end_wakes_all_sleepers() {
    returns_in_time(|| {
        let daemon = serve("fault:delay=60s@read:mem:1M");
        let disk = connect(&daemon, (Choice::Off, Choice::On));
        let queue = disk.queue(0);
        let all = [(); 3].map(|()| queue.events().unwrap());
        queue.submit_one(read(&disk, 1)).unwrap();
        assert!(all.iter().all(Events::arm));
        disk.unplug();
        assert!(all.iter().all(|events| sleep(events, LONG) && !events.arm()));
        assert_eq!(queue.poll(8, |done| assert!(done.result.is_err())).unwrap(), 1);
    });
}

/// In each round, three sleepers and a waiting thread take one completion each. Another thread polls and
/// submits again what it takes. Optionally, one thread blocks and one awaits futures.
fn rounds(disk: &Disk, (blocking, futures): (bool, bool)) {
    const SLEEPERS: usize = 3;
    let queue = disk.queue(0);
    let (barrier, over) = (Barrier::new(SLEEPERS + 1), AtomicBool::new(false));
    let is_over = || over.load(Ordering::Relaxed);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over() {
                let each = |done: kickless_driver::Completion| {
                    queue.submit_one(Request::read(0, done.data).token(done.token)).unwrap();
                };
                if queue.poll(1, each).unwrap() == 0 {
                    thread::sleep(Duration::from_micros(50));
                }
            }
        });
        scope.spawn(|| {
            while blocking && !is_over() {
                disk.read_at(&mut [0; 512], 0).unwrap();
                thread::sleep(Duration::from_micros(100));
            }
        });
        scope.spawn(|| {
            while futures && !is_over() {
                block_on(disk.read(0, disk.buffer(512).unwrap())).unwrap();
                thread::sleep(Duration::from_micros(100));
            }
        });
        let sleepers: Vec<_> = (0..SLEEPERS)
            .map(|_| {
                scope.spawn(|| {
                    let events = queue.events().unwrap();
                    for _ in 0..100 {
                        barrier.wait();
                        queue.submit_one(read(disk, 1)).unwrap();
                        take_one(&queue, &events);
                    }
                })
            })
            .collect();
        for _ in 0..100 {
            barrier.wait();
            queue.submit_one(read(disk, 1)).unwrap();
            assert_eq!(queue.wait(1, Some(LONG), drop).unwrap(), 1, "lost");
        }
        sleepers.into_iter().for_each(|sleeper| sleeper.join().unwrap());
        over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn sleepers_waiters_and_pollers_share_a_queue() {
    returns_in_time(|| {
        let daemon = serve("mem:1M");
        for shape in shapes() {
            let disk = connect(&daemon, shape);
            // From the first future on, a thread of the disk hands out all completions.
            for others in [(false, false), (true, false), (true, true)] {
                rounds(&disk, others);
            }
        }
    });
}
