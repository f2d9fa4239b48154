//! Tests that a request fails as `Damaged` when its guest memory is cut short, and that the disk does not
//! store zeroes instead of the missing bytes.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{Worker, image, options};
use kickless_disk::{Cache, Disk, DiskSpec, Error, IoError, Request};
use kickless_io::EngineKind;
use kickless_memory::{Gpa, Map, Marks, Slot, UserAddr, View, fault};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::any::Any;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;

const LEN: u64 = 64 << 10;
const ENGINES: [EngineKind; 3] = [EngineKind::Uring, EngineKind::Aio, EngineKind::Threads];

/// Returns disks of `LEN` sevens that copy from guest buffers at an odd address. With each comes the value
/// that keeps it alive, such as its server.
fn disks() -> Vec<(DiskSpec, Box<dyn Any>)> {
    let contents = vec![7; LEN as usize];
    let file = image(&contents);
    let qcow2 = common::qcow2::Image::of(&contents, &[]);
    let server = common::server::Server::start(common::server::Kind::Nbdkit, &contents, &[]);
    vec![
        (DiskSpec::File(file.path().into()), Box::new(file)),
        (DiskSpec::Memory(LEN), Box::new(())),
        (qcow2.spec(), Box::new(qcow2)),
        (server.spec(""), Box::new(server)),
    ]
}

/// Runs a request on a page and a half at `gpa`, in guest memory of which only the first page is left. The
/// memory holds sevens.
fn run_on_damaged_memory(worker: &mut Worker<'_>, request: Request, gpa: u64) -> Result<(), IoError> {
    let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 16 << 10).unwrap();
    let slot = Slot::map(&file, 0, Gpa(0), UserAddr(0), 16 << 10).unwrap();
    let view = Arc::new(View::new(Map::new(vec![slot]).unwrap()));
    // The disk may store the bytes that are left, because the kernel copies piece by piece.
    view.map().write(Gpa(0), &[7; 16 << 10]).unwrap();
    worker.io(0).buffers_mut().push(&view, Gpa(gpa), 6144).unwrap();
    ftruncate(&file, 4096).unwrap();
    let result = worker.run(request);
    worker.io(0).buffers_mut().clear(&mut Marks::off());
    result
}

#[test]
fn missing_memory_is_not_stored_as_zeroes() {
    fault::guard().unwrap();
    for (spec, _keep_alive) in disks() {
        let disk = Disk::open(&spec, &options(Cache::None, false)).unwrap();
        let mut worker = Worker::new(&disk, EngineKind::Threads, 4);
        assert_eq!(worker.write(0, &[7; LEN as usize], 0), Ok(()), "{spec:?}");
        for durable in [false, true] {
            let result = run_on_damaged_memory(&mut worker, Request::Write { offset: 8192, durable }, 1);
            assert_eq!(result, Err(IoError::Damaged), "{spec:?}");
        }
        // The owner of the ring checks the result of a read, so any result is right here.
        let _ = run_on_damaged_memory(&mut worker, Request::Read { offset: 8192 }, 1);
        let (result, bytes) = worker.read(0, LEN as usize);
        assert_eq!(result, Ok(()), "{spec:?}");
        // A disk in memory stores from the guest's memory directly.
        if !matches!(spec, DiskSpec::Memory(_)) {
            assert!(bytes.iter().all(|byte| *byte == 7), "{spec:?}: zeroes were stored");
        }
    }
}

/// The kernel takes the guest's pages itself, or the disk copies them. This depends on the file system, the
/// cache and the address. Both ways report the missing page.
#[test]
fn every_file_and_engine_reports_the_missing_page() {
    fault::guard().unwrap();
    let on_disk = image(&[7; LEN as usize]);
    let on_tmpfs = memfd_create("image", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&on_tmpfs, LEN).unwrap();
    let tmpfs_path = format!("/proc/self/fd/{}", on_tmpfs.as_raw_fd());
    for (path, cache) in [
        (on_disk.path(), Cache::None),
        (on_disk.path(), Cache::Writeback),
        (Path::new(&tmpfs_path), Cache::None),
        (Path::new(&tmpfs_path), Cache::Writeback),
    ] {
        let spec = DiskSpec::File(path.into());
        let disk = match Disk::open(&spec, &options(cache, false)) {
            Err(Error::NoDirect { .. }) => {
                eprintln!("skipped: {} has no direct I/O", path.display());
                continue;
            }
            disk => disk.unwrap(),
        };
        for kind in ENGINES {
            let mut worker = Worker::new(&disk, kind, 4);
            for gpa in [0, 1] {
                for durable in [false, true] {
                    let write = Request::Write { offset: 8192, durable };
                    let result = run_on_damaged_memory(&mut worker, write, gpa);
                    assert_eq!(result, Err(IoError::Damaged), "{spec:?} {cache:?} {kind:?} {gpa}");
                }
            }
            let read = run_on_damaged_memory(&mut worker, Request::Read { offset: 8192 }, 0);
            // A read through a bounce buffer succeeds. The owner of the ring finds the damage after the copy.
            let copied = cache == Cache::None && read == Ok(());
            assert!(copied || read == Err(IoError::Damaged), "{spec:?} {cache:?} {kind:?}: {read:?}");
        }
    }
}
