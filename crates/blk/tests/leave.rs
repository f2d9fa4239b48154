//! Tests queues that leave requests in the in-flight buffer when they stop.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod rig;

use kickless_blk::{Blk, Options};
use kickless_device::{Device, Driver, Next};
use kickless_disk::{Disk, DiskSpec};
use kickless_io::EngineKind;
use kickless_spec::blk::{self, BlkFeatures, S_IOERR, S_OK};
use rig::{ENGINES, Rig, TestRequest, faulty};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;
use tempfile::NamedTempFile;

const ALL: BlkFeatures = BlkFeatures::empty();
const MIB: u64 = 1 << 20;
/// More than the time that unfinished requests get.
const LONG: Duration = Duration::from_secs(1);

fn image(format: &str) -> NamedTempFile {
    let image = NamedTempFile::new().unwrap();
    if format == "raw" {
        image.as_file().set_len(MIB).unwrap();
    } else {
        let mut make = Command::new("qemu-img");
        make.args(["create", "-q", "-f", format]).arg(image.path()).arg(MIB.to_string());
        assert!(make.status().unwrap().success());
    }
    image
}

fn spec(format: &str, path: &Path) -> DiskSpec {
    let scheme = if format == "raw" { "" } else { "qcow2:" };
    format!("{scheme}{}", path.display()).parse().unwrap()
}

/// A slow disk has its requests cancelled and left, and the next process does them. Requests that were not
/// popped stay in the ring.
#[test]
fn what_is_in_flight_is_left() {
    for format in ["raw", "qcow2"] {
        for kind in ENGINES {
            for packed in rig::FORMATS {
                let image = image(format);
                let slow = rig::blk(faulty("delay=60s@write", spec(format, image.path())));
                slow.disk().reload(false).unwrap();
                let mut rig = Rig::start(&slow, kind, 4, packed, ALL);
                let buffer = rig.track(packed);
                // More than the engine has room for.
                let writes: Vec<u16> = (0..8_u8)
                    .map(|nth| rig.send(TestRequest::write(u64::from(nth) * 8, &[nth + 1; 4096])))
                    .collect();
                rig.poll();
                let zeroes = rig.send(TestRequest::on_ranges(blk::T_WRITE_ZEROES, &[(64, 8, 0)]));
                let left = rig.stop_and_leave(LONG);
                assert_eq!((rig.answered(), rig.errors()), (0, 0), "{format} {kind:?}");
                assert!((1..=9).contains(&left), "{left}");
                slow.disk().write_back().unwrap();

                rig.device = rig::blk(rig::open(&spec(format, image.path())));
                rig.device.disk().reload(false).unwrap();
                rig.restart_with(&buffer, packed);
                assert_eq!(rig.queue_in_flight(), usize::from(left));
                let answers = rig.finish();
                assert!(writes.iter().chain([&zeroes]).all(|id| answers[id].status == S_OK));
                assert_eq!(answers.len(), 9, "each is answered once");
                let contents = rig.contents(0..64);
                assert!((0..8).all(|nth| contents[4096 * nth..4096 * (nth + 1)] == [nth as u8 + 1; 4096]));
            }
        }
    }
}

/// A disk that works has the time to do what is in flight, and nothing is left.
#[test]
fn a_disk_that_works_leaves_nothing() {
    for kind in ENGINES {
        let image = image("raw");
        let device = rig::blk(rig::open(&spec("raw", image.path())));
        let mut rig = Rig::start(&device, kind, 16, false, ALL);
        let _buffer = rig.track(false);
        let ids: Vec<u16> = (0..8).map(|nth| rig.send(TestRequest::write(nth * 8, &[1; 4096]))).collect();
        rig.poll();
        assert_eq!(rig.stop_and_leave(Duration::ZERO), 0);
        assert!(ids.iter().all(|id| rig.answers[id].status == S_OK));
    }
}

/// An error that the disk found itself is reported, also at such a stop. Without a buffer nothing is left.
#[test]
fn errors_and_rings_without_a_buffer_are_answered() {
    for tracks in [true, false] {
        let image = image("raw");
        let rules = if tracks { "eio@write" } else { "delay=200ms@write" };
        let device = rig::blk(faulty(rules, spec("raw", image.path())));
        let mut rig = Rig::start(&device, EngineKind::Threads, 16, false, ALL);
        let _buffer = tracks.then(|| rig.track(false));
        let id = rig.send(TestRequest::write(0, &[1; 4096]));
        rig.poll();
        assert_eq!(rig.stop_and_leave(LONG), 0);
        assert_eq!(rig.answers[&id].status, if tracks { S_IOERR } else { S_OK });
    }
}

/// A request that waits for memory was not started, and is left as well.
#[test]
fn a_request_that_waits_for_memory_is_left() {
    let image = image("raw");
    let disk = faulty("delay=60s@write", spec("raw", image.path()));
    let options = Options { serial: "rig".into(), queues_max: 4, queue_size_max: rig::SIZE, lock: false };
    let device = Arc::new(Blk::new(disk, options).with_pieces_max(0));
    device.reset(Driver::Fresh);
    let mut rig = Rig::start(&device, EngineKind::Threads, 16, false, ALL);
    let buffer = rig.track(false);
    let pieces = |nth: u8| TestRequest {
        cut: 512,
        apart: true,
        ..TestRequest::write(u64::from(nth) * 50, &[nth; 50 * 512])
    };
    (1..3).for_each(|nth| _ = rig.send(pieces(nth)));
    rig.poll();
    assert_eq!((rig.queue_in_flight(), rig.last), (2, Next::Blocked), "the second one does not wait");
    assert_eq!(rig.stop_and_leave(LONG), 2);
    rig.device = rig::blk(open_raw(&image));
    rig.restart_with(&buffer, false);
    assert!(rig.finish().values().all(|answer| answer.status == S_OK));
}

fn open_raw(image: &NamedTempFile) -> Disk {
    rig::open(&spec("raw", image.path()))
}
