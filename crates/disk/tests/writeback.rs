//! Tests that every queue hears of writes that the host lost from its page cache.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{Worker, guest, image, options};
use kickless_disk::{Cache, Disk, DiskSpec, IoError, Request, Step};
use kickless_io::{EngineKind, Errno};
use kickless_memory::{Gpa, Marks};
use kickless_testing::LoopDevice;
use std::fs::File;
use std::process::Command;
use tempfile::{NamedTempFile, TempDir};

const ENGINES: [EngineKind; 3] = [EngineKind::Uring, EngineKind::Aio, EngineKind::Threads];
const CHUNK: usize = 256 << 10;

/// A loop device on a file system that is too small for it: what is written to it is lost behind the page cache.
struct Thin {
    device: Option<LoopDevice>,
    dir: TempDir,
}

impl Thin {
    /// # Errors
    /// Why there is none: no right to mount, no loop device.
    fn new() -> Result<Self, String> {
        let dir = tempfile::tempdir().unwrap();
        mount(&["-t", "tmpfs", "-o", "size=1m", "thin"], &dir)?;
        let mut thin = Self { device: None, dir };
        let image = NamedTempFile::new_in(thin.dir.path()).unwrap();
        image.as_file().set_len(8 << 20).unwrap();
        thin.device = Some(LoopDevice::new(image, &[])?);
        Ok(thin)
    }

    fn grow(&self) {
        mount(&["-o", "remount,size=32m"], &self.dir).unwrap();
    }

    fn spec(&self) -> DiskSpec {
        DiskSpec::File(self.device.as_ref().unwrap().path().into())
    }
}

fn mount(arguments: &[&str], at: &TempDir) -> Result<(), String> {
    let output = Command::new("mount").args(arguments).arg(at.path()).output();
    let output = output.map_err(|error| format!("mount: {error}"))?;
    let said = || String::from_utf8_lossy(&output.stderr).trim().to_owned();
    if output.status.success() { Ok(()) } else { Err(said()) }
}

impl Drop for Thin {
    fn drop(&mut self) {
        self.device = None;
        // The device may still be in use for a moment.
        let _ = Command::new("umount").arg("--lazy").arg(self.dir.path()).status();
    }
}

fn thin() -> Option<Thin> {
    Thin::new().inspect_err(|why| println!("SKIPPED: no device that loses writes: {why}")).ok()
}

/// Fills the first 4 MiB, all of which go into the page cache.
fn fill(worker: &mut Worker<'_>) {
    for chunk in 0..16 {
        assert_eq!(worker.write(chunk * CHUNK as u64, &[7; CHUNK], 0), Ok(()));
    }
}

fn durable(worker: &mut Worker<'_>) -> Result<(), IoError> {
    let view = guest(4096);
    worker.io(0).buffers_mut().push(&view, Gpa(0), 4096).unwrap();
    let result = worker.run(Request::Write { offset: 0, durable: true });
    worker.io(0).buffers_mut().clear(&mut Marks::off());
    result
}

fn is_lost(result: Result<(), IoError>) -> bool {
    matches!(result, Err(IoError::Os(_)))
}

#[test]
fn every_queue_hears_of_it_until_the_disk_is_opened_anew() {
    for kind in ENGINES {
        let Some(thin) = thin() else { return };
        let open = || Disk::open(&thin.spec(), &options(Cache::Writeback, false)).unwrap();
        let disk = open();
        let [mut one, mut two] = [(); 2].map(|()| Worker::new(&disk, kind, 8));
        assert_eq!([one.flush(), two.flush(), durable(&mut two)], [Ok(()); 3], "{kind:?}");
        fill(&mut one);
        assert!(is_lost(one.flush()) && is_lost(two.flush()) && is_lost(one.flush()), "{kind:?}");
        assert!(is_lost(durable(&mut two)) && disk.write_back().is_err(), "{kind:?}");
        // With room again the next writes arrive; those that were lost do not come back.
        thin.grow();
        disk.reload().unwrap();
        assert_eq!(one.write(0, &[1; 4096], 0), Ok(()));
        assert!(is_lost(two.flush()), "{kind:?}");
        drop((one, two));
        let disk = open();
        let mut worker = Worker::new(&disk, kind, 8);
        fill(&mut worker);
        assert_eq!([worker.flush(), durable(&mut worker)], [Ok(()); 2], "{kind:?}");
        assert!(disk.write_back().is_ok());
    }
}

/// What the kernel did not begin says nothing of the cache: it is tried again, and nothing is latched.
#[test]
fn what_was_not_begun_is_tried_again() {
    let image = image(&[7; 64 << 10]);
    let disk = Disk::open(&DiskSpec::File(image.path().into()), &options(Cache::Writeback, false)).unwrap();
    for kind in ENGINES {
        let mut worker = Worker::new(&disk, kind, 8);
        for errno in [Errno::AGAIN, Errno::CANCELED, Errno::INTR] {
            worker.fail_next(errno);
            assert_eq!(worker.flush(), Ok(()), "{kind:?} {errno}");
            worker.fail_next(errno);
            assert_eq!(durable(&mut worker), Ok(()), "{kind:?} {errno}");
            assert_eq!(worker.flush(), Ok(()), "{kind:?} {errno}");
        }
    }
}

/// Neither a durable write nor a disk that is handed over takes it from the flush of another queue.
#[test]
fn what_another_request_finds_is_not_hidden() {
    let Some(thin) = thin() else { return };
    for by_durable_write in [true, false] {
        let disk = Disk::open(&thin.spec(), &options(Cache::Writeback, false)).unwrap();
        let [mut one, mut two] = [(); 2].map(|()| Worker::new(&disk, EngineKind::Auto, 8));
        fill(&mut one);
        if by_durable_write {
            // Another process has all of it written; the durable write is the first of this disk that is told.
            assert!(File::open(thin.device.as_ref().unwrap().path()).unwrap().sync_data().is_err());
            assert!(is_lost(durable(&mut one)));
        } else {
            assert!(disk.write_back().is_err());
        }
        assert!(is_lost(two.flush()), "by a durable write: {by_durable_write}");
    }
}

/// Flushes and durable writes that are in the kernel together: the kernel tells one of them.
#[test]
fn no_flush_that_is_under_way_slips_through() {
    const QUEUES: usize = 4;
    const SLOTS: usize = 4;
    let Some(thin) = thin() else { return };
    for kind in ENGINES {
        let disk = Disk::open(&thin.spec(), &options(Cache::Writeback, false)).unwrap();
        let mut queues = [(); QUEUES].map(|()| Worker::new(&disk, kind, 8).with_slots(SLOTS));
        fill(&mut queues[0]);
        for slot in 0..SLOTS {
            for queue in &mut queues {
                assert_eq!(queue.start(slot, Request::Flush), Step::Pending);
            }
        }
        for queue in &mut queues {
            let mut over = Vec::new();
            while over.len() < SLOTS {
                over.extend(queue.turn());
            }
            assert!(over.iter().all(|(_, result)| is_lost(*result)), "{kind:?}: {over:?}");
        }
    }
}

/// The library's threads flush beside one another as well.
#[cfg(feature = "qcow2")]
#[test]
fn a_qcow2_image_has_the_same_latch() {
    let Some(thin) = thin() else { return };
    let device = thin.device.as_ref().unwrap().path();
    let words = ["create", "-q", "-f", "qcow2", device.to_str().unwrap(), "6M"];
    assert!(Command::new("qemu-img").args(words).status().unwrap().success());
    let disk = Disk::open(&DiskSpec::Qcow2(device.into()), &options(Cache::Writeback, false)).unwrap();
    disk.reload().unwrap();
    let mut queues = [(); 3].map(|()| common::worker(&disk).with_slots(4));
    assert_eq!(queues[1].flush(), Ok(()));
    fill(&mut queues[0]);
    for queue in &mut queues[..2] {
        for slot in 0..4 {
            assert_eq!(queue.start(slot, Request::Flush), Step::Busy);
        }
    }
    for queue in &mut queues[..2] {
        let mut over = Vec::new();
        while over.len() < 4 {
            over.extend(queue.turn());
        }
        assert!(over.iter().all(|(_, result)| is_lost(*result)), "{over:?}");
    }
    assert!(is_lost(queues[2].flush()) && is_lost(queues[0].flush()));
}
