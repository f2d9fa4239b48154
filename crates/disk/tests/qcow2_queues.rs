//! Tests several queues on one qcow2 image, and many requests of one queue.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use common::qcow2::Image;
use common::{Worker, guest, options, run_on_extent, worker};
use kickless_disk::{Cache, Disk, DiskSpec, Extent, IoError, Request, Step};
use kickless_io::{Engine, EngineKind, Errno};
use kickless_memory::{Gpa, Marks};
use kickless_testing::Random;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

const CLUSTER: u64 = 64 << 10;
const EIO: Result<(), IoError> = Err(IoError::Os(Errno::IO));

fn open(path: PathBuf, rules: &str) -> Disk {
    let under = DiskSpec::Qcow2(path);
    let spec = match rules {
        "" => under,
        rules => DiskSpec::Fault(rules.parse().unwrap(), Box::new(under)),
    };
    Disk::open(&spec, &options(Cache::Writeback, false)).unwrap()
}

/// Makes an image without data of its own over an image with these contents. Returns its path.
fn overlay(image: &Image) -> PathBuf {
    image.img(&["create", "-q", "-f", "qcow2", "-b", "disk.qcow2", "-F", "qcow2", "top"]);
    image.dir.path().join("top")
}

/// Runs turns of a worker until nothing is in flight.
fn settle(worker: &mut Worker<'_>) {
    while worker.in_flight() > 0 {
        assert_eq!(worker.turn(), []);
    }
}

/// A discard fails because its table cannot be written. Zeroes for a part of the cluster have nothing to do,
/// but rely on the discard, so they write the table.
#[test]
fn zeroes_wait_for_the_table_that_they_rely_on() {
    for (unmap, request) in
        [(false, Request::Discard { durable: false }), (true, Request::WriteZeroes { durable: false })]
    {
        let image = Image::of(&Random(3).bytes(2 * CLUSTER), &[]);
        let disk = open(image.path(), "eio@write+nth=1");
        let (mut first, mut second) = (worker(&disk), worker(&disk));
        first.io(0).extents_mut().push(Extent { offset: 0, len: CLUSTER, unmap });
        assert_eq!(first.run(request), EIO);
        run_on_extent(&mut second, Request::WriteZeroes { durable: false }, 1024, 512, true);
        assert_eq!(second.flush(), Ok(()));
        assert!(image.contents()[1024..1536] == [0; 512], "answered zeroes are not in the file");
    }
}

/// A copy of one queue fails while a write and zeroes of other queues wait for it.
#[test]
fn a_failed_copy_wakes_all_queues() {
    let image = Image::of(&Random(4).bytes(4 * CLUSTER), &[]);
    let disk = open(overlay(&image), "");
    let [mut first, mut second, mut third] = [(); 3].map(|()| worker(&disk));
    // The reserve is ready after this one.
    assert_eq!(first.write(0, &[1; 512], 0), Ok(()));
    settle(&mut first);
    let view = guest(4096);
    for worker in [&mut first, &mut second] {
        worker.io(0).buffers_mut().push(&view, Gpa(0), 4096).unwrap();
    }
    let write = Request::Write { offset: CLUSTER, durable: false };
    // It reads the old bytes, and then writes the new cluster.
    assert_eq!(first.start(0, write), Step::Pending);
    assert_eq!(second.start(0, write), Step::Busy);
    third.io(0).extents_mut().push(Extent { offset: CLUSTER, len: CLUSTER, unmap: true });
    assert_eq!(third.start(0, Request::WriteZeroes { durable: false }), Step::Busy);
    first.fail_next(Errno::IO);
    assert_eq!(first.finish(), EIO);
    // Nothing runs for the first queue any more.
    let results = [second.finish(), third.finish()];
    assert_eq!(results, [Ok(()); 2]);
    for worker in [&mut first, &mut second] {
        worker.io(0).buffers_mut().clear(&mut Marks::off());
    }
}

/// Each needs a buffer for its zeroes and one for the copy around them.
#[test]
fn many_zeroes_over_backing_data() {
    const COUNT: u64 = 100;
    let mut contents = Random(5).bytes(COUNT * CLUSTER);
    let image = Image::of(&contents, &[]);
    let disk = open(overlay(&image), "");
    let mut worker = Worker::new(&disk, EngineKind::Threads, 128).with_slots(COUNT as usize);
    for slot in 0..COUNT {
        let extent = Extent { offset: slot * CLUSTER + 4096, len: 4096, unmap: false };
        worker.io(slot as usize).extents_mut().push(extent);
        assert!(matches!(
            worker.start(slot as usize, Request::WriteZeroes { durable: false }),
            Step::Busy | Step::Pending | Step::More
        ));
        contents[extent.offset as usize..][..4096].fill(0);
    }
    let mut results = Vec::new();
    while results.len() < COUNT as usize {
        results.extend(worker.turn());
    }
    assert!(results.iter().all(|(_, result)| *result == Ok(())), "{results:?}");
    assert!(worker.read(0, contents.len()) == (Ok(()), contents));
}

/// A closed image may belong to another host, so no queue opens it, and requests of queues that are still
/// attached fail.
#[test]
fn a_closed_image_is_not_used() {
    let image = Image::of(&[1; CLUSTER as usize], &[]);
    // It has to be repaired when it is opened.
    File::options().write(true).open(image.path()).unwrap().write_all_at(&[1], 79).unwrap();
    let before = fs::read(image.path()).unwrap();
    let disk = open(image.path(), "");
    let mut engine = Engine::open(EngineKind::Threads, 4).unwrap();
    disk.attach(&mut engine).unwrap_err();
    assert!(fs::read(image.path()).unwrap() == before, "the image was written");

    disk.reload(false).unwrap();
    let mut worker = worker(&disk);
    assert_eq!(worker.write(0, &[2; 512], 0), Ok(()));
    disk.write_back().unwrap();
    disk.attach(&mut engine).unwrap_err();
    let before = fs::read(image.path()).unwrap();
    assert_eq!(worker.write(0, &[3; 512], 0), EIO);
    assert_eq!(worker.read(0, 512).0, EIO);
    assert!(fs::read(image.path()).unwrap() == before, "the image was written");
    disk.reload(false).unwrap();
    assert_eq!(worker.read(0, 512), (Ok(()), vec![2; 512]));
}

fn word(file: &File, at: u64) -> u64 {
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, at).unwrap();
    u64::from_be_bytes(bytes)
}

/// An image that is only read is not marked as corrupt.
#[test]
fn a_bad_entry_of_an_image_that_is_only_read() {
    let image = Image::of(&[1; CLUSTER as usize], &[]);
    let file = File::options().read(true).write(true).open(image.path()).unwrap();
    let table = word(&file, word(&file, 40)) & !(1 << 63);
    file.write_all_at(&(word(&file, table) | 2).to_be_bytes(), table).unwrap();
    let over = overlay(&image);
    for (path, read_only) in [(image.path(), true), (over, false)] {
        let disk = Disk::open(&DiskSpec::Qcow2(path), &options(Cache::Writeback, read_only)).unwrap();
        let mut worker = worker(&disk);
        assert_eq!(worker.read(0, 512).0, EIO);
        worker.submit_table_ops();
        assert_eq!(worker.in_flight(), 0);
    }
}

/// Writes to an L2 table whose flag says wrongly that it may be shared. A copy of it would have entries that
/// `qemu-img check` calls wrong.
#[test]
fn a_table_whose_flag_is_missing() {
    let image = Image::of(&Random(6).bytes(2 * CLUSTER), &[]);
    let file = File::options().read(true).write(true).open(image.path()).unwrap();
    let l1 = word(&file, 40);
    let entry = word(&file, l1);
    assert_eq!(entry >> 63, 1);
    file.write_all_at(&(entry & !(1 << 63)).to_be_bytes(), l1).unwrap();
    let disk = open(image.path(), "");
    let mut worker = worker(&disk);
    assert_eq!(worker.write(0, &[2; 512], 0), Ok(()));
    drop(worker);
    disk.write_back().unwrap();
    assert_eq!(word(&file, l1), entry);
    assert!(image.contents()[..512] == [2; 512]);
}
