//! Injected faults: what a file makes of each, and that they come as they were ordered.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{Random, Worker, guest, image, options};
use kickless_disk::{Cache, Disk, DiskSpec, Error, IoError, Request, Step};
use kickless_io::{EngineKind, Errno};
use kickless_memory::Gpa;
use std::time::{Duration, Instant};
use tempfile::NamedTempFile;

const ENGINES: [EngineKind; 3] = [EngineKind::Uring, EngineKind::Aio, EngineKind::Threads];
const EIO: Result<(), IoError> = Err(IoError::Os(Errno::IO));

fn open(rules: &str, under: DiskSpec, cache: Cache) -> Result<Disk, Error> {
    Disk::open(&DiskSpec::Fault(rules.parse().unwrap(), Box::new(under)), &options(cache, false))
}

fn faulty(rules: &str, image: &NamedTempFile, cache: Cache) -> Disk {
    open(rules, DiskSpec::File(image.path().into()), cache).unwrap()
}

/// With each engine, with and without the cache, on a disk of this many random bytes.
fn on_each(rules: &str, len: u64, each: impl Fn(&mut Worker<'_>, Vec<u8>)) {
    for kind in ENGINES {
        for cache in [Cache::None, Cache::Writeback] {
            let contents = Random(5).bytes(len);
            let image = image(&contents);
            let disk = faulty(rules, &image, cache);
            each(&mut Worker::new(&disk, kind, 4), contents);
        }
    }
}

#[test]
fn errors_where_they_were_ordered() {
    on_each("eio@read+4-7,enospc@write+nth=2,eio@flush", 64 << 10, |worker, contents| {
        assert_eq!(worker.read(0, 2048), (Ok(()), contents[..2048].to_vec()));
        assert_eq!(worker.read(0, 4096).0, EIO);
        assert_eq!(worker.read(7 * 512, 4096).0, EIO);
        assert_eq!(worker.read(8 * 512, 4096), (Ok(()), contents[4096..8192].to_vec()));
        assert_eq!(worker.write(0, &[1; 4096], 0), Ok(()));
        assert_eq!(worker.write(8192, &[2; 4096], 0), Err(IoError::Os(Errno::NOSPC)));
        assert_eq!(worker.write(0, &[3; 512], 0), Ok(()));
        assert_eq!(worker.flush(), EIO);
        // What failed was not done.
        assert_eq!(worker.read(8192, 4096), (Ok(()), contents[8192..12288].to_vec()));
        assert_eq!(worker.read(0, 1024).1, [[3; 512], [1; 512]].concat());
    });
}

/// Fails if a short transfer is taken for a whole one, or continued in the wrong place.
#[test]
fn short_transfers_are_continued() {
    on_each("short@70%", 256 << 10, |worker, mut contents| {
        let mut random = Random(9);
        for round in 0..40 {
            let len = 512 * random.from(1..200);
            let at = 512 * random.from(0..512 - len / 512);
            let misaligned = [0, 512, 1][round % 3];
            let range = at as usize..(at + len) as usize;
            if round % 2 == 0 {
                let bytes = random.bytes(len);
                assert_eq!(worker.write(at, &bytes, misaligned), Ok(()));
                contents[range].copy_from_slice(&bytes);
            } else {
                let (result, bytes) = worker.read_into(at, len as usize, misaligned);
                assert_eq!(result, Ok(()));
                assert!(bytes == contents[range], "round {round}");
            }
        }
        assert!(worker.read(0, contents.len()) == (Ok(()), contents));
    });
}

#[test]
fn again_is_tried_again() {
    on_each("eagain@90%", 64 << 10, |worker, contents| {
        assert_eq!(worker.write(0, &contents[4096..8192], 0), Ok(()));
        assert_eq!(worker.read(0, 4096), (Ok(()), contents[4096..8192].to_vec()));
    });
}

#[test]
fn again_is_not_tried_for_ever() {
    let image = image(&[1; 4096]);
    let disk = faulty("eagain@read", &image, Cache::None);
    let mut worker = Worker::new(&disk, EngineKind::Threads, 4);
    assert_eq!(worker.read(0, 512).0, Err(IoError::Stuck));
    assert_eq!(worker.write(0, &[1; 512], 0), Ok(()));
}

#[test]
fn delays_delay_and_no_longer_than_that() {
    on_each("delay=20ms-30ms@read", 4096, |worker, contents| {
        let started = Instant::now();
        assert_eq!(worker.read(0, 4096), (Ok(()), contents));
        assert!(started.elapsed() >= Duration::from_millis(20));
    });
}

/// The first of two is the second to come back.
#[test]
fn later_ones_overtake() {
    let image = image(&Random(5).bytes(8192));
    let disk = faulty("delay=60s@nth=1,reorder@nth=2", &image, Cache::None);
    let mut worker = Worker::new(&disk, EngineKind::Threads, 1).with_slots(3);
    let map = guest(3 * 4096);
    for slot in 0..3 {
        worker.io(slot).buffers_mut().push(&map, Gpa(slot as u64 * 4096), 512).unwrap();
        let step = worker.start(slot, Request::Read { offset: 512 * slot as u64 });
        assert_eq!(step, if slot == 2 { Step::Pending } else { Step::Busy });
    }
    let mut order = Vec::new();
    while order.len() < 2 {
        order.extend(worker.turn());
    }
    assert_eq!(order, [(2, Ok(())), (1, Ok(()))]);
    // The one that waits a minute is given up with the disk.
}

#[test]
fn disks_that_answer_at_once_fail_and_wait_too() {
    for under in [DiskSpec::Null(1 << 20), DiskSpec::Memory(1 << 20)] {
        let disk = open("eio@0-7,delay=5ms@write,reorder@flush", under.clone(), Cache::None).unwrap();
        let mut worker = Worker::new(&disk, EngineKind::Threads, 4);
        assert_eq!(worker.read(0, 512).0, EIO);
        let started = Instant::now();
        assert_eq!(worker.write(4096, &[7; 4096], 0), Ok(()));
        assert!(started.elapsed() >= Duration::from_millis(5));
        assert_eq!(worker.flush(), Ok(()));
        let (result, bytes) = worker.read(4096, 512);
        assert_eq!(result, Ok(()));
        assert!(matches!(under, DiskSpec::Null(_)) || bytes == [7; 512]);
        for rules in ["short@1%", "eagain"] {
            let refused = open(rules, under.clone(), Cache::None).unwrap_err();
            assert!(matches!(refused, Error::Fault { .. }), "{refused}");
        }
    }
}
