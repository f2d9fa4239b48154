//! Tests that a disk passes from one process to another under its guest's requests. Two devices in one
//! process stand for the two: they share the open file descriptions, and nothing else.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may")]

mod common;
mod files;
mod lies;
mod nbd;
mod qcow2;
#[path = "../rig/mod.rs"]
mod rig;

use common::{FILE_OPTIONS, OPTIONS, Pair, image, of_file};
use kickless_device::{Device, HandOver, Operate};
use kickless_disk::{Disk, DiskSpec};
use kickless_io::EngineKind;
use kickless_spec::blk::{BlkFeatures, S_OK};
use rig::{FORMATS, Rig, TestRequest};
use tempfile::NamedTempFile;

/// Requests are answered before the hand-over by one process, and after it by the other. Requests that are in
/// the ring meanwhile are answered after it.
fn pass_under_requests(spec: &DiskSpec, options: &kickless_disk::Options, stores: bool) {
    for packed in FORMATS {
        let mut pair = Pair::new(Disk::open(spec, options).unwrap(), spec, options);
        let mut rig = Rig::start(&pair.old, EngineKind::Threads, 8, packed, BlkFeatures::empty());
        for sector in [0, 8, 1000] {
            assert_eq!(rig.status(TestRequest::write(sector, &[7; 4096])), S_OK);
        }
        // Requests fill the ring several times.
        for round in 0..4u8 {
            for at in 0..100 {
                rig.send(TestRequest::write(at * 8, &[round.max(1); 4096]));
            }
            if round == 2 {
                // These are in the ring when it passes.
                let position = rig.park();
                assert_eq!(position.in_flight, 0);
                let handed = pair.give();
                let new = pair.make(handed).unwrap();
                let task = rig.task_of(&new, &position, packed);
                pair.finish(&new);
                rig.go_on_with(&new, task);
            }
            assert!(rig.finish().values().all(|answer| answer.status == S_OK), "{spec} {round}");
        }
        if stores {
            assert_eq!(rig.contents(0..800), [3; 800 * 512], "{spec}");
            assert_eq!(rig.contents(1000..1008), [7; 4096], "{spec}");
        }
        let new = pair.end_old();
        let counts = new.metrics(0).operations;
        let writes = counts.iter().find(|counts| counts.name == "write").unwrap();
        assert_eq!((writes.requests, writes.bytes, writes.errors), (403, 403 * 4096, 0), "{spec}");
        drop(rig);
        new.close().unwrap();
    }
}

#[test]
fn disks_without_a_file_pass_under_requests() {
    for (text, stores) in [
        ("null:1M", false),
        ("fault:delay=1ms@1%+write:null:1M", false),
        ("mem:1M", true),
        ("fault:delay=1ms@1%+write:mem:1M", true),
    ] {
        pass_under_requests(&text.parse().unwrap(), &OPTIONS, stores);
    }
}

#[test]
fn files_pass_under_requests() {
    for options in FILE_OPTIONS {
        let image = image();
        pass_under_requests(&of_file(&image), &options, true);
        let faulty = format!("fault:short@20%+write:{}", image.path().display());
        pass_under_requests(&faulty.parse().unwrap(), &options, true);
        // A file system without a cache takes O_DIRECT, and needs no alignment.
        let image = NamedTempFile::new_in("/dev/shm").unwrap();
        image.as_file().set_len(1 << 20).unwrap();
        pass_under_requests(&of_file(&image), &options, true);
    }
}

/// The second hand-over of memory copies nothing, so it needs no rings that are parked early.
#[test]
fn memory_is_copied_once() {
    let spec = "mem:1M".parse().unwrap();
    let mut pair = Pair::new(Disk::open(&spec, &OPTIONS).unwrap(), &spec, &OPTIONS);
    assert!(pair.old.gives_slowly());
    let new = pair.pass();
    assert!(!new.gives_slowly() && !new.disk().limits().read_only);
    let mut again = Pair::of(new, &spec, &OPTIONS);
    let mut rig = Rig::start(&again.old, EngineKind::Threads, 8, false, BlkFeatures::empty());
    assert_eq!(rig.status(TestRequest::write(0, &[5; 512])), S_OK);
    let handed = again.give();
    // Both processes have the same memory.
    assert_eq!(rig.status(TestRequest::write(1, &[6; 512])), S_OK);
    let new = again.make(handed).unwrap();
    again.finish(&new);
    let mut rig = Rig::start(&new, EngineKind::Threads, 8, false, BlkFeatures::empty());
    assert_eq!(rig.contents(0..2), [[5; 512], [6; 512]].concat());
}

/// All that a driver and an operator have set passes. The start of a ring before the last state changes
/// nothing of it.
#[test]
fn the_state_of_the_device_passes() {
    for (writeback, paused) in [(true, false), (false, true)] {
        let image = image();
        let (spec, options) = (of_file(&image), FILE_OPTIONS[0]);
        let mut pair = Pair::new(Disk::open(&spec, &options).unwrap(), &spec, &options);
        let mut rig = Rig::start(&pair.old, EngineKind::Threads, 8, false, BlkFeatures::empty());
        let handed = pair.give();
        rig.set_writeback(writeback);
        pair.old.set_paused(paused).unwrap();
        let position = rig.park();
        let new = pair.make(handed).unwrap();
        let task = rig.task_of(&new, &position, false);
        pair.finish(&new);
        assert_eq!(new.save(), pair.old.save());
        rig.go_on_with(&new, task);
        let id = rig.send(TestRequest::write(0, &[1; 512]));
        rig.run_once();
        assert_eq!(rig.answered() == 0 && rig.queue_in_flight() == 0, paused);
        new.set_paused(false).unwrap();
        assert_eq!(rig.finish()[&id].status, S_OK);
    }
}
