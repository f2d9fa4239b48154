//! Tests that a flush of each queue fails after the host lost writes from its page cache.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{Worker, guest, image, options};
use kickless_disk::{Cache, Disk, DiskSpec, IoError, Request, Step};
use kickless_io::{EngineKind, Errno};
use kickless_memory::{Gpa, Marks};
use kickless_testing::LosingDevice;
use std::fs::File;
use std::process::Command;

const ENGINES: [EngineKind; 3] = [EngineKind::Uring, EngineKind::Aio, EngineKind::Threads];
const CHUNK: usize = 256 << 10;

fn losing_device() -> Option<LosingDevice> {
    LosingDevice::new().inspect_err(|why| println!("SKIPPED: no device that loses writes: {why}")).ok()
}

fn spec(losing: &LosingDevice) -> DiskSpec {
    DiskSpec::File(losing.path().into())
}

/// Writes the first 4 MiB. The page cache takes all of it.
fn fill(worker: &mut Worker<'_>) {
    for chunk in 0..16 {
        assert_eq!(worker.write(chunk * CHUNK as u64, &[7; CHUNK], 0), Ok(()));
    }
}

fn write_durably(worker: &mut Worker<'_>) -> Result<(), IoError> {
    let view = guest(4096);
    worker.io(0).buffers_mut().push(&view, Gpa(0), 4096).unwrap();
    let result = worker.run(Request::Write { offset: 0, durable: true });
    worker.io(0).buffers_mut().clear(&mut Marks::off());
    result
}

fn reports_loss(result: Result<(), IoError>) -> bool {
    matches!(result, Err(IoError::Os(_)))
}

#[test]
fn each_queue_reports_the_loss_until_the_disk_is_opened_again() {
    for kind in ENGINES {
        let Some(losing) = losing_device() else { return };
        let open = || Disk::open(&spec(&losing), &options(Cache::Writeback, false)).unwrap();
        let disk = open();
        let [mut one, mut two] = [(); 2].map(|()| Worker::new(&disk, kind, 8));
        assert_eq!([one.flush(), two.flush(), write_durably(&mut two)], [Ok(()); 3], "{kind:?}");
        fill(&mut one);
        assert!(
            reports_loss(one.flush()) && reports_loss(two.flush()) && reports_loss(one.flush()),
            "{kind:?}"
        );
        assert!(reports_loss(write_durably(&mut two)) && disk.write_back().is_err(), "{kind:?}");
        // The next writes find room. The lost ones do not come back.
        losing.grow_file_system();
        disk.reload(false).unwrap();
        assert_eq!(one.write(0, &[1; 4096], 0), Ok(()));
        assert!(reports_loss(two.flush()), "{kind:?}");
        drop((one, two));
        let disk = open();
        let mut worker = Worker::new(&disk, kind, 8);
        fill(&mut worker);
        assert_eq!([worker.flush(), write_durably(&mut worker)], [Ok(()); 2], "{kind:?}");
        assert!(disk.write_back().is_ok());
    }
}

/// A flush that the kernel did not begin says nothing about lost writes, so it does not latch an error.
#[test]
fn flushes_that_the_kernel_did_not_begin_are_retried() {
    let image = image(&[7; 64 << 10]);
    let disk = Disk::open(&DiskSpec::File(image.path().into()), &options(Cache::Writeback, false)).unwrap();
    for kind in ENGINES {
        let mut worker = Worker::new(&disk, kind, 8);
        for errno in [Errno::AGAIN, Errno::CANCELED, Errno::INTR] {
            worker.fail_next(errno);
            assert_eq!(worker.flush(), Ok(()), "{kind:?} {errno}");
            worker.fail_next(errno);
            assert_eq!(write_durably(&mut worker), Ok(()), "{kind:?} {errno}");
            assert_eq!(worker.flush(), Ok(()), "{kind:?} {errno}");
        }
    }
}

/// The kernel reports a loss once. A durable write or `write_back` that gets the report does not hide it from
/// the flush of another queue.
#[test]
fn a_loss_that_another_request_finds_is_reported() {
    let Some(losing) = losing_device() else { return };
    for by_durable_write in [true, false] {
        let disk = Disk::open(&spec(&losing), &options(Cache::Writeback, false)).unwrap();
        let [mut one, mut two] = [(); 2].map(|()| Worker::new(&disk, EngineKind::Auto, 8));
        fill(&mut one);
        if by_durable_write {
            // Another process has the cache written. The durable write is this disk's first request after
            // that.
            assert!(File::open(losing.path()).unwrap().sync_data().is_err());
            assert!(reports_loss(write_durably(&mut one)));
        } else {
            assert!(disk.write_back().is_err());
        }
        assert!(reports_loss(two.flush()), "by a durable write: {by_durable_write}");
    }
}

/// Flushes that are in the kernel together all fail, although the kernel reports the loss to one of them.
#[test]
fn flushes_in_flight_all_report_the_loss() {
    const QUEUES: usize = 4;
    const SLOTS: usize = 4;
    let Some(losing) = losing_device() else { return };
    for kind in ENGINES {
        let disk = Disk::open(&spec(&losing), &options(Cache::Writeback, false)).unwrap();
        let mut queues = [(); QUEUES].map(|()| Worker::new(&disk, kind, 8).with_slots(SLOTS));
        fill(&mut queues[0]);
        for slot in 0..SLOTS {
            for queue in &mut queues {
                assert_eq!(queue.start(slot, Request::Flush), Step::Pending);
            }
        }
        for queue in &mut queues {
            let mut ended = Vec::new();
            while ended.len() < SLOTS {
                ended.extend(queue.turn());
            }
            assert!(ended.iter().all(|(_, result)| reports_loss(*result)), "{kind:?}: {ended:?}");
        }
    }
}

/// The threads of a qcow2 disk flush at the same time, too.
#[test]
fn each_queue_of_a_qcow2_image_reports_the_loss() {
    let Some(losing) = losing_device() else { return };
    let device = losing.path();
    // All clusters are mapped, because a write into a new cluster needs a sync.
    let map_all = "preallocation=metadata";
    let words = ["create", "-q", "-f", "qcow2", "-o", map_all, device.to_str().unwrap(), "6M"];
    assert!(Command::new("qemu-img").args(words).status().unwrap().success());
    let disk = Disk::open(&DiskSpec::Qcow2(device.into()), &options(Cache::Writeback, false)).unwrap();
    disk.reload(false).unwrap();
    let mut queues = [(); 3].map(|()| common::worker(&disk).with_slots(4));
    assert_eq!(queues[1].flush(), Ok(()));
    fill(&mut queues[0]);
    for queue in &mut queues[..2] {
        for slot in 0..4 {
            assert_eq!(queue.start(slot, Request::Flush), Step::Pending);
        }
    }
    for queue in &mut queues[..2] {
        let mut ended = Vec::new();
        while ended.len() < 4 {
            ended.extend(queue.turn());
        }
        assert!(ended.iter().all(|(_, result)| reports_loss(*result)), "{ended:?}");
    }
    assert!(reports_loss(queues[2].flush()) && reports_loss(queues[0].flush()));
}
