//! Tests discards and zeroes: the bytes that are read afterwards, the space that is freed, and refusals.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{Worker, image, loop_device, options};
use kickless_disk::{Cache, Disk, DiskSpec, Extent, IoError, Limits, Request};
use kickless_io::{EngineKind, Errno};
use kickless_testing::Random;
use rustix::fs::{FallocateFlags, fallocate};
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use tempfile::NamedTempFile;

const LEN: u64 = 1 << 20;
const ENGINES: [EngineKind; 3] = [EngineKind::Uring, EngineKind::Aio, EngineKind::Threads];
const ZEROES: Request = Request::WriteZeroes { durable: false };
const DISCARD: Request = Request::Discard { durable: false };

fn open(path: &Path, cache: Cache) -> Disk {
    Disk::open(&DiskSpec::File(path.to_owned()), &options(cache, false)).unwrap()
}

/// Runs a request on extents, each an offset, a length and its `unmap` flag.
fn run_on_extents(
    worker: &mut Worker<'_>,
    request: Request,
    extents: &[(u64, u64, bool)],
) -> Result<(), IoError> {
    let extents = extents.iter().map(|&(offset, len, unmap)| Extent { offset, len, unmap });
    worker.io(0).extents_mut().extend(extents);
    let result = worker.run(request);
    assert!(worker.io(0).extents_mut().is_empty(), "the request leaves extents for the next one");
    result
}

/// Returns the bytes that the file takes on its file system.
fn space(path: &Path) -> u64 {
    fs::metadata(path).unwrap().blocks() * 512
}

/// Makes a file on tmpfs, which has no `FALLOC_FL_ZERO_RANGE`.
fn image_on_tmpfs(contents: &[u8]) -> Option<NamedTempFile> {
    let mut image = NamedTempFile::new_in("/dev/shm").ok()?;
    std::io::Write::write_all(&mut image, contents).unwrap();
    Some(image)
}

/// Runs `each` with each engine and cache mode, on a file of random bytes: one on a disk, and one on tmpfs.
fn on_each_file(each: impl Fn(&mut Worker<'_>, &Path, Vec<u8>)) {
    let contents = Random(3).bytes(LEN);
    for kind in ENGINES {
        for cache in [Cache::None, Cache::Writeback] {
            for image in [Some(image(&contents)), image_on_tmpfs(&contents)].into_iter().flatten() {
                let disk = open(image.path(), cache);
                each(&mut Worker::new(&disk, kind, 4), image.path(), contents.clone());
            }
        }
    }
}

#[test]
fn zeroes_in_many_extents() {
    on_each_file(|worker, path, mut contents| {
        let extents = [
            (512, 512, false),
            (8192, 65536, true),
            (LEN - 1536, 1536, true),
            (1024, 0, true),
            (300 << 10, 5 << 9, false),
        ];
        for (offset, len, _) in extents {
            contents[offset as usize..(offset + len) as usize].fill(0);
        }
        let before = space(path);
        assert_eq!(run_on_extents(worker, ZEROES, &extents), Ok(()));
        assert!(worker.read(0, LEN as usize) == (Ok(()), contents.clone()));
        assert!(fs::read(path).unwrap() == contents);
        assert!(space(path) + 60_000 < before, "the space of an extent to unmap is not freed");
        // A request without extents succeeds.
        assert_eq!(run_on_extents(worker, ZEROES, &[]), Ok(()));
    });
}

#[test]
fn zeroes_without_unmap_keep_their_space() {
    on_each_file(|worker, path, _| {
        let before = space(path);
        assert_eq!(run_on_extents(worker, ZEROES, &[(0, LEN, false)]), Ok(()));
        assert!(space(path) >= before);
        assert!(worker.read(0, LEN as usize) == (Ok(()), vec![0; LEN as usize]));
    });
}

#[test]
fn discards_free_space() {
    on_each_file(|worker, path, contents| {
        let extents = [(64 << 10, 256 << 10, false), (512 << 10, 256 << 10, false)];
        let before = space(path);
        assert_eq!(run_on_extents(worker, DISCARD, &extents), Ok(()));
        assert!(space(path) + (400 << 10) < before);
        let (result, read) = worker.read(0, LEN as usize);
        assert_eq!(result, Ok(()));
        assert!(read[..64 << 10] == contents[..64 << 10] && read[768 << 10..] == contents[768 << 10..]);
    });
}

/// Space behind the end is for data to come, of this host or of another one that uses the image. ext4 keeps
/// it whatever is punched there, and tmpfs does not.
#[test]
fn opening_a_file_leaves_what_is_behind_its_end() {
    let contents = [7; 1 << 20];
    for image in [Some(image(&contents)), image_on_tmpfs(&contents)].into_iter().flatten() {
        fallocate(image.as_file(), FallocateFlags::KEEP_SIZE, 0, 8 << 20).unwrap();
        let before = space(image.path());
        assert!(before >= 8 << 20, "the file system allocates no space behind the end");
        assert!(open(image.path(), Cache::Writeback).limits().discard.is_some());
        assert_eq!(space(image.path()), before);
    }
}

#[test]
fn a_device_with_large_blocks() {
    let contents = Random(3).bytes(LEN);
    for kind in ENGINES {
        for cache in [Cache::None, Cache::Writeback] {
            let image = image(&contents);
            let backing = image.path().to_owned();
            let device = match loop_device(image, false) {
                Ok(device) => device,
                Err(why) => return println!("SKIPPED: no loop device with blocks of 4096 bytes: {why}"),
            };
            let disk = open(device.path(), cache);
            assert_eq!(disk.limits().discard.unwrap().alignment % 8, 0);
            let mut worker = Worker::new(&disk, kind, 4);
            // Parts of blocks at both ends; a part of one block; whole blocks; whole blocks again.
            let extents = [
                (512, 8192, false),
                (16384 + 512, 1024, true),
                (32768, 65536, true),
                (262_144, 12288, false),
            ];
            let mut expected = contents.clone();
            for (offset, len, _) in extents {
                expected[offset as usize..(offset + len) as usize].fill(0);
            }
            assert_eq!(run_on_extents(&mut worker, ZEROES, &extents), Ok(()));
            assert_eq!(worker.flush(), Ok(()));
            assert!(worker.read(0, LEN as usize) == (Ok(()), expected.clone()));

            let before = space(&backing);
            let discards = [(512 << 10, 256 << 10, false), (LEN - 2048, 2048, false)];
            assert_eq!(run_on_extents(&mut worker, Request::Discard { durable: true }, &discards), Ok(()));
            assert!(space(&backing) + (200 << 10) < before, "{kind} {cache}");
            let read = worker.read(0, LEN as usize).1;
            assert!(read[..512 << 10] == expected[..512 << 10]);
            assert!(read[768 << 10..] == expected[768 << 10..], "a part of a block was discarded");
        }
    }
}

#[test]
fn discards_free_memory() {
    /// Returns the resident memory of this process, in bytes.
    fn resident() -> u64 {
        let text = fs::read_to_string("/proc/self/statm").unwrap();
        text.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * rustix::param::page_size() as u64
    }
    const MEMORY: u64 = 64 << 20;
    let disk = Disk::open(&DiskSpec::Memory(MEMORY), &options(Cache::None, false)).unwrap();
    let mut worker = Worker::new(&disk, EngineKind::Threads, 1);
    let contents = vec![7; MEMORY as usize];
    assert_eq!(worker.write(0, &contents, 0), Ok(()));
    let full = resident();
    assert_eq!(run_on_extents(&mut worker, DISCARD, &[(0, MEMORY - 8192, false)]), Ok(()));
    assert!(resident() + MEMORY / 2 < full);
    assert_eq!(worker.read(MEMORY - 8192, 8192).1, [7; 8192]);
    assert_eq!(worker.read(0, 4096).1, [0; 4096]);
    assert_eq!(
        run_on_extents(&mut worker, ZEROES, &[(MEMORY - 8192, 512, true), (MEMORY - 512, 512, false)]),
        Ok(())
    );
    let end = worker.read(MEMORY - 8192, 8192).1;
    let zeroes: Vec<usize> = (0..16).filter(|sector| end[sector * 512..][..512] == [0; 512]).collect();
    assert_eq!(zeroes, [0, 15]);
}

#[test]
fn bad_extents_and_missing_features_are_refused() {
    let image = image(&[1; LEN as usize]);
    let file = DiskSpec::File(image.path().into());
    for spec in [file, DiskSpec::Memory(LEN), DiskSpec::Null(LEN)] {
        let disk = Disk::open(&spec, &options(Cache::None, false)).unwrap();
        let mut worker = Worker::new(&disk, EngineKind::Threads, 4);
        for request in [ZEROES, DISCARD] {
            for bad in [(LEN, 512), (0, LEN + 512), (u64::MAX - 511, 512), (256, 512), (0, 100)] {
                let extents = [(0, 512, false), (bad.0, bad.1, false)];
                assert_eq!(
                    run_on_extents(&mut worker, request, &extents),
                    Err(IoError::Range),
                    "{spec:?} {bad:?}"
                );
            }
        }
        // One bad extent makes the whole request fail.
        assert!(matches!(spec, DiskSpec::Null(_)) || !worker.read(0, 512).1.starts_with(&[7]));
        let read_only = Disk::open(&spec, &options(Cache::None, true)).unwrap();
        let Limits { discard, write_zeroes, zeroes_may_unmap, .. } = read_only.limits();
        assert_eq!((*discard, *write_zeroes, *zeroes_may_unmap), (None, None, false));
        let mut worker = Worker::new(&read_only, EngineKind::Threads, 4);
        for request in [ZEROES, DISCARD] {
            assert_eq!(run_on_extents(&mut worker, request, &[(0, 512, false)]), Err(IoError::ReadOnly));
        }
    }
    let first = File::open(image.path()).unwrap();
    assert_eq!(first.metadata().unwrap().len(), LEN);
}

#[test]
fn faults_apply_to_discards_and_zeroes() {
    let image = image(&[1; LEN as usize]);
    let rules = "eio@discard+0-7,enospc@zeroes+nth=4,eio@flush".parse().unwrap();
    let spec = DiskSpec::Fault(rules, Box::new(DiskSpec::File(image.path().into())));
    let disk = Disk::open(&spec, &options(Cache::None, false)).unwrap();
    for kind in ENGINES {
        let mut worker = Worker::new(&disk, kind, 4);
        let eio = Err(IoError::Os(Errno::IO));
        assert_eq!(run_on_extents(&mut worker, DISCARD, &[(4096, 4096, false), (0, 512, false)]), eio);
        assert_eq!(run_on_extents(&mut worker, DISCARD, &[(4096, 4096, false)]), Ok(()));
        // A durable request needs a flush, which fails.
        for request in [Request::Discard { durable: true }, Request::WriteZeroes { durable: true }] {
            assert_eq!(run_on_extents(&mut worker, request, &[(8192, 4096, true)]), eio);
        }
    }
    let mut worker = Worker::new(&disk, EngineKind::Threads, 4);
    let full = Err(IoError::Os(Errno::NOSPC));
    assert_eq!(run_on_extents(&mut worker, ZEROES, &[(0, 4096, true)]), full);
    assert_eq!(run_on_extents(&mut worker, ZEROES, &[(0, 4096, true)]), Ok(()));
}
