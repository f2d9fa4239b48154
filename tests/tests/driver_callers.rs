//! Tests how our driver handles its callers: callbacks that panic, endless timeouts, impossible ranges.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::Duration;

use kickless_driver::{Choice, Disk, Error, Options, Request};
use kickless_spec::blk::BlkFeatures;
use kickless_spec::features::Features;
use kickless_spec::vhost_user::FrontendRequest as Code;
use kickless_tests::disk_size::wait_for_size;
use kickless_tests::hostile_backend::faults::{AnswerFault, DISK_LEN, RingFault, Rules};
use kickless_tests::hostile_backend::{HostileBackend, returns_in_time};

fn options(backend: &HostileBackend) -> Options {
    Options { queues: 1, queue_size: 8, buffer_memory: 2 << 20, ..Options::new(backend.socket()) }
}

#[test]
fn endless_timeouts_work() {
    returns_in_time(|| {
        let backend = HostileBackend::start(Rules::default()).unwrap();
        let disk = Disk::connect(Options {
            reconnect_limit: Duration::MAX,
            connect_timeout: Duration::MAX,
            reply_timeout: Duration::MAX,
            ..options(&backend)
        })
        .unwrap();
        for _ in 0..3 {
            backend.drop_connection();
            disk.read_at(&mut [0; 512], 0).unwrap();
        }
        assert_eq!(backend.faults(), [""; 0]);
    });
}

#[test]
fn a_silent_back_end_uses_up_the_reconnect_time() {
    returns_in_time(|| {
        let backend = HostileBackend::start(Rules::default()).unwrap();
        let disk = Disk::connect(Options {
            reconnect_limit: Duration::from_millis(50),
            reply_timeout: Duration::MAX,
            ..options(&backend)
        })
        .unwrap();
        backend.rules().answers = vec![(Code::GetFeatures, AnswerFault::Silence)];
        backend.drop_connection();
        assert!(matches!(disk.read_at(&mut [0; 512], 0), Err(Error::Dead(_))));
        assert!(matches!(&*disk.failure().unwrap(), Error::Gone { .. }));
    });
}

#[test]
fn a_panic_in_a_poller_leaves_the_disk_usable() {
    returns_in_time(|| {
        let backend = HostileBackend::start(Rules::default()).unwrap();
        let disk = Disk::connect(options(&backend)).unwrap();
        let queue = disk.queue(0);
        let read = |token| Request::read(0, disk.buffer(512).unwrap()).token(token);
        queue.submit_or_wait(&mut vec![read(1), read(2)]).unwrap();
        for token in [1, 2] {
            let taken = catch_unwind(AssertUnwindSafe(|| {
                queue.wait(1, None, |completion| {
                    assert_eq!(completion.token, token);
                    panic!("on purpose");
                })
            }));
            assert!(taken.is_err());
        }
        assert_eq!(queue.in_flight(), 0);
        // The thread does not count as inside a callback any more.
        disk.read_at(&mut [0; 512], 0).unwrap();
    });
}

#[test]
fn a_report_of_a_change_wakes_a_sleeper() {
    returns_in_time(|| {
        let backend = HostileBackend::start(Rules::default()).unwrap();
        let disk = Disk::connect(options(&backend)).unwrap();
        backend.rules().config.capacity = 8.into();
        thread::scope(|scope| {
            let sleeper = scope.spawn(|| wait_for_size(&disk, 4096));
            // Announces a change of the configuration space: the back-end's message 2, version 1.
            let message: Vec<u8> = [2u32, 1, 0].into_iter().flat_map(u32::to_le_bytes).collect();
            while backend.send_on_channel(&message).is_err() {
                thread::yield_now();
            }
            sleeper.join().unwrap().unwrap();
        });
        assert_eq!(disk.config_changes(), 1);
    });
}

#[test]
fn a_wrong_range_changes_nothing() {
    returns_in_time(|| {
        let rules = Rules::default();
        let blk = BlkFeatures::DISCARD | BlkFeatures::WRITE_ZEROES;
        let features = rules.features | Features::from_bits_retain(blk.bits());
        let backend = HostileBackend::start(Rules { features, ..rules }).unwrap();
        let disk = Disk::connect(options(&backend)).unwrap();
        let mut bytes = vec![7; DISK_LEN];
        let len = DISK_LEN as u64;
        for refused in [
            disk.write_at(&bytes, 512),
            disk.write_at(&bytes[1..], 0),
            disk.read_at(&mut bytes, 512),
            disk.discard(512, len),
            disk.discard(u64::MAX - 511, len),
            disk.write_zeroes(512, len, false),
        ] {
            assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
        }
        assert_eq!(backend.requests(), 0);
    });
}

#[test]
fn requests_without_room_stay_in_the_batch() {
    returns_in_time(|| {
        // The back-end completes no request, so that the ring stays full.
        let backend =
            HostileBackend::start(Rules { ring: Some((0, RingFault::Silence)), ..Rules::default() }).unwrap();
        let disk = Disk::connect(Options { indirect: Choice::On, ..options(&backend) }).unwrap();
        let queue = disk.queue(0);
        let read = |token| Request::read(0, disk.buffer(512).unwrap()).token(token);
        let mut batch: Vec<Request> = (0..64).map(read).collect();
        thread::scope(|scope| {
            let submitter = scope.spawn(|| queue.submit_or_wait(&mut batch));
            while backend.requests() == 0 {
                thread::yield_now();
            }
            disk.unplug();
            assert!(matches!(submitter.join().unwrap(), Err(Error::Dead(_))));
        });
        let mut done = 0;
        while queue.poll(64, |_| done += 1).is_ok() {}
        assert_eq!(done + batch.len(), 64);
    });
}

#[test]
fn kept_completions_do_not_wake_sleepers() {
    returns_in_time(|| {
        let backend = HostileBackend::start(Rules::default()).unwrap();
        let disk = Disk::connect(options(&backend)).unwrap();
        let read = Request::read(0, disk.buffer(512).unwrap());
        disk.queue(0).submit_one(read.token(1)).unwrap();
        // The blocking read also finds the other completion. The queue keeps it from now on.
        disk.read_at(&mut [0; 512], 0).unwrap();
        backend.rules().ring = Some((2, RingFault::Silence));
        thread::scope(|scope| {
            let reader = scope.spawn(|| disk.read_at(&mut [0; 512], 0));
            while backend.requests() < 3 {
                thread::yield_now();
            }
            // Only the thread that waits can notice the closed connection.
            backend.rules().ring = None;
            backend.drop_connection();
            reader.join().unwrap().unwrap();
        });
        assert_eq!(disk.queue(0).poll(1, |completion| assert_eq!(completion.token, 1)).unwrap(), 1);
    });
}
