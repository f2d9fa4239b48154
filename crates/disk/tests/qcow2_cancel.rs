//! Cancels requests of qcow2 images.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]
#![cfg(feature = "qcow2")]

mod common;

use common::qcow2::{Image, check};
use common::{Worker, guest, options};
use kickless_disk::{Cache, Disk, DiskSpec, Extent, IoError, Request, Step};
use kickless_io::{EngineKind, Errno};
use kickless_memory::{Gpa, Marks};
use kickless_testing::Random;
use std::path::PathBuf;

const ENGINES: [EngineKind; 3] = [EngineKind::Uring, EngineKind::Aio, EngineKind::Threads];
const CANCELLED: Result<(), IoError> = Err(IoError::Os(Errno::CANCELED));
const CLUSTER: u64 = 64 << 10;
const COUNT: u64 = 16;

/// Makes an image over a compressed one with these contents. Returns its path.
fn chain(contents: &[u8]) -> (Image, PathBuf) {
    let image = Image::of(contents, &["-c"]);
    image.img(&["create", "-q", "-f", "qcow2", "-b", "disk.qcow2", "-F", "qcow2", "top"]);
    let path = image.dir.path().join("top");
    (image, path)
}

fn open(path: PathBuf) -> Disk {
    Disk::open(&DiskSpec::Qcow2(path), &options(Cache::Writeback, false)).unwrap()
}

/// Runs turns until nothing is in flight. Returns the results of requests that end.
fn settle(worker: &mut Worker<'_>) -> Vec<Result<(), IoError>> {
    let mut results = Vec::new();
    while worker.in_flight() > 0 {
        results.extend(worker.turn().into_iter().map(|(_, result)| result));
    }
    results
}

/// A request waits for a table, which its queue reads. Both end, and a later request reads the table.
#[test]
fn a_request_that_waits_for_a_table() {
    for kind in ENGINES {
        let contents = Random(1).bytes(COUNT * CLUSTER);
        let (_image, path) = chain(&contents);
        let disk = open(path);
        let mut worker = Worker::new(&disk, kind, 8);
        let view = guest(4096);
        for is_sent in [false, true] {
            worker.io(0).buffers_mut().push(&view, Gpa(0), 4096).unwrap();
            assert_eq!(worker.start(0, Request::Read { offset: 0 }), Step::Busy);
            if is_sent {
                worker.submit_own();
            }
            worker.cancel();
            assert_eq!(worker.finish(), CANCELLED, "{kind:?}");
            worker.io(0).buffers_mut().clear(&mut Marks::off());
        }
        assert!(worker.read(0, contents.len()) == (Ok(()), contents), "{kind:?}");
    }
}

/// A queue stops while it writes a table that a request of another queue has changed too. The other queue
/// then writes it.
#[test]
fn another_queue_writes_the_table() {
    for kind in ENGINES {
        let image = Image::of(&Random(2).bytes(CLUSTER), &[]);
        image.img(&["resize", "-q", "-f", "qcow2", "disk.qcow2", "1M"]);
        let disk = open(image.path());
        let [mut first, mut second] = [(); 2].map(|()| Worker::new(&disk, kind, 8));
        assert_eq!(first.write(CLUSTER, &[1; 4096], 0), Ok(()));
        assert_eq!(settle(&mut first), []);
        let view = guest(4096);
        view.map().write(Gpa(0), &[7; 4096]).unwrap();
        for (worker, at) in [(&mut first, 2), (&mut second, 3)] {
            worker.io(0).buffers_mut().push(&view, Gpa(0), 4096).unwrap();
            let write = Request::Write { offset: at * CLUSTER, durable: false };
            assert_eq!(worker.start(0, write), Step::Pending, "{kind:?}");
            if at == 2 {
                worker.submit_own();
            }
        }
        first.cancel();
        assert_eq!(settle(&mut first), [CANCELLED], "{kind:?}");
        assert_eq!(second.finish(), Ok(()), "{kind:?}");
        for worker in [&mut first, &mut second] {
            worker.io(0).buffers_mut().clear(&mut Marks::off());
        }
        drop((first, second));
        assert!(image.contents()[3 * CLUSTER as usize..][..4096] == [7; 4096], "{kind:?}");
    }
}

/// Cancels requests of all kinds at random moments, of one of two queues. Each ends exactly once. Afterwards
/// the image is whole, and the disk works.
#[test]
fn requests_of_all_kinds() {
    const SLOTS: usize = 8;
    for (kind, seed) in ENGINES.into_iter().zip(1..) {
        let contents = Random(3).bytes(COUNT * CLUSTER);
        let (_image, path) = chain(&contents);
        let disk = open(path.clone());
        let mut workers = [(); 2].map(|()| Worker::new(&disk, kind, 8).with_slots(SLOTS));
        let (mut random, view) = (Random(seed), guest(4 * CLUSTER));
        let mut cancelled = 0;
        for _ in 0..60 {
            let mut started = [0; 2];
            let mut results = [(); 2].map(|()| Vec::new());
            for (worker, started) in workers.iter_mut().zip(&mut started) {
                for slot in 0..SLOTS {
                    let at = 512 * random.from(0..(COUNT - 2) * CLUSTER / 512);
                    let len = 512 * random.from(1..2 * CLUSTER / 512);
                    let request = match random.from(0..6) {
                        0 => Request::Flush,
                        1 => Request::Discard { durable: random.from(0..2) == 0 },
                        2 => Request::WriteZeroes { durable: random.from(0..2) == 0 },
                        3 => Request::Read { offset: at },
                        _ => Request::Write { offset: at, durable: random.from(0..2) == 0 },
                    };
                    match request {
                        Request::Read { .. } | Request::Write { .. } => {
                            worker.io(slot).buffers_mut().push(&view, Gpa(0), len as u32).unwrap();
                        }
                        Request::Flush => {}
                        _ => worker.io(slot).extents_mut().push(Extent {
                            offset: at,
                            len,
                            unmap: at % 1024 == 0,
                        }),
                    }
                    *started += usize::from(!matches!(worker.start(slot, request), Step::Done(_)));
                }
            }
            for _ in 0..random.from(0..4) {
                for (worker, results) in workers.iter_mut().zip(&mut results) {
                    if worker.in_flight() > 0 {
                        results.extend(worker.turn());
                    }
                }
            }
            workers[0].cancel();
            for (which, worker) in workers.iter_mut().enumerate() {
                while results[which].len() < started[which] {
                    results[which].extend(worker.turn());
                }
                assert_eq!(results[which].len(), started[which], "{kind:?}");
                (0..SLOTS).for_each(|slot| worker.io(slot).buffers_mut().clear(&mut Marks::off()));
            }
            cancelled += results[0].iter().filter(|(_, result)| *result == CANCELLED).count();
            assert!(results[1].iter().all(|(_, result)| *result == Ok(())), "{kind:?}: {:?}", results[1]);
        }
        assert!(cancelled > 20, "{kind:?}: only {cancelled} requests were cancelled");
        let [mut first, mut second] = workers;
        assert_eq!(first.write(0, &contents, 0), Ok(()));
        assert!(second.read(0, contents.len()) == (Ok(()), contents), "{kind:?}");
        drop((first, second));
        disk.write_back().unwrap();
        check(&path);
    }
}
