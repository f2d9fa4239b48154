//! Cancels requests of qcow2 images.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use common::qcow2::{Image, check};
use common::{Worker, guest, options};
use kickless_disk::{Cache, Disk, DiskSpec, Extent, IoError, Request, Step};
use kickless_io::{EngineKind, Errno};
use kickless_memory::{Gpa, Marks};
use kickless_testing::Random;
use std::path::PathBuf;
use std::thread;

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
                worker.submit_table_ops();
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
                worker.submit_table_ops();
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

/// Runs rounds of random requests of all kinds on a worker. Returns the results. A worker that cancels does
/// so once in each round.
fn rounds(disk: &Disk, kind: EngineKind, mut random: Random, cancels: bool) -> Vec<Result<(), IoError>> {
    const SLOTS: usize = 8;
    let (mut worker, view) = (Worker::new(disk, kind, 8).with_slots(SLOTS), guest(4 * CLUSTER));
    let mut all = Vec::new();
    for _ in 0..60 {
        let (mut started, mut ended) = (0, 0);
        for slot in 0..SLOTS {
            let at = 512 * random.from(0..(COUNT - 2) * CLUSTER / 512);
            let len = 512 * random.from(1..2 * CLUSTER / 512);
            let durable = random.from(0..2) == 0;
            let request = match random.from(0..6) {
                0 => Request::Flush,
                1 => Request::Discard { durable },
                2 => Request::WriteZeroes { durable },
                3 => Request::Read { offset: at },
                _ => Request::Write { offset: at, durable },
            };
            match request {
                Request::Read { .. } | Request::Write { .. } => {
                    worker.io(slot).buffers_mut().push(&view, Gpa(0), len as u32).unwrap();
                }
                Request::Flush => {}
                _ => worker.io(slot).extents_mut().push(Extent {
                    offset: at,
                    len,
                    unmap: at.is_multiple_of(1024),
                }),
            }
            match worker.start(slot, request) {
                Step::Done(result) => all.push(result),
                _ => started += 1,
            }
        }
        let turns_before = if cancels { random.from(0..4) } else { u64::MAX };
        for turn in 0.. {
            if turn == turns_before {
                worker.cancel();
            }
            if ended == started {
                break;
            }
            let results = worker.turn();
            ended += results.len();
            all.extend(results.into_iter().map(|(_, result)| result));
        }
        assert_eq!(ended, started);
        (0..SLOTS).for_each(|slot| worker.io(slot).buffers_mut().clear(&mut Marks::off()));
    }
    all
}

/// Cancels requests of all kinds at random moments, of one of two queues. Each ends exactly once. Afterwards
/// the image is whole, and the disk works.
#[test]
fn requests_of_all_kinds() {
    for (kind, seed) in ENGINES.into_iter().zip(1..) {
        let contents = Random(3).bytes(COUNT * CLUSTER);
        let (_image, path) = chain(&contents);
        let disk = open(path.clone());
        disk.reload(false).unwrap();
        let [first, second] = thread::scope(|scope| {
            [true, false]
                .map(|cancels| {
                    let disk = &disk;
                    scope.spawn(move || rounds(disk, kind, Random(seed + u64::from(cancels)), cancels))
                })
                .map(|thread| thread.join().unwrap())
        });
        let cancelled = first.iter().filter(|result| **result == CANCELLED).count();
        assert!(cancelled > 20, "{kind:?}: only {cancelled} requests were cancelled");
        assert!(first.iter().all(|result| [Ok(()), CANCELLED].contains(result)), "{kind:?}: {first:?}");
        assert!(second.iter().all(|result| *result == Ok(())), "{kind:?}: {second:?}");
        let mut worker = Worker::new(&disk, kind, 8);
        assert_eq!(worker.write(0, &contents, 0), Ok(()));
        assert!(worker.read(0, contents.len()) == (Ok(()), contents), "{kind:?}");
        drop(worker);
        disk.write_back().unwrap();
        check(&path);
    }
}
