//! Changes memory, translations, the log or the process of a receive ring that is full of credit. No change
//! waits for credit, and each chain completes exactly once.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod rig;

use kickless_device::{Device, Driver, Interest, Next, Update};
use kickless_memory::{Gpa, Log, Map, View};
use kickless_net::{Net, NullPort};
use kickless_testing::{logged, parse_test_frame};
use kickless_virtqueue::Chain;
use kickless_virtqueue::driver::Buffer;
use rig::{Guest, Kind, MEMORY, Rig, SIZE_MAX, card, counter, kinds};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::TryRecvError;

const PORT: NullPort = NullPort { rate: 20_000, lengths: 60..=4000 };

fn run(card: &Arc<Net>, guest: Guest) -> Rig {
    let vring = guest.vring(0, guest.first_avail(), None);
    Rig::start_on(card, guest, vring, card.features())
}

fn fill(guest: &mut Guest) {
    while guest.offer(&[1530], true).is_some() {}
}

/// Receives at least `count` frames, of which the first has the number `number`. Returns the number of the
/// next frame.
fn receive(rig: &mut Rig, number: u64, count: u64) -> u64 {
    let mut next = number;
    while next < number + count {
        fill(rig);
        rig.wait_readable();
        rig.poll();
        while let Some((_, frame)) = rig.receive(12) {
            assert_eq!(parse_test_frame(&frame), Some((0, next)));
            next += 1;
        }
    }
    next
}

/// Polls until no frame is due and the ring waits for the timer, full of credit. Returns the number of the
/// next frame.
fn fill_until_quiet(rig: &mut Rig, number: u64) -> u64 {
    let mut next = number;
    loop {
        fill(rig);
        rig.poll_with(1000, false);
        let taken = next;
        while rig.receive(12).is_some() {
            next += 1;
        }
        if taken == next {
            assert_eq!((rig.last, rig.interest()), (Next::Quiet, Some(Interest::Readable)));
            assert!(rig.task.vring().credit() >= 43);
            return next;
        }
    }
}

#[test]
fn an_invalidation_does_not_wait_for_credit() {
    for kind in kinds() {
        let card = card(1, PORT);
        let mut rig = run(&card, Guest::prepare(kind, SIZE_MAX).behind_iommu());
        fill(&mut rig);
        rig.poll();
        assert_eq!(rig.task.vring().credit(), 0, "nothing is translated");
        rig.translate_all();
        rig.apply(Update::Poll);
        let mut number = receive(&mut rig, 0, 20);
        for _ in 0..3 {
            number = fill_until_quiet(&mut rig, number);
            let (update, done) = rig.invalidate_all();
            rig.apply(update);
            assert_eq!(done.try_recv(), Err(TryRecvError::Disconnected), "{kind:?}: the invalidation waits");
            assert_eq!((rig.task.vring().credit(), rig.task.in_flight()), (0, 0));
            // Without translations, frames stay due and the task waits only for the driver.
            rig.wait_readable();
            rig.poll();
            assert_eq!((rig.last, rig.interest()), (Next::Idle, Some(Interest::None)));
            assert_eq!(rig.receive(12), None);
            rig.translate_all();
            rig.apply(Update::Poll);
            number = receive(&mut rig, number, 20);
        }
        let offered = rig.with_device();
        assert_eq!(rig.stop().1, offered);
    }
}

#[test]
fn a_stop_completes_a_chain_that_is_translated_in_part() {
    for packed in [false, true] {
        let card = card(1, PORT);
        let kind = Kind { packed, event_idx: true, in_order: false };
        let mut guest = Guest::prepare(kind, 16).behind_iommu().with_inflight();
        guest.translate_pages();
        // These are more pages than one pop translates.
        guest
            .add(0, vec![Buffer { addr: rig::PAGES_AT, len: rig::PAGES as u32 * 4096, writable: true }])
            .unwrap();
        let mut vring = guest.vring(0, guest.first_avail(), None);
        let mut chain = Chain::default();
        while !vring.pop_credit(&mut chain) {
            assert!(vring.take_unfinished());
        }
        assert!(vring.use_credit(1));
        drop(vring);
        // The next process stops before it uses the chain.
        let mut rig = run(&card, guest);
        assert_eq!(rig.poll_with(1, false).next, Next::More);
        let polled = rig.poll_once(0);
        assert_eq!(polled.next, Next::More);
        assert!(polled.cost >= 1024 / 16, "{polled:?}");
        let (_, mut guest) = rig.stop_task();
        assert_eq!(guest.take().map(|(id, _, len)| (id, len)), Some((0, 0)));
    }
}

#[test]
fn new_memory_does_not_wait_for_credit() {
    for kind in kinds() {
        let card = card(1, PORT);
        let mut rig = run(&card, Guest::prepare(kind, SIZE_MAX));
        let mut number = 0;
        for _ in 0..5 {
            number = receive(&mut rig, number, 10);
            number = fill_until_quiet(&mut rig, number);
            let old = rig.change_memory();
            assert_eq!((Arc::strong_count(&old), rig.task.vring().credit()), (1, 0));
        }
        receive(&mut rig, number, 10);
    }
}

#[test]
fn received_pages_are_marked_in_the_log() {
    for kind in kinds() {
        let card = card(1, PORT);
        let mut rig = run(&card, Guest::prepare(kind, SIZE_MAX));
        let number = receive(&mut rig, 0, 5);
        let file = rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let len = (MEMORY / 4096).div_ceil(8).next_multiple_of(4096);
        rustix::fs::ftruncate(&file, len).unwrap();
        let log = Arc::new(Log::map(file, 0, len).unwrap());
        let map = Map::new(rig.view.map().slots().to_vec()).unwrap();
        let logged = Arc::new(View::new(map).with_log(Some(log.clone())).unwrap());
        let number = fill_until_quiet(&mut rig, number);
        rig.apply(Update::Memory(logged.clone()));
        rig.view = logged;
        let marked = |pages: &BTreeSet<u64>| -> BTreeSet<u64> {
            pages.iter().copied().filter(|page| log.is_marked(Gpa(page * 4096))).collect()
        };
        rig.poll_with(1000, false);
        let offered = rig.pages_with_device();
        assert!(marked(&offered).is_empty(), "a page of credit is marked");
        rig.wait_readable();
        rig.poll();
        let mut written = BTreeSet::new();
        let mut next = number;
        while let Some((_, buffers, len)) = rig.take() {
            let start = buffers[0].addr;
            written.extend(start / 4096..=(start + u64::from(len) - 1) / 4096);
            next += 1;
        }
        assert!(next > number);
        assert_eq!(marked(&offered), written, "{kind:?}");
    }
}

/// Starts a ring after an earlier process was killed while it wrote frames into three chains.
fn start_after_kill(kind: Kind, card: &Arc<Net>) -> Rig {
    let mut guest = Guest::prepare(kind, 16).with_inflight();
    for _ in 0..10 {
        guest.offer(&[1530], true).unwrap();
    }
    let mut vring = guest.vring(0, guest.first_avail(), None);
    let mut chain = Chain::default();
    for _ in 0..6 {
        assert!(vring.pop_credit(&mut chain));
    }
    assert!(vring.use_credit(3));
    drop(vring);
    let mut rig = run(card, guest);
    assert_eq!(rig.task.in_flight(), 3);
    rig.poll_with(1000, false);
    assert_eq!(rig.task.vring().credit(), 10, "the three chains are credit again");
    rig
}

#[test]
fn frames_go_to_the_chains_of_an_earlier_process_first() {
    for kind in kinds() {
        let card = card(1, NullPort { lengths: 60..=1000, ..PORT });
        let mut rig = start_after_kill(kind, &card);
        for number in 0..10 {
            while counter(&card, "received_frames") <= number {
                rig.wait_readable();
                rig.poll();
            }
            // `receive` checks that chains come back in the order in which they were offered.
            let (_, frame) = rig.receive(12).expect("a frame is lost");
            assert_eq!(parse_test_frame(&frame), Some((0, number)));
        }
        assert_eq!((rig.with_device(), rig.receive(12)), (0, None), "{kind:?}");
    }
}

#[test]
fn a_stop_completes_the_chains_of_an_earlier_process() {
    for kind in kinds() {
        let card = card(1, NullPort { rate: 1, lengths: 60..=60 });
        let rig = start_after_kill(kind, &card);
        let (_, mut guest) = rig.stop_task();
        for id in 0..3 {
            let taken = guest.take().map(|(_, _, len)| len);
            assert_eq!(taken, Some(0), "{kind:?}: chain {id} is not completed");
        }
        assert!(guest.take().is_none());
        // The next process reads in the in-flight buffer that the other chains are not in flight.
        let vring = guest.vring(0, 7, None);
        assert_eq!((vring.resubmissions(), guest.with_device()), (0, 7));
        let mut rig = Rig::start_on(&card, guest, vring, card.features());
        rig.poll();
        assert_eq!(rig.task.vring().credit(), 7);
    }
}

#[test]
fn credit_is_not_in_flight_after_a_kill() {
    for kind in kinds() {
        let card = card(1, PORT);
        let mut rig = run(&card, Guest::prepare(kind, SIZE_MAX).with_inflight());
        for _ in 0..10 {
            receive(&mut rig, 0, 10);
            fill_until_quiet(&mut rig, 0);
            let offered = rig.with_device();
            let guest = rig.kill();
            let vring = guest.vring(0, 1, None);
            assert_eq!((vring.resubmissions(), guest.with_device()), (0, offered), "credit is not in flight");
            rig = Rig::start_on(&card, guest, vring, card.features());
        }
    }
}

/// Returns the log of a ring that starts at `next_avail`.
fn log_of_start(card: &Net, guest: &Guest, next_avail: u16) -> String {
    logged(|| card.start_queue(guest.vring(0, next_avail, None), card.features()).unwrap()).1
}

#[test]
fn a_packed_ring_that_may_stall_is_logged() {
    let card = card(1, PORT);
    for kind in kinds() {
        let (plain, recorded) = (Guest::prepare(kind, 16), Guest::prepare(kind, 16).with_inflight());
        for (guest, next_avail, warns) in [
            (&plain, plain.first_avail(), false),
            (&plain, plain.first_avail() + 1, kind.packed),
            (&recorded, plain.first_avail() + 1, false),
        ] {
            let log = log_of_start(&card, guest, next_avail);
            assert_eq!(log.contains("WARN") && log.contains("no in-flight buffer"), warns, "{log}");
        }
    }
}

/// A front-end gives another index than that of the ring, as DPDK's virtio_user does when a back-end connects
/// anew.
#[test]
fn a_split_ring_continues_at_its_used_index() {
    for kind in kinds().filter(|kind| !kind.packed) {
        let card = card(1, PORT);
        let mut rig = run(&card, Guest::prepare(kind, SIZE_MAX));
        for given in [0, 1, 200, 0x8000, u16::MAX] {
            // More frames than the ring has entries.
            receive(&mut rig, 0, 150);
            let guest = rig.kill();
            let log = log_of_start(&card, &guest, given);
            assert!(log.contains("WARN") && log.contains("continues from its used index"), "{log}");
            let vring = guest.vring(0, given, None);
            rig = Rig::start_on(&card, guest, vring, card.features());
        }
        // `receive` checks that chains come back in the order in which they were offered.
        receive(&mut rig, 0, 150);
        let offered = rig.with_device();
        assert_eq!(rig.stop().1, offered);
    }
}

/// RESET_DEVICE is followed by a new driver in the same memory.
#[test]
fn a_new_driver_starts_after_a_stop_with_credit() {
    for kind in kinds() {
        let card = card(1, PORT);
        let mut rig = run(&card, Guest::prepare(kind, SIZE_MAX));
        for _ in 0..4 {
            receive(&mut rig, 0, 10);
            fill_until_quiet(&mut rig, 0);
            let (_, guest) = rig.stop_task();
            card.reset(Driver::Fresh);
            rig = run(&card, guest.with_new_driver());
        }
    }
}
