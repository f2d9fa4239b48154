//! Requests that a worker does in steps, and requests that wait for room for the pieces of their buffers.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod rig;

use kickless_blk::{Blk, Options};
use kickless_device::Next;
use kickless_disk::DiskSpec;
use kickless_io::EngineKind;
use kickless_spec::blk::{self, BlkFeatures, S_OK};
use rig::{Ask, DATA_MAX, ENGINES, Rig, UNANSWERED, faulty, open};
use std::io::Write;
use std::sync::Arc;
use tempfile::NamedTempFile;

const STEP: usize = 128 << 10;
const MIB: usize = 1 << 20;
const ALL: BlkFeatures = BlkFeatures::empty();

fn memory(size: usize) -> Rig {
    Rig::start(&rig::blk(open(&DiskSpec::Memory(size as u64))), EngineKind::Threads, 4, false, ALL)
}

/// Looks until there is nothing to go on with. No look takes more than two steps. Returns how many there were.
fn look_by_look(rig: &mut Rig, budget: u32) -> usize {
    for looks in 1.. {
        let before = rig.cost;
        rig.poll_with(budget);
        assert!(rig.cost - before <= 2 * (STEP / 4096) as u32 + 65, "a look of {}", rig.cost - before);
        if rig.last != Next::More {
            return looks;
        }
    }
    0
}

#[test]
fn a_long_copy_is_done_in_steps_and_costs_what_it_takes() {
    for request in [Ask::read(0, 4 * MIB), Ask::write(0, &[7; 4 * MIB])] {
        let mut rig = memory(8 * MIB);
        rig.ask(request);
        assert_eq!((rig.poll_with(1), rig.last), (1, Next::More));
        assert_eq!(rig.in_flight(), 1);
        assert_eq!(look_by_look(&mut rig, 1) + 1, 4 * MIB / STEP);
        assert_eq!((rig.last, rig.cost as usize), (Next::Idle, 4 * MIB / 4096 + 1));
        assert!(rig.finish().into_values().all(|answer| answer.status == S_OK));
    }
}

/// 64 ranges: of 4 MiB that are zeroed, or of 256 MiB that are given back.
#[test]
fn long_ranges_are_done_in_steps() {
    let ranges = |sectors: u32| (0..64).map(|n| (u64::from(n * sectors), sectors, 0)).collect::<Vec<_>>();
    for (kind, sectors) in
        [(blk::T_WRITE_ZEROES, 8 << 10), (blk::T_SECURE_ERASE, 8 << 10), (blk::T_DISCARD, 512 << 10)]
    {
        let mut rig = memory(16 << 30);
        rig.ask(Ask::on_ranges(kind, &ranges(sectors)));
        let looks = look_by_look(&mut rig, 1);
        assert!(looks > 1000, "{kind}: {looks} looks");
        assert_eq!(rig.finish().len(), 1);
    }
}

/// A request that is short is not held up by long ones that came before.
#[test]
fn steps_and_the_ring_take_turns() {
    let mut rig = memory(64 * MIB);
    let long = (0..4).map(|n| (n * 8192, 8192, 0)).collect::<Vec<_>>();
    for _ in 0..3 {
        rig.ask(Ask::on_ranges(blk::T_WRITE_ZEROES, &long));
    }
    let short = rig.ask(Ask::read(0, 512));
    let mut looks = 0;
    while rig.status_now(short) == UNANSWERED {
        rig.poll_with(1);
        looks += 1;
    }
    assert!(looks < 20, "{looks}");
    assert_eq!(rig.answered(), 1, "the long ones are not done");
    assert_eq!(rig.finish().len(), 4);
}

/// A queue that stops completes what it has popped, in steps, and pops nothing more.
#[test]
fn a_stop_completes_what_goes_on() {
    let mut rig = memory(64 * MIB);
    rig.ask(Ask::on_ranges(blk::T_WRITE_ZEROES, &[(0, 8192, 0)]));
    assert_eq!((rig.poll_with(1), rig.last), (1, Next::More));
    rig.ask(Ask::flush());
    while rig.last == Next::More {
        assert_eq!(rig.poll_with(0), 0);
    }
    assert_eq!(rig.answered(), 1);
    assert_eq!(rig.finish().len(), 2);
}

/// The same beneath faults that hold some of it up.
#[test]
fn what_is_held_up_goes_on_in_steps() {
    let device = rig::blk(faulty("delay=5ms@50%", DiskSpec::Memory(8 << 20)));
    let mut rig = Rig::start(&device, EngineKind::Threads, 4, false, ALL);
    for _ in 0..4 {
        rig.ask(Ask::on_ranges(blk::T_WRITE_ZEROES, &[(0, 8192, 0)]));
    }
    assert!(rig.finish().into_values().all(|answer| answer.status == S_OK));
}

fn crowded(pieces: usize) -> Ask {
    Ask { cut: 512, apart: true, ..Ask::read(0, pieces * 512) }
}

/// With room for two requests of 50 pieces, others wait for them; all are answered, whatever does the work.
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
            rig.ask(crowded(50));
        }
        let answers = rig.finish();
        assert!(answers.len() == 8 && answers.into_values().all(|answer| answer.status == S_OK));
    }
    assert!(crowded(50).len_in * 2 < DATA_MAX);
}

/// The third waits, and small ones behind it do too: they come in their order.
#[test]
fn a_queue_takes_nothing_new_while_a_request_waits_for_room() {
    let options = Options { serial: "rig".into(), queues_max: 1, queue_size_max: 256, lock: false };
    let disk = faulty("delay=50ms", DiskSpec::Memory(MIB as u64));
    let device = Arc::new(Blk::new(disk, options).with_pieces_max(150));
    let mut rig = Rig::start(&device, EngineKind::Threads, 64, false, ALL);
    (0..3).for_each(|_| _ = rig.ask(crowded(50)));
    (0..3).for_each(|_| _ = rig.ask(Ask::read(0, 512)));
    assert_eq!((rig.poll(), rig.last), (3, Next::Blocked));
    // Neither does it stop before that.
    assert_eq!((rig.poll_with(0), rig.last), (0, Next::Blocked));
    assert!(rig.finish().into_values().all(|answer| answer.status == S_OK));
}
