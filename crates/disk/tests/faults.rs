//! Tests injected faults: that each comes as its rule says, and how the disk handles it.
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

/// Runs `each` with each engine, with and without the cache, on a disk of `len` random bytes.
fn on_each_engine(rules: &str, len: u64, each: impl Fn(&mut Worker<'_>, Vec<u8>)) {
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
fn errors_come_as_the_rules_say() {
    on_each_engine("eio@read+4-7,enospc@write+nth=2,eio@flush", 64 << 10, |worker, contents| {
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
        // The failed write changed nothing.
        assert_eq!(worker.read(8192, 4096), (Ok(()), contents[8192..12288].to_vec()));
        assert_eq!(worker.read(0, 1024).1, [[3; 512], [1; 512]].concat());
    });
}

/// Fails if a short transfer is taken for a whole one, or continued in the wrong place.
#[test]
fn short_transfers_are_continued() {
    on_each_engine("short@70%", 256 << 10, |worker, mut contents| {
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
fn eagain_is_retried() {
    on_each_engine("eagain@90%", 64 << 10, |worker, contents| {
        assert_eq!(worker.write(0, &contents[4096..8192], 0), Ok(()));
        assert_eq!(worker.read(0, 4096), (Ok(()), contents[4096..8192].to_vec()));
    });
}

#[test]
fn eagain_is_not_retried_for_ever() {
    let image = image(&[1; 4096]);
    let disk = faulty("eagain@read", &image, Cache::None);
    let mut worker = Worker::new(&disk, EngineKind::Threads, 4);
    assert_eq!(worker.read(0, 512).0, Err(IoError::Stuck));
    assert_eq!(worker.write(0, &[1; 512], 0), Ok(()));
}

#[test]
fn delays_last_as_long_as_the_rules_say() {
    on_each_engine("delay=20ms-30ms@read", 4096, |worker, contents| {
        let started = Instant::now();
        assert_eq!(worker.read(0, 4096), (Ok(()), contents));
        assert!(started.elapsed() >= Duration::from_millis(20));
    });
    // Each delay is random and 5 ms on average, so ten of them take 50 ms on average.
    on_each_engine("delay=0us-10ms", 4096, |worker, contents| {
        let started = Instant::now();
        (0..10).for_each(|_| assert_eq!(worker.read(0, 512), (Ok(()), contents[..512].to_vec())));
        assert!(started.elapsed() >= Duration::from_millis(20));
    });
}

/// Starts three reads, of which those marked in `busy` must wait. Returns the first `count` slots that
/// complete, in order.
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
fn later_requests_overtake() {
    // The drop of the disk abandons the request that waits a minute.
    // The engine has room for one of the others at a time.
    assert_eq!(order("delay=60s@nth=1", [true, false, true], 2), [1, 2]);
}

/// The rules are applied once to an operation that waits for room in the engine.
#[test]
fn a_full_engine_does_not_apply_the_rules_twice() {
    let contents = Random(5).bytes(3 * 8192);
    let image = image(&contents);
    for (rules, results) in [
        ("eio@nth=3", [Ok(()), Ok(()), EIO]),
        ("eio@nth=2", [Ok(()), EIO, Ok(())]),
        ("eagain@nth=2,eio@nth=4", [Ok(()), Ok(()), EIO]),
        // The rest of the short transfer is the third operation.
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
        let mut ended = Vec::new();
        while ended.len() < 2 {
            ended.extend(worker.turn());
        }
        assert_eq!(start(&mut worker, 2), Step::Pending);
        while ended.len() < 3 {
            ended.extend(worker.turn());
        }
        let found: Vec<_> = ended.iter().map(|(_, result)| *result).collect();
        assert_eq!(found, results, "{rules}");
        for (slot, _) in ended.iter().filter(|(_, result)| result.is_ok()) {
            let mut read = vec![0; 8192];
            map.read(Gpa(*slot as u64 * 8192), &mut read).unwrap();
            assert!(read == contents[slot * 8192..][..8192], "{rules}: {slot}");
        }
    }
}

#[test]
fn faults_apply_to_disks_that_need_no_engine() {
    for under in [DiskSpec::Null(1 << 20), DiskSpec::Memory(1 << 20)] {
        let disk = open("eio@0-7,delay=5ms@write,delay=1ms@flush", under.clone(), Cache::None).unwrap();
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

/// The rest of a short transfer is an operation of its own, with the guest's buffers and with bounce buffers.
#[test]
fn a_short_transfer_is_never_whole_and_never_empty() {
    for misaligned in [0, 1] {
        on_each_engine("short@read+nth=1,eio@read+nth=2", 64 << 10, |worker, _| {
            assert_eq!(worker.read_into(0, 64 << 10, misaligned).0, EIO);
        });
        let lens = RefCell::new(HashSet::new());
        for seed in 1..9 {
            let rules = format!("seed={seed},short@write+nth=1,eio@write+nth=2");
            on_each_engine(&rules, 64 << 10, |worker, contents| {
                let written: Vec<u8> = contents.iter().map(|byte| !byte).collect();
                assert_eq!(worker.write(0, &written, misaligned), EIO);
                let found = worker.read(0, contents.len()).1;
                let len = found.iter().zip(&written).take_while(|(found, written)| found == written).count();
                assert!(len > 0 && len < contents.len() && found[len..] == contents[len..], "{len}");
                lens.borrow_mut().insert(len);
            });
            // With the cache the smallest part is one sector. So it is the only part of two sectors.
            let image = image(&[0; 1024]);
            let disk = faulty(&rules, &image, Cache::Writeback);
            assert_eq!(Worker::new(&disk, EngineKind::Threads, 4).write(0, &[1; 1024], misaligned), EIO);
            assert!(fs::read(image.path()).unwrap() == [[1; 512], [0; 512]].concat(), "{rules}");
        }
        assert!(lens.borrow().len() > 1, "the part is always the same");
    }
}

#[test]
fn extents_fail_by_kind_and_offset() {
    let rules = "eio@discard+8-15,enospc@zeroes+16-23";
    let run_on = |worker: &mut Worker<'_>, request, sectors: &[u64]| {
        let extents = sectors.iter().map(|sector| Extent { offset: sector * 512, len: 4096, unmap: false });
        worker.io(0).extents_mut().extend(extents);
        worker.run(request)
    };
    let (discard, zeroes) = (Request::Discard { durable: false }, Request::WriteZeroes { durable: false });
    let enospc = Err(IoError::Os(Errno::NOSPC));
    let check = |worker: &mut Worker<'_>| {
        assert_eq!(run_on(worker, discard, &[0, 16]), Ok(()));
        assert_eq!(run_on(worker, zeroes, &[0, 8]), Ok(()));
        for sectors in [&[8][..], &[0, 8], &[8, 16]] {
            assert_eq!(run_on(worker, discard, sectors), EIO);
        }
        assert_eq!(run_on(worker, zeroes, &[16]), enospc);
    };
    on_each_engine(rules, 64 << 10, |worker, _| check(worker));
    let disk = open(rules, DiskSpec::Memory(64 << 10), Cache::None).unwrap();
    let mut worker = Worker::new(&disk, EngineKind::Threads, 4);
    check(&mut worker);
}
