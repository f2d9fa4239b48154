//! Tests that `DiskControl::write_back` moves all data from the page cache to the image, for another host to
//! read.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{Worker, image, loop_device, options};
use kickless_disk::{Cache, Disk, DiskSpec};
use kickless_io::EngineKind;
use kickless_testing::Random;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs::File;
use std::os::unix::fs::FileExt;

/// Reads through the file behind a loop device, which has a page cache of its own. It stands for another
/// host.
///
/// The program has no other test, because this one limits the descriptors of the process.
#[test]
fn write_back_empties_the_page_cache() {
    const LEN: usize = 1 << 20;
    let image = image(&vec![0; LEN]);
    let backing_file = File::open(image.path()).unwrap();
    let device = match loop_device(image, false) {
        Ok(device) => device,
        Err(why) => return println!("SKIPPED: no loop device with blocks of 4096 bytes: {why}"),
    };
    let disk = Disk::open(&DiskSpec::File(device.path().into()), &options(Cache::Writeback, false)).unwrap();
    let mut worker = Worker::new(&disk, EngineKind::Threads, 4);
    let mut random = Random(9);
    // The second time, the flush cannot open a descriptor of its own.
    for limited in [false, true] {
        let bytes = random.bytes(LEN as u64);
        worker.write(0, &bytes, 0).unwrap();
        let before = getrlimit(Resource::Nofile);
        if limited {
            setrlimit(Resource::Nofile, Rlimit { current: Some(0), ..before }).unwrap();
            assert!(File::open("/dev/null").is_err());
        }
        let result = disk.write_back();
        setrlimit(Resource::Nofile, before).unwrap();
        result.unwrap();
        let mut read = vec![0; LEN];
        backing_file.read_exact_at(&mut read, 0).unwrap();
        assert!(read == bytes, "limited: {limited}");
    }
}
