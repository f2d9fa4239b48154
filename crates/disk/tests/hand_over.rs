//! What was written is in the image when another host is given it, though this one has it in its cache.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{Worker, device, image, options};
use kickless_disk::{Cache, Disk, DiskSpec};
use kickless_io::EngineKind;
use kickless_testing::Random;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs::File;
use std::os::unix::fs::FileExt;

/// The cache of a loop device is not that of the file behind it, which stands for the other host. Nothing but this is in this
/// program, for its descriptors are counted.
#[test]
fn what_was_written_is_there_when_it_is_handed_over() {
    const LEN: usize = 1 << 20;
    let image = image(&vec![0; LEN]);
    let behind = File::open(image.path()).unwrap();
    let device = match device(image, false) {
        Ok(device) => device,
        Err(why) => return println!("SKIPPED: no loop device with blocks of 4096 bytes: {why}"),
    };
    let disk = Disk::open(&DiskSpec::File(device.path().into()), &options(Cache::Writeback, false)).unwrap();
    let mut worker = Worker::new(&disk, EngineKind::Threads, 4);
    let mut random = Random(9);
    // The second time no descriptor is to be had, for the flush to have one of its own.
    for limited in [false, true] {
        let bytes = random.bytes(LEN as u64);
        worker.write(0, &bytes, 0).unwrap();
        let before = getrlimit(Resource::Nofile);
        if limited {
            setrlimit(Resource::Nofile, Rlimit { current: Some(0), ..before }).unwrap();
            assert!(File::open("/dev/null").is_err());
        }
        let handed_over = disk.write_back();
        setrlimit(Resource::Nofile, before).unwrap();
        handed_over.unwrap();
        let mut there = vec![0; LEN];
        behind.read_exact_at(&mut there, 0).unwrap();
        assert!(there == bytes, "limited: {limited}");
    }
}
