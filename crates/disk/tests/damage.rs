//! Guest memory that is cut short under a request: zeroes in its place are not stored, and nobody is told that data was.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{Worker, image, options};
use kickless_disk::{Cache, Disk, DiskSpec, IoError, Request};
use kickless_io::EngineKind;
use kickless_memory::{Gpa, Map, Marks, Slot, UserAddr, View, fault};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::any::Any;
use std::sync::Arc;

const LEN: u64 = 64 << 10;

/// Disks of `LEN` sevens that copy what a guest has, where its buffers begin at an odd address, and what they need to be there.
fn disks() -> Vec<(DiskSpec, Box<dyn Any>)> {
    let contents = vec![7; LEN as usize];
    let file = image(&contents);
    #[allow(unused_mut, reason = "there may be no more")]
    let mut specs: Vec<(DiskSpec, Box<dyn Any>)> =
        vec![(DiskSpec::File(file.path().into()), Box::new(file)), (DiskSpec::Memory(LEN), Box::new(()))];
    #[cfg(feature = "qcow2")]
    {
        let image = common::qcow2::Image::of(&contents, &[]);
        specs.push((image.spec(), Box::new(image)));
    }
    #[cfg(feature = "nbd")]
    {
        let server = common::server::Server::start(common::server::Kind::Nbdkit, &contents, &[]);
        specs.push((server.spec(""), Box::new(server)));
    }
    specs
}

/// A request on a page and a half from an odd address on, of memory of which only a page is left.
fn on_damaged(worker: &mut Worker<'_>, request: Request) -> Result<(), IoError> {
    let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 16 << 10).unwrap();
    let slot = Slot::map(&file, 0, Gpa(0), UserAddr(0), 16 << 10).unwrap();
    let view = Arc::new(View::new(Map::new(vec![slot]).unwrap()));
    worker.io(0).buffers_mut().push(&view, Gpa(1), 6144).unwrap();
    ftruncate(&file, 4096).unwrap();
    let result = worker.run(request);
    worker.io(0).buffers_mut().clear(&mut Marks::off());
    result
}

#[test]
fn what_is_not_there_is_not_stored() {
    fault::guard().unwrap();
    for (spec, _kept) in disks() {
        let disk = Disk::open(&spec, &options(Cache::None, false)).unwrap();
        let mut worker = Worker::new(&disk, EngineKind::Threads, 4);
        assert_eq!(worker.write(0, &[7; LEN as usize], 0), Ok(()), "{spec:?}");
        for durable in [false, true] {
            let result = on_damaged(&mut worker, Request::Write { offset: 8192, durable });
            assert_eq!(result, Err(IoError::Damaged), "{spec:?}");
        }
        // What was read is no answer: who has the ring sees to that.
        let _ = on_damaged(&mut worker, Request::Read { offset: 8192 });
        let (result, bytes) = worker.read(0, LEN as usize);
        assert_eq!(result, Ok(()), "{spec:?}");
        // A disk in memory has no copy of what it stores.
        if !matches!(spec, DiskSpec::Memory(_)) {
            assert!(bytes.iter().all(|byte| *byte == 7), "{spec:?}: zeroes were stored");
        }
    }
}
