//! Compares disks with a model. Many requests are in flight at random offsets with random buffers, on one
//! thread or two.
//!
//! Each worker owns some runs of sectors, and uses no others. It has no write in flight together with
//! another request for the same sector, because the result of these would not be defined. Blocks are larger
//! than sectors on some disks, so disjoint requests of both workers meet in one block.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use common::{Worker, guest, image, loop_device, options};
use kickless_disk::{Cache, Disk, DiskSpec, Extent, Request, Step};
use kickless_io::EngineKind;
use kickless_memory::{Gpa, Marks, View};
use kickless_testing::Random;
use proptest::prelude::*;
use std::fs;
use std::ops::Range;
use std::sync::Arc;
use std::thread;

const SECTOR: u64 = 512;

/// The longest request, and the longest run of sectors that one worker owns.
const RUN_MAX: u64 = 24;

/// Guest memory of each request slot: the longest request, and gaps between its segments.
const AREA: u64 = 32 << 10;

/// The parameters of one test run.
#[derive(Clone, Copy, Debug)]
struct Load {
    engine: EngineKind,
    workers: usize,
    /// Operations that the engine holds. The requests may need more.
    depth: u32,
    /// Requests that each worker has in flight.
    slots: usize,
    /// Requests of each worker in all.
    requests: usize,
}

fn loads(workers: usize) -> impl Strategy<Value = (Load, u64)> {
    let engine = prop_oneof![Just(EngineKind::Uring), Just(EngineKind::Aio), Just(EngineKind::Threads)];
    // The slots can be more than the bounce buffers, and the operations more than the engine holds.
    (engine, 1..=128u32, 1..=90usize, any::<u64>()).prop_map(move |(engine, depth, slots, seed)| {
        (Load { engine, workers, depth, slots, requests: 400 }, seed)
    })
}

/// Runs `cases` random loads, each on a disk that `make` opens with the given contents.
fn check(cases: u32, workers: usize, make: impl Fn(&[u8]) -> Target) {
    let config =
        ProptestConfig { cases, failure_persistence: None, max_shrink_iters: 0, ..Default::default() };
    proptest!(config, |((load, seed) in loads(workers))| {
        let mut random = Random(seed);
        let sectors = 8 * random.from(8..80);
        let contents = random.bytes(sectors * SECTOR);
        let target = make(&contents);
        let expected = exercise(&target.disk, load, random, contents);
        if let Some(read) = target.read_behind {
            prop_assert!(read() == expected, "the image differs");
        }
    });
}

/// A disk under test.
struct Target {
    disk: Disk,
    /// Reads the whole image by other means than the disk.
    read_behind: Option<Box<dyn Fn() -> Vec<u8>>>,
}

/// Runs the load on a disk with these contents. Checks that the disk then reads as the model does, and
/// returns the model's contents.
fn exercise(disk: &Disk, load: Load, mut random: Random, contents: Vec<u8>) -> Vec<u8> {
    // A qcow2 image is open from here on.
    disk.reload(false).unwrap();
    let sectors = disk.size() / SECTOR;
    assert_eq!(sectors * SECTOR, contents.len() as u64);
    let mut runs = vec![Vec::new(); load.workers];
    let (mut at, mut owner) = (0, 0);
    while at < sectors {
        let end = (at + random.from(1..RUN_MAX + 1)).min(sectors);
        runs[owner].push(at..end);
        (at, owner) = (end, (owner + 1) % load.workers);
    }
    let mut expected = contents.clone();
    thread::scope(|scope| {
        let workers: Vec<_> = runs
            .into_iter()
            .map(|runs| {
                let random = Random(random.next());
                let model = contents.clone();
                scope.spawn(move || ModelWorker::new(disk, load, random, runs, model).run())
            })
            .collect();
        for worker in workers {
            let (runs, model) = worker.join().unwrap();
            for bytes in runs.into_iter().map(bytes_of) {
                expected[bytes.clone()].copy_from_slice(&model[bytes]);
            }
        }
    });
    let mut reader = Worker::new(disk, EngineKind::Auto, 4);
    let (result, got) = reader.read(0, expected.len());
    assert_eq!(result, Ok(()));
    assert!(got == expected, "the disk differs from the model");
    expected
}

fn bytes_of(sectors: Range<u64>) -> Range<usize> {
    (sectors.start * SECTOR) as usize..(sectors.end * SECTOR) as usize
}

/// A request in flight.
struct Active {
    /// `None` for a flush.
    sectors: Option<Range<u64>>,
    write: bool,
    /// The expected bytes of the slot's guest memory after the request.
    expected: Vec<u8>,
}

/// A worker with its part of the model.
struct ModelWorker<'a> {
    worker: Worker<'a>,
    view: Arc<View>,
    random: Random,
    runs: Vec<Range<u64>>,
    model: Vec<u8>,
    active: Vec<Option<Active>>,
    left: usize,
}

impl<'a> ModelWorker<'a> {
    fn new(disk: &'a Disk, load: Load, random: Random, runs: Vec<Range<u64>>, model: Vec<u8>) -> Self {
        Self {
            worker: Worker::new(disk, load.engine, load.depth).with_slots(load.slots),
            view: guest(load.slots as u64 * AREA),
            random,
            left: if runs.is_empty() { 0 } else { load.requests },
            runs,
            model,
            active: (0..load.slots).map(|_| None).collect(),
        }
    }

    /// Runs all requests. Returns the worker's sectors and its model of the disk.
    fn run(mut self) -> (Vec<Range<u64>>, Vec<u8>) {
        loop {
            for slot in 0..self.active.len() {
                while self.active[slot].is_none() && self.left > 0 {
                    self.left -= 1;
                    self.start(slot);
                }
            }
            if self.active.iter().all(Option::is_none) {
                return (self.runs, self.model);
            }
            for (slot, result) in self.worker.turn() {
                assert_eq!(result, Ok(()));
                self.finish(slot);
            }
        }
    }

    /// Chooses random sectors for a request. Returns `None` if they overlap with a request in flight, and
    /// one of both writes.
    fn choose(&mut self, write: bool) -> Option<Range<u64>> {
        let run = self.runs[self.random.from(0..self.runs.len() as u64) as usize].clone();
        let start = self.random.from(run.clone());
        let end = self.random.from(start..run.end) + 1;
        let conflicts = self.active.iter().flatten().any(|other| {
            other.sectors.as_ref().is_some_and(|o| o.start < end && start < o.end) && (write || other.write)
        });
        (!conflicts).then_some(start..end)
    }

    fn start(&mut self, slot: usize) {
        if self.random.from(0..12) == 0 {
            self.active[slot] = Some(Active { sectors: None, write: false, expected: self.area(slot) });
            return self.step(slot, Request::Flush);
        }
        let write = self.random.from(0..5) < 3;
        let Some(sectors) = self.choose(write) else { return };
        let bytes = bytes_of(sectors.clone());
        if write && self.random.from(0..4) == 0 {
            return self.zero(slot, sectors);
        }
        let mut before = self.random.bytes(AREA);
        let mut expected = before.clone();
        let mut at = bytes.start;
        for (start, len) in self.segments(bytes.len()) {
            let (here, there) = (start..start + len, at..at + len);
            if write {
                self.model[there].copy_from_slice(&before[here]);
            } else {
                // The memory differs from the disk in each byte before the read.
                before[here.clone()].iter_mut().zip(&self.model[there.clone()]).for_each(|(b, m)| *b = !m);
                expected[here].copy_from_slice(&self.model[there]);
            }
            at += len;
            let gpa = Gpa(slot as u64 * AREA + start as u64);
            self.worker.io(slot).buffers_mut().push(&self.view, gpa, len as u32).unwrap();
        }
        assert_eq!(at, bytes.end);
        self.view.map().write(Gpa(slot as u64 * AREA), &before).unwrap();
        let offset = bytes.start as u64;
        let request = if write {
            Request::Write { offset, durable: self.random.from(0..20) == 0 }
        } else {
            Request::Read { offset }
        };
        self.active[slot] = Some(Active { sectors: Some(sectors), write, expected });
        self.step(slot, request);
    }

    /// Zeroes sectors by one extent or two, in either order.
    fn zero(&mut self, slot: usize, sectors: Range<u64>) {
        self.model[bytes_of(sectors.clone())].fill(0);
        let cut = self.random.from(sectors.clone());
        let mut parts = [sectors.start..cut, cut..sectors.end];
        if self.random.from(0..2) == 0 {
            parts.reverse();
        }
        for part in parts {
            let unmap = self.random.from(0..2) == 0;
            let (offset, len) = (part.start * SECTOR, (part.end - part.start) * SECTOR);
            self.worker.io(slot).extents_mut().push(Extent { offset, len, unmap });
        }
        let durable = self.random.from(0..8) == 0;
        self.active[slot] = Some(Active { sectors: Some(sectors), write: true, expected: self.area(slot) });
        self.step(slot, Request::WriteZeroes { durable });
    }

    /// Divides `len` bytes into segments of the slot's memory, aligned to pages, to sectors or to nothing.
    /// Returns the offset and the length of each.
    fn segments(&mut self, len: usize) -> Vec<(usize, usize)> {
        let unit = [4096, 512, 1][self.random.from(0..3) as usize];
        let count = self.random.from(1..9);
        let mut segments = Vec::new();
        let (mut at, mut left) = (self.random.from(0..4096) as usize / unit * unit, len);
        for i in 1..=count {
            let most = (left as u64).min(6000) + 1;
            let here = if i == count { left } else { self.random.from(0..most) as usize / unit * unit };
            segments.push((at, here));
            left -= here;
            at += here + self.random.from(0..1000) as usize / unit * unit;
        }
        segments
    }

    fn step(&mut self, slot: usize, request: Request) {
        match self.worker.start(slot, request) {
            Step::Done(result) => {
                assert_eq!(result, Ok(()));
                self.finish(slot);
            }
            Step::Pending | Step::Busy | Step::More => {}
        }
    }

    fn finish(&mut self, slot: usize) {
        let active = self.active[slot].take().unwrap();
        assert!(
            self.area(slot) == active.expected,
            "guest memory differs after a {} of {:?}",
            if active.write { "write" } else { "read" },
            active.sectors
        );
        self.worker.io(slot).buffers_mut().clear(&mut Marks::off());
    }

    /// Returns the bytes of the slot's guest memory.
    fn area(&self, slot: usize) -> Vec<u8> {
        let mut bytes = vec![0; AREA as usize];
        self.view.read(Gpa(slot as u64 * AREA), &mut bytes).unwrap();
        bytes
    }
}

fn file_target(cache: Cache, contents: &[u8]) -> Target {
    let image = image(contents);
    let disk = Disk::open(&DiskSpec::File(image.path().into()), &options(cache, false)).unwrap();
    Target { disk, read_behind: Some(Box::new(move || fs::read(image.path()).unwrap())) }
}

#[test]
fn a_file_without_the_cache() {
    check(6, 1, |contents| file_target(Cache::None, contents));
}

#[test]
fn a_file_through_the_cache() {
    check(6, 1, |contents| file_target(Cache::Writeback, contents));
}

#[test]
fn a_file_on_two_threads() {
    check(6, 2, |contents| file_target(Cache::None, contents));
}

/// Short transfers, `EAGAIN`, and operations in another order do not change the result of the requests.
#[test]
fn a_file_with_transient_faults() {
    let rules = "short@20%,eagain@5%,delay=10us-1ms@15%";
    check(4, 2, |contents| {
        let image = image(contents);
        let under = Box::new(DiskSpec::File(image.path().into()));
        let spec = DiskSpec::Fault(rules.parse().unwrap(), under);
        let disk = Disk::open(&spec, &options(Cache::None, false)).unwrap();
        Target { disk, read_behind: Some(Box::new(move || fs::read(image.path()).unwrap())) }
    });
}

#[test]
fn memory_on_two_threads() {
    check(6, 2, |contents| {
        let disk =
            Disk::open(&DiskSpec::Memory(contents.len() as u64), &options(Cache::None, false)).unwrap();
        let mut worker = Worker::new(&disk, EngineKind::Auto, 1);
        assert!(worker.read(0, contents.len()) == (Ok(()), vec![0; contents.len()]));
        assert_eq!(worker.write(0, contents, 0), Ok(()));
        drop(worker);
        Target { disk, read_behind: None }
    });
}

/// Runs on clusters that are smaller and larger than a request, and on compressed clusters.
#[test]
fn qcow2_images_on_two_threads() {
    for (cache, options) in [
        (Cache::None, &["-o", "cluster_size=64k"][..]),
        (Cache::Writeback, &["-o", "cluster_size=4k"]),
        (Cache::None, &["-c", "-o", "cluster_size=8k"]),
    ] {
        check(4, 2, |contents| {
            let image = common::qcow2::Image::of(contents, options);
            let disk = Disk::open(&image.spec(), &common::options(cache, false)).unwrap();
            // A completed write is in the file without a flush.
            Target { disk, read_behind: Some(Box::new(move || image.contents())) }
        });
    }
}

#[test]
fn a_new_qcow2_image_over_a_backing_image() {
    check(4, 2, |contents| {
        let image = common::qcow2::Image::of(contents, &[]);
        image.img(&["create", "-f", "qcow2", "-b", "disk.qcow2", "-F", "qcow2", "top"]);
        let spec = DiskSpec::Qcow2(image.dir.path().join("top"));
        let disk = Disk::open(&spec, &options(Cache::None, false)).unwrap();
        let before = image.contents();
        let read_behind = move || {
            assert!(image.contents() == before, "the backing image has changed");
            image.img(&["convert", "-U", "-f", "qcow2", "-O", "raw", "top", "whole"]);
            fs::read(image.dir.path().join("whole")).unwrap()
        };
        Target { disk, read_behind: Some(Box::new(read_behind)) }
    });
}

#[test]
fn nbd_exports_on_two_threads() {
    for kind in common::server::KINDS {
        check(4, 2, |contents| {
            let server = common::server::Server::start(kind, contents, &[]);
            let disk = Disk::open(&server.spec(""), &options(Cache::None, false)).unwrap();
            Target { disk, read_behind: Some(Box::new(move || fs::read(server.image()).unwrap())) }
        });
    }
}

/// The server refuses requests that are not whole blocks, or too long.
#[test]
fn nbd_exports_with_large_blocks_on_two_threads() {
    for sizes in [["blocksize-minimum=4096", "blocksize-maximum=8192"], ["blocksize-minimum=2048", ""]] {
        check(4, 2, |contents| {
            let policy = ["--filter=blocksize-policy", "blocksize-error-policy=error"];
            let extra: Vec<_> = policy.into_iter().chain(sizes).filter(|word| !word.is_empty()).collect();
            let server = common::server::Server::start(common::server::Kind::Nbdkit, contents, &extra);
            let disk = Disk::open(&server.spec(""), &options(Cache::None, false)).unwrap();
            Target { disk, read_behind: Some(Box::new(move || fs::read(server.image()).unwrap())) }
        });
    }
}

#[test]
#[cfg(feature = "rbd")]
fn ceph_images_on_two_threads() {
    for cache in [Cache::None, Cache::Writeback] {
        check(4, 2, |contents| {
            let image = common::ceph::Image::of(contents);
            let disk = Disk::open(&image.spec(""), &options(cache, false)).unwrap();
            // A completed write without a cache is in the cluster.
            let read_behind = move || image.contents();
            Target {
                disk,
                read_behind: (cache == Cache::None)
                    .then(|| Box::new(read_behind) as Box<dyn Fn() -> Vec<u8>>),
            }
        });
    }
}

/// Writes of single sectors read, change and write blocks of 4096 bytes. They must not undo one another.
#[test]
fn large_blocks_on_two_threads() {
    if let Err(why) = loop_device(image(&[0; 4096]), false) {
        return println!("SKIPPED: no loop device with blocks of 4096 bytes: {why}");
    }
    for cache in [Cache::None, Cache::Writeback] {
        check(8, 2, |contents| {
            let device = loop_device(image(contents), false).unwrap();
            let disk = Disk::open(&DiskSpec::File(device.path().into()), &options(cache, false)).unwrap();
            assert_eq!(disk.limits().block_size, 4096);
            Target { disk, read_behind: Some(Box::new(move || fs::read(device.path()).unwrap())) }
        });
    }
}

/// Requests are longer than a bounce buffer, and not aligned.
#[test]
fn long_requests_run_in_pieces() {
    let mut random = Random(1);
    let contents = random.bytes(3 << 20);
    let len = (5 << 18) + 3 * 512;
    let sent = random.bytes(len as u64);
    let check = |spec: DiskSpec| {
        for cache in [Cache::None, Cache::Writeback] {
            let disk = Disk::open(&spec, &options(cache, false)).unwrap();
            for kind in [EngineKind::Uring, EngineKind::Aio, EngineKind::Threads] {
                let mut worker = Worker::new(&disk, kind, 1);
                assert_eq!(worker.write(0, &contents, 0), Ok(()));
                for misaligned in [0, 512, 1] {
                    assert_eq!(worker.write(512 * 5, &sent, misaligned), Ok(()));
                    assert_eq!(worker.flush(), Ok(()));
                    let mut expected = contents.clone();
                    expected[512 * 5..][..len].copy_from_slice(&sent);
                    let (result, got) = worker.read_into(0, contents.len(), misaligned);
                    assert_eq!(result, Ok(()));
                    assert!(got == expected, "{spec:?} {cache} {kind} {misaligned}");
                    let (_, got) = worker.read_into(512 * 7, len, misaligned);
                    assert!(got == expected[512 * 7..][..len], "{spec:?} {cache} {kind} {misaligned}");
                }
            }
        }
    };
    let file = image(&contents);
    check(DiskSpec::File(file.path().into()));
    check(DiskSpec::Memory(contents.len() as u64));
    match loop_device(image(&contents), false) {
        Ok(device) => check(DiskSpec::File(device.path().into())),
        Err(why) => println!("SKIPPED: no loop device with blocks of 4096 bytes: {why}"),
    }
}
