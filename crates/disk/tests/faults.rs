//! Injected faults: what a file makes of each, and that they come as they were ordered.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use common::{Worker, guest, image, options};
use kickless_disk::{Cache, Disk, DiskSpec, Error, Extent, IoError, Request, Step};
use kickless_io::{EngineKind, Errno};
use kickless_memory::Gpa;
use kickless_testing::Random;
use std::cell::RefCell;
use std::collections::HashSet;
use std::fs;
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
        for misaligned in [0, 1] {
            assert_eq!(worker.read_into(0, 4096, misaligned).0, EIO);
        }
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
    // At random between the two: ten of them make five, more or less.
    on_each("delay=0us-10ms", 4096, |worker, contents| {
        let started = Instant::now();
        (0..10).for_each(|_| assert_eq!(worker.read(0, 512), (Ok(()), contents[..512].to_vec())));
        assert!(started.elapsed() >= Duration::from_millis(20));
    });
}

/// Starts three reads, of which these have to wait; the first `count` that are over, in order.
fn order(rules: &str, busy: [bool; 3], count: usize) -> Vec<usize> {
    let image = image(&Random(5).bytes(8192));
    let disk = faulty(rules, &image, Cache::None);
    let mut worker = Worker::new(&disk, EngineKind::Threads, 1).with_slots(3);
    let map = guest(3 * 4096);
    for (slot, busy) in busy.into_iter().enumerate() {
        worker.io(slot).buffers_mut().push(&map, Gpa(slot as u64 * 4096), 512).unwrap();
        let step = worker.start(slot, Request::Read { offset: 512 * slot as u64 });
        assert_eq!(step, if busy { Step::Busy } else { Step::Pending });
    }
    let mut order = Vec::new();
    while order.len() < count {
        order.extend(worker.turn().into_iter().map(|(slot, result)| {
            assert_eq!(result, Ok(()));
            slot
        }));
    }
    order
}

#[test]
fn later_ones_overtake() {
    // The one that waits a minute is given up with the disk.
    assert_eq!(order("delay=60s@nth=1,reorder@nth=2", [true, true, false], 2), [2, 1]);
    // It goes on with the one that has overtaken it, and not when nobody can any more.
    assert_eq!(order("reorder@nth=1,delay=1ms@nth=3", [true, false, true], 3), [1, 0, 2]);
}

/// An operation that the engine has no room for is rolled for once, and stays whole until it has.
#[test]
fn a_full_engine_is_no_second_chance() {
    let contents = Random(5).bytes(3 * 8192);
    let image = image(&contents);
    for (rules, results) in [
        ("eio@nth=3", [Ok(()), Ok(()), EIO]),
        ("eio@nth=2", [Ok(()), EIO, Ok(())]),
        ("eagain@nth=2,eio@nth=4", [Ok(()), Ok(()), EIO]),
        // What is left of it is the third.
        ("short@nth=2,eio@nth=4", [Ok(()), Ok(()), EIO]),
    ] {
        let disk = faulty(rules, &image, Cache::None);
        let mut worker = Worker::new(&disk, EngineKind::Threads, 1).with_slots(3);
        let map = guest(3 * 8192);
        let start = |worker: &mut Worker<'_>, slot: usize| {
            let at = slot as u64 * 8192;
            worker.io(slot).buffers_mut().push(&map, Gpa(at), 8192).unwrap();
            worker.start(slot, Request::Read { offset: at })
        };
        assert_eq!((start(&mut worker, 0), start(&mut worker, 1)), (Step::Pending, Step::Busy));
        let mut over = Vec::new();
        while over.len() < 2 {
            over.extend(worker.turn());
        }
        assert_eq!(start(&mut worker, 2), Step::Pending);
        while over.len() < 3 {
            over.extend(worker.turn());
        }
        let found: Vec<_> = over.iter().map(|(_, result)| *result).collect();
        assert_eq!(found, results, "{rules}");
        for (slot, _) in over.iter().filter(|(_, result)| result.is_ok()) {
            let mut read = vec![0; 8192];
            map.read(Gpa(*slot as u64 * 8192), &mut read).unwrap();
            assert!(read == contents[slot * 8192..][..8192], "{rules}: {slot}");
        }
    }
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
            let Error::Fault { fault, .. } = refused else { panic!("{refused}") };
            assert!(rules.starts_with(fault));
        }
        let faulty = DiskSpec::Fault("eio".parse().unwrap(), Box::new(under));
        assert!(matches!(open("eio", faulty, Cache::None), Err(Error::FaultsTwice)));
    }
}

/// Through the guest's buffers and through ours: what is left of a short transfer is an operation of its own.
#[test]
fn a_short_transfer_leaves_something() {
    for misaligned in [0, 1] {
        on_each("short@read+nth=1,eio@read+nth=2", 64 << 10, |worker, _| {
            assert_eq!(worker.read_into(0, 64 << 10, misaligned).0, EIO);
        });
        let lens = RefCell::new(HashSet::new());
        for seed in 1..9 {
            let rules = format!("seed={seed},short@write+nth=1,eio@write+nth=2");
            on_each(&rules, 64 << 10, |worker, contents| {
                let written: Vec<u8> = contents.iter().map(|byte| !byte).collect();
                assert_eq!(worker.write(0, &written, misaligned), EIO);
                let found = worker.read(0, contents.len()).1;
                let len = found.iter().zip(&written).take_while(|(found, written)| found == written).count();
                assert!(len > 0 && len < contents.len() && found[len..] == contents[len..], "{len}");
                lens.borrow_mut().insert(len);
            });
            // Through the cache a sector is the least part, and so the only one of two sectors.
            let image = image(&[0; 1024]);
            let disk = faulty(&rules, &image, Cache::Writeback);
            assert_eq!(Worker::new(&disk, EngineKind::Threads, 4).write(0, &[1; 1024], misaligned), EIO);
            assert!(fs::read(image.path()).unwrap() == [[1; 512], [0; 512]].concat(), "{rules}");
        }
        assert!(lens.borrow().len() > 1, "always the same part");
    }
}

#[test]
fn extents_fail_by_kind_and_place() {
    let rules = "eio@discard+8-15,enospc@zeroes+16-23,eio@erase";
    let on = |worker: &mut Worker<'_>, request, sectors: &[u64]| {
        let extents = sectors.iter().map(|sector| Extent { offset: sector * 512, len: 4096, unmap: false });
        worker.io(0).extents_mut().extend(extents);
        worker.run(request)
    };
    let (discard, zeroes) = (Request::Discard { durable: false }, Request::WriteZeroes { durable: false });
    let enospc = Err(IoError::Os(Errno::NOSPC));
    let check = |worker: &mut Worker<'_>| {
        assert_eq!(on(worker, discard, &[0, 16]), Ok(()));
        assert_eq!(on(worker, zeroes, &[0, 8]), Ok(()));
        for sectors in [&[8][..], &[0, 8], &[8, 16]] {
            assert_eq!(on(worker, discard, sectors), EIO);
        }
        assert_eq!(on(worker, zeroes, &[16]), enospc);
    };
    on_each(rules, 64 << 10, |worker, _| check(worker));
    let disk = open(rules, DiskSpec::Memory(64 << 10), Cache::None).unwrap();
    let mut worker = Worker::new(&disk, EngineKind::Threads, 4);
    check(&mut worker);
    assert_eq!(on(&mut worker, Request::SecureErase, &[0]), EIO);
}
