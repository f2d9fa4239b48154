//! Tests requests that run in steps, and requests that wait for room for the pieces of their buffers.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod rig;

use kickless_blk::{Blk, Options};
use kickless_device::Next;
use kickless_disk::DiskSpec;
use kickless_io::EngineKind;
use kickless_spec::blk::{self, BlkFeatures, S_OK};
use rig::{DATA_MAX, ENGINES, Rig, TestRequest, UNANSWERED, faulty, open};
use std::io::Write;
use std::process::Command;
use std::sync::Arc;
use tempfile::NamedTempFile;

const STEP: usize = 128 << 10;
const MIB: usize = 1 << 20;
const ALL: BlkFeatures = BlkFeatures::empty();

fn memory(size: usize) -> Rig {
    Rig::start(&rig::blk(open(&DiskSpec::Memory(size as u64))), EngineKind::Threads, 4, false, ALL)
}

/// Polls until the queue needs no further poll, and returns the number of polls. No poll may take more than
/// two steps.
fn poll_until_idle(rig: &mut Rig, budget: u32) -> usize {
    for polls in 1.. {
        let before = rig.cost;
        rig.poll_with(budget);
        assert!(rig.cost - before <= 2 * (STEP / 4096) as u32 + 65, "a poll cost {}", rig.cost - before);
        if rig.last != Next::More {
            return polls;
        }
    }
    0
}

#[test]
fn a_long_copy_runs_in_steps_and_costs_its_length() {
    for request in [TestRequest::read(0, 4 * MIB), TestRequest::write(0, &[7; 4 * MIB])] {
        let mut rig = memory(8 * MIB);
        rig.send(request);
        assert_eq!((rig.poll_with(1), rig.last), (1, Next::More));
        assert_eq!(rig.in_flight(), 1);
        assert_eq!(poll_until_idle(&mut rig, 1) + 1, 4 * MIB / STEP);
        assert_eq!((rig.last, rig.cost as usize), (Next::Idle, 4 * MIB / 4096 + 1));
        assert!(rig.finish().into_values().all(|answer| answer.status == S_OK));
    }
}

/// 64 ranges, of 4 MiB each to write zeroes, or of 256 MiB each to discard.
#[test]
fn long_ranges_run_in_steps() {
    let ranges = |sectors: u32| (0..64).map(|n| (u64::from(n * sectors), sectors, 0)).collect::<Vec<_>>();
    for (kind, sectors) in [(blk::T_WRITE_ZEROES, 8 << 10), (blk::T_DISCARD, 512 << 10)] {
        let mut rig = memory(16 << 30);
        rig.send(TestRequest::on_ranges(kind, &ranges(sectors)));
        let polls = poll_until_idle(&mut rig, 1);
        assert!(polls > 1000, "{kind}: {polls} polls");
        assert_eq!(rig.finish().len(), 1);
    }
}

/// Long requests must not delay a short one that came after them.
#[test]
fn steps_and_the_ring_take_turns() {
    let mut rig = memory(64 * MIB);
    let long = (0..4).map(|n| (n * 8192, 8192, 0)).collect::<Vec<_>>();
    for _ in 0..3 {
        rig.send(TestRequest::on_ranges(blk::T_WRITE_ZEROES, &long));
    }
    let short = rig.send(TestRequest::read(0, 512));
    let mut polls = 0;
    while rig.status_now(short) == UNANSWERED {
        rig.poll_with(1);
        polls += 1;
    }
    assert!(polls < 20, "{polls}");
    assert_eq!(rig.answered(), 1, "the long requests are not done");
    assert_eq!(rig.finish().len(), 4);
}

/// A queue that stops finishes its popped requests in steps, and pops no more.
#[test]
fn a_stop_finishes_requests_that_run_in_steps() {
    let mut rig = memory(64 * MIB);
    rig.send(TestRequest::on_ranges(blk::T_WRITE_ZEROES, &[(0, 8192, 0)]));
    assert_eq!((rig.poll_with(1), rig.last), (1, Next::More));
    rig.send(TestRequest::flush());
    while rig.last == Next::More {
        assert_eq!(rig.poll_with(0), 0);
    }
    assert_eq!(rig.answered(), 1);
    assert_eq!(rig.finish().len(), 2);
}

/// A queue that stops begins the requests of an earlier process in turns, too.
#[test]
fn a_stop_begins_requests_of_an_earlier_process_in_turns() {
    let mut rig = memory(MIB);
    for _ in 0..20 {
        rig.send(TestRequest::read(0, 32 << 10));
    }
    rig.restart_after_kill();
    // Each request costs 9.
    assert_eq!((rig.poll_with(0), rig.last), (8, Next::More));
    while rig.last == Next::More {
        rig.poll_with(0);
    }
    assert_eq!(rig.finish().len(), 20);
}

/// Zeroes for a part of a cluster are data, and a step follows their write. The queue asks for a poll then.
#[test]
fn a_request_has_steps_left_after_an_operation() {
    let image = NamedTempFile::new().unwrap();
    let mut made = Command::new("qemu-img");
    made.args(["create", "-q", "-f", "qcow2"]).arg(image.path()).arg("1M");
    assert!(made.status().unwrap().success());
    let disk = open(&DiskSpec::Qcow2(image.path().into()));
    // The image is open from here on.
    disk.reload(false).unwrap();
    let mut rig = Rig::start(&rig::blk(disk), EngineKind::Threads, 4, false, ALL);
    assert_eq!(rig.status(TestRequest::write(0, &[7; 4096])), S_OK);
    let ranges = [(1000, 1, 0), (1, 255, 0), (1100, 1, 0)];
    let zeroes = rig.send(TestRequest::on_ranges(blk::T_WRITE_ZEROES, &ranges));
    rig.poll();
    while rig.status_now(zeroes) == UNANSWERED {
        let (answers, asks_for_poll) = rig.complete();
        assert!(answers > 0 || asks_for_poll || rig.operations() > 0, "the queue sleeps with steps left");
        if asks_for_poll {
            rig.poll();
        }
    }
    assert_eq!(rig.finish()[&zeroes].status, S_OK);
}

/// Faults delay some of the steps.
#[test]
fn delayed_requests_run_in_steps() {
    let device = rig::blk(faulty("delay=5ms@50%", DiskSpec::Memory(8 << 20)));
    let mut rig = Rig::start(&device, EngineKind::Threads, 4, false, ALL);
    for _ in 0..4 {
        rig.send(TestRequest::on_ranges(blk::T_WRITE_ZEROES, &[(0, 8192, 0)]));
    }
    assert!(rig.finish().into_values().all(|answer| answer.status == S_OK));
}

fn request_of_pieces(pieces: usize) -> TestRequest {
    TestRequest { cut: 512, apart: true, ..TestRequest::read(0, pieces * 512) }
}

/// There is room for two requests of 50 pieces, so the others wait. All are answered, on every engine.
#[test]
fn requests_wait_for_room_for_their_pieces() {
    let mut image = NamedTempFile::new().unwrap();
    image.write_all(&[1; MIB]).unwrap();
    let file = || DiskSpec::File(image.path().into());
    let serial = || Options { serial: "rig".into(), queues_max: 1, queue_size_max: 256, lock: false };
    let mut disks: Vec<_> = ENGINES.map(|kind| (kind, open(&file()))).into();
    disks.push((EngineKind::Threads, open(&DiskSpec::Memory(MIB as u64))));
    disks.push((EngineKind::Threads, faulty("delay=2ms", DiskSpec::Memory(MIB as u64))));
    for (kind, disk) in disks {
        let device = Arc::new(Blk::new(disk, serial()).with_pieces_max(150));
        let mut rig = Rig::start(&device, kind, 64, false, ALL);
        for _ in 0..8 {
            rig.send(request_of_pieces(50));
        }
        let answers = rig.finish();
        assert!(answers.len() == 8 && answers.into_values().all(|answer| answer.status == S_OK));
    }
    assert!(request_of_pieces(50).len_in * 2 < DATA_MAX);
}

/// The third request waits, and so do small ones after it, because requests are popped in order.
#[test]
fn a_queue_takes_nothing_new_while_a_request_waits_for_room() {
    let options = Options { serial: "rig".into(), queues_max: 1, queue_size_max: 256, lock: false };
    let disk = faulty("delay=50ms", DiskSpec::Memory(MIB as u64));
    let device = Arc::new(Blk::new(disk, options).with_pieces_max(150));
    let mut rig = Rig::start(&device, EngineKind::Threads, 64, false, ALL);
    (0..3).for_each(|_| _ = rig.send(request_of_pieces(50)));
    (0..3).for_each(|_| _ = rig.send(TestRequest::read(0, 512)));
    assert_eq!((rig.poll(), rig.last), (3, Next::Blocked));
    // It does not stop either before the request has run.
    assert_eq!((rig.poll_with(0), rig.last), (0, Next::Blocked));
    assert!(rig.finish().into_values().all(|answer| answer.status == S_OK));
}

/// Requests of a slow disk are tried again in each poll. They are paid for, and keep no others in the ring.
#[test]
fn requests_that_wait_keep_no_others_from_a_small_budget() {
    let device = rig::blk(faulty("delay=60s", DiskSpec::Memory(MIB as u64)));
    let mut rig = Rig::start(&device, EngineKind::Threads, 64, false, ALL);
    (0..64).for_each(|_| _ = rig.send(TestRequest::read(0, 512)));
    let taken: u32 = (0..64).map(|_| rig.poll_with(2)).sum();
    assert_eq!((taken, rig.queue_in_flight()), (64, 64));
    let before = rig.cost;
    assert_eq!((rig.poll_with(2), rig.last), (0, Next::Waiting));
    assert!(rig.cost > before, "the visit is not free");
}
