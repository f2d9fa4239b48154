//! Tests devices that stop on errors instead of reporting them.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod rig;

use kickless_blk::{Blk, Options};
use kickless_device::{Device, Driver, Next, Operate};
use kickless_disk::{Disk, DiskSpec};
use kickless_io::EngineKind;
use kickless_spec::blk::{self, BlkFeatures, S_IOERR, S_OK};
use rig::{ENGINES, Rig, TestRequest, UNANSWERED, faulty};
use std::sync::Arc;
use std::time::Duration;
use tempfile::NamedTempFile;

const ALL: BlkFeatures = BlkFeatures::empty();
const MIB: u64 = 1 << 20;
/// The time that kept requests get when a caller waits for them.
const KEPT: Duration = Duration::from_secs(2);

fn stopping(disk: Disk) -> Arc<Blk> {
    let options = Options { serial: "rig".into(), queues_max: 4, queue_size_max: rig::SIZE, lock: false };
    let device = Arc::new(Blk::new(disk, options).with_stop_on_error(true));
    device.reset(Driver::Fresh);
    device
}

/// Runs the queue until the device has stopped with this number of requests.
fn run_until_stopped(rig: &mut Rig, requests: u64) {
    let device = rig.device.clone();
    while device.stopped().map_or(0, |stopped| stopped.requests) < requests {
        rig.poll();
        rig.engine.submit().unwrap();
        if rig.operations() > 0 {
            rig.complete();
        }
    }
    rig.poll();
}

/// A file on which the first write fails, and the disk over it.
fn file(rules: &str) -> (NamedTempFile, Disk) {
    let image = NamedTempFile::new().unwrap();
    image.as_file().set_len(MIB).unwrap();
    let disk = faulty(rules, DiskSpec::File(image.path().into()));
    (image, disk)
}

#[test]
fn a_full_disk_stops_and_goes_on() {
    for kind in ENGINES {
        for packed in rig::FORMATS {
            let (_image, disk) = file("enospc@write+nth=1");
            let device = stopping(disk);
            let mut rig = Rig::start(&device, kind, 16, packed, ALL);
            let failed = rig.send(TestRequest::write(8, &[7; 4096]));
            run_until_stopped(&mut rig, 1);
            let stopped = device.stopped().unwrap();
            assert!(stopped.error.starts_with("write: No space left"), "{}", stopped.error);
            assert!(matches!(rig.last, Next::Throttled { .. }), "{:?}", rig.last);
            // It has left the engine, is not answered, and counts as in flight.
            assert_eq!((rig.operations(), rig.queue_in_flight(), rig.answered()), (0, 1, 0));
            assert_eq!(rig.status_now(failed), UNANSWERED);
            // New requests stay in the ring.
            let read = rig.send(TestRequest::read(8, 4096));
            assert_eq!((rig.poll(), rig.queue_in_flight()), (0, 1));
            // A queue that is parked takes it along.
            assert_eq!(rig.park().in_flight, 1);
            rig.unpark();
            assert!(matches!(rig.last, Next::Throttled { .. }), "{:?}", rig.last);
            assert!(device.resume());
            let answers = rig.finish();
            assert_eq!((answers[&failed].status, answers[&read].status), (S_OK, S_OK));
            assert_eq!(rig.contents(8..16), [7; 4096]);
            assert_eq!((rig.errors(), device.stopped(), device.counters()), (0, None, vec![("stops", 1)]));
        }
    }
}

/// A request in many pieces, of which a part was transferred, starts again from its beginning.
#[test]
fn a_request_that_is_half_done_is_done_again() {
    for kind in ENGINES {
        let (_image, disk) = file("short@write+nth=1,enospc@write+nth=2");
        let device = stopping(disk);
        let mut rig = Rig::start(&device, kind, 16, false, ALL);
        let bytes: Vec<u8> = (0..20480_u32).map(|at| (at / 7) as u8).collect();
        let request = TestRequest { cut: 512, apart: true, ..TestRequest::write(3, &bytes) };
        let id = rig.send(request);
        run_until_stopped(&mut rig, 1);
        device.resume();
        assert_eq!(rig.finish()[&id].status, S_OK);
        // Each second sector of the bytes is in a gap between two buffers.
        let contents = rig.contents(3..23);
        assert!(
            contents.chunks(512).zip(bytes.chunks(512).step_by(2)).all(|(on_disk, sent)| on_disk == sent)
        );
    }
}

/// Extents are gone from the request when it fails, so they are restored.
#[test]
fn ranges_are_done_again() {
    let (_image, disk) = file("enospc@zeroes+nth=2");
    let device = stopping(disk);
    let mut rig = Rig::start(&device, EngineKind::Threads, 16, false, ALL);
    assert_eq!(rig.status(TestRequest::write(0, &[9; 8192])), S_OK);
    let id = rig.send(TestRequest::on_ranges(blk::T_WRITE_ZEROES, &[(0, 8, 0), (12, 2, 0)]));
    run_until_stopped(&mut rig, 1);
    device.resume();
    assert_eq!(rig.finish()[&id].status, S_OK);
    let contents = rig.contents(0..16);
    let zeroes: Vec<bool> = contents.chunks(512).map(|sector| sector == [0; 512]).collect();
    assert_eq!(zeroes, (0..16).map(|sector| sector < 8 || sector == 12 || sector == 13).collect::<Vec<_>>());
}

/// Each resume tries each request once. It stops again while the disk is full.
#[test]
fn a_disk_that_is_still_full_stops_again() {
    let (_image, disk) = file("enospc@write");
    let device = stopping(disk);
    let mut rig = Rig::start(&device, EngineKind::Threads, 16, false, ALL);
    (0..5).for_each(|sector| _ = rig.send(TestRequest::write(sector * 8, &[1; 4096])));
    for _ in 0..3 {
        run_until_stopped(&mut rig, 5);
        assert_eq!((device.stopped().unwrap().requests, rig.answered()), (5, 0));
        device.resume();
        assert!(device.stopped().is_none());
        rig.poll();
    }
    // Nothing waits for ever: a stop reports them.
    run_until_stopped(&mut rig, 5);
    rig.limit_waits();
    assert_eq!((rig.poll_with(0), rig.queue_in_flight()), (0, 5));
    assert!(matches!(rig.last, Next::Throttled { .. }), "{:?}", rig.last);
    rig.pass(KEPT);
    while rig.in_flight() > 0 {
        rig.poll_with(0);
        rig.engine.submit().unwrap();
        if rig.operations() > 0 {
            rig.complete();
        }
        rig.take_answers();
    }
    assert!(rig.answers.values().all(|answer| answer.status == S_IOERR));
    assert_eq!((rig.answers.len(), device.stopped(), rig.errors()), (5, None, 5));
}

/// The session waits for memory that a kept request uses. The ring goes on.
#[test]
fn memory_that_is_taken_away_ends_the_wait() {
    let (_image, disk) = file("enospc@write+nth=1,enospc@write+nth=2");
    let device = stopping(disk);
    let mut rig = Rig::start(&device, EngineKind::Threads, 16, false, ALL);
    let id = rig.send(TestRequest::write(0, &[1; 4096]));
    run_until_stopped(&mut rig, 1);
    device.limit_remote_waits();
    rig.poll();
    rig.pass(KEPT / 2);
    rig.poll();
    assert_eq!(rig.answered(), 0);
    device.limit_remote_waits();
    rig.pass(KEPT);
    assert_eq!(rig.finish()[&id].status, S_IOERR);
    // The next error stops it as before, with the whole time.
    assert_eq!(rig.status(TestRequest::write(0, &[2; 4096])), S_OK);
}

/// Errors that nobody can mend are reported, and so is each error of a device that reports.
#[test]
fn other_errors_are_reported() {
    let (_image, disk) = file("eio@write+nth=1,enospc@flush+nth=1");
    let device = stopping(disk);
    let mut rig = Rig::start(&device, EngineKind::Threads, 16, false, ALL);
    assert_eq!(rig.status(TestRequest::write(0, &[1; 512])), S_IOERR);
    assert_eq!(rig.status(TestRequest::flush()), S_IOERR);
    assert_eq!(device.stopped(), None);

    let (_image, disk) = file("enospc@write+nth=1");
    let device = rig::blk(disk);
    let mut rig = Rig::start(&device, EngineKind::Threads, 16, false, ALL);
    assert_eq!(rig.status(TestRequest::write(0, &[1; 512])), S_IOERR);
    assert_eq!((device.stopped(), device.resume(), device.counters()), (None, false, vec![]));
}

/// Several queues stop and go on together.
#[test]
fn all_queues_of_a_device_stop() {
    let (_image, disk) = file("enospc@write+nth=1");
    let device = stopping(disk);
    let mut rigs = [0, 1].map(|index| Rig::start_queue(&device, index, EngineKind::Threads));
    let first = rigs[0].send(TestRequest::write(0, &[1; 512]));
    run_until_stopped(&mut rigs[0], 1);
    let second = rigs[1].send(TestRequest::write(1, &[2; 512]));
    assert_eq!((rigs[1].poll(), rigs[1].queue_in_flight()), (0, 0));
    device.resume();
    assert_eq!(rigs[0].finish()[&first].status, S_OK);
    assert_eq!(rigs[1].finish()[&second].status, S_OK);
}
