//! Delivers test frames through real rings. They arrive whole and in order, and no change waits for credit.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod rig;

use kickless_device::{Device, Driver, Interest, Next, Update};
use kickless_net::{Net, NullPort};
use kickless_net_port::TestFrame;
use kickless_spec::features::Features;
use kickless_spec::net::NetFeatures;
use kickless_testing::{GuestRing, parse_test_frame};
use proptest::prelude::*;
use rig::{Kind, Rig, SIZE_MAX, card, counter, kinds};
use std::sync::Arc;
use std::time::{Duration, Instant};

const RATE: u32 = 20_000;
/// The limit of a wait. Even a slow machine needs less.
const TIMEOUT: Duration = Duration::from_secs(60);

fn port(lengths: std::ops::RangeInclusive<u32>) -> NullPort {
    NullPort { rate: RATE, lengths }
}

const SPLIT: Kind = Kind { packed: false, event_idx: true, in_order: false };

/// Polls until this counter of the card is not zero.
fn poll_until_counted(rig: &mut Rig, card: &Net, name: &str) {
    let begun = Instant::now();
    while counter(card, name) == 0 {
        assert!(begun.elapsed() < TIMEOUT, "{name}");
        rig.poll();
    }
}

/// Receives at least `count` frames, and keeps the ring full. Checks that each frame is whole, has the right
/// length and follows the one before.
fn receive(rig: &mut Rig, port: &NullPort, from: u64, count: u64, lens: &[u32], header_len: usize) {
    let begun = Instant::now();
    let mut number = from;
    while number < from + count {
        assert!(begun.elapsed() < TIMEOUT, "frame {number} does not arrive: {:?}", rig.last);
        while rig.offer(lens, true).is_some() {}
        rig.poll();
        while let Some((header, frame)) = rig.receive(header_len) {
            assert_eq!(parse_test_frame(&frame), Some((0, number)));
            assert_eq!(frame.len(), port.length(number) as usize);
            assert_eq!((header.flags, header.gso_type), (0, 0));
            number += 1;
        }
    }
}

#[test]
fn frames_arrive_whole_and_in_order_in_several_buffers() {
    for kind in kinds() {
        let port = port(60..=9000);
        let card = card(1, port.clone());
        let mut rig = Rig::start(&card, 0, kind, 64, card.features());
        receive(&mut rig, &port, 0, 300, &[700], 12);
        receive(&mut rig, &port, counter(&card, "received_frames"), 100, &[13, 5, 1500], 12);
        assert!(counter(&card, "received_frames") >= 400, "{kind:?}");
    }
}

#[test]
fn frames_arrive_in_one_chain_each_without_merging() {
    for kind in kinds() {
        let port = port(60..=1514);
        let card = card(1, port.clone());
        let long = NetFeatures::MRG_RXBUF | (NetFeatures::GUEST_OFFLOADS - NetFeatures::GUEST_CSUM);
        let mut rig = Rig::start(&card, 0, kind, 32, rig::without(&card, long));
        receive(&mut rig, &port, 0, 200, &[12, 1518], 12);
        assert_eq!(counter(&card, "dropped_long"), 0);
    }
}

#[test]
fn a_legacy_driver_has_a_shorter_header() {
    let port = port(60..=1514);
    let card = card(1, port.clone());
    let long = NetFeatures::MRG_RXBUF | (NetFeatures::GUEST_OFFLOADS - NetFeatures::GUEST_CSUM);
    let features = rig::without(&card, long) - Features::VERSION_1;
    let mut rig =
        Rig::start(&card, 0, Kind { packed: false, event_idx: false, in_order: false }, 32, features);
    receive(&mut rig, &port, 0, 50, &[10, 1518], 10);
}

#[test]
fn the_longest_frames_arrive() {
    for packed in [false, true] {
        let port = port(TestFrame::LEN_MAX - 200..=TestFrame::LEN_MAX);
        let card = card(1, port.clone());
        let mut rig = Rig::start(&card, 0, Kind { packed, ..SPLIT }, SIZE_MAX, card.features());
        receive(&mut rig, &port, 0, 20, &[1530], 12);
    }
}

#[test]
fn frames_that_the_driver_never_has_room_for_are_dropped() {
    // Every other frame is too long for a driver without segmentation.
    let port = NullPort { rate: RATE, lengths: 1500..=1597 };
    let card = card(1, port.clone());
    let long = NetFeatures::GUEST_OFFLOADS - NetFeatures::GUEST_CSUM;
    let mut rig = Rig::start(&card, 0, SPLIT, 32, rig::without(&card, long));
    let begun = Instant::now();
    let (mut last, mut count) = (0, 0);
    while count < 20 {
        assert!(begun.elapsed() < TIMEOUT);
        while rig.offer(&[400], true).is_some() {}
        rig.poll();
        while let Some((_, frame)) = rig.receive(12) {
            let number = parse_test_frame(&frame).unwrap().1;
            assert!(count == 0 || number > last);
            (last, count) = (number, count + 1);
        }
    }
    assert!(counter(&card, "dropped_long") > 0);

    // Without merging, a chain that is too short for one frame stays for the next.
    let card = rig::card(1, NullPort { rate: RATE, lengths: 60..=157 });
    let mut rig = Rig::start(&card, 0, SPLIT, 32, rig::without(&card, NetFeatures::MRG_RXBUF));
    rig.offer(&[100], true).unwrap();
    while counter(&card, "received_frames") < 1 || counter(&card, "dropped_long") < 2 {
        assert!(begun.elapsed() < TIMEOUT);
        rig.poll();
        if counter(&card, "received_frames") > 0 && rig.with_device() > 0 {
            rig.take();
            rig.offer(&[80], true).unwrap();
        }
    }
}

#[test]
fn a_ring_with_enough_credit_is_quiet() {
    for kind in kinds() {
        let card = card(1, NullPort { rate: 1, lengths: 60..=60 });
        let mut rig = Rig::start(&card, 0, kind, SIZE_MAX, card.features());
        // The ring waits for the next frame even without credit for the longest.
        for _ in 0..10 {
            rig.offer(&[1530], true).unwrap();
        }
        rig.poll();
        assert_eq!((rig.last, rig.interest()), (Next::Quiet, Some(Interest::Readable)));
        assert_eq!(rig.task.vring().credit(), 10);
        while rig.offer(&[1530], true).is_some() {}
        assert_eq!(rig.poll(), 0);
        assert_eq!((rig.last, rig.interest()), (Next::Quiet, Some(Interest::Readable)));
        // The longest frame has 65 562 bytes, which fit into 43 chains.
        assert_eq!(rig.task.vring().credit(), 43);
        assert_eq!(rig.task.in_flight(), 0);
    }
}

#[test]
fn a_frame_that_does_not_fit_waits_for_the_driver() {
    for kind in kinds() {
        let card = card(1, NullPort { rate: RATE, lengths: 3000..=3000 });
        let mut rig = Rig::start(&card, 0, kind, SIZE_MAX, card.features());
        rig.offer(&[1530], true).unwrap();
        rig.wait_readable();
        rig.poll();
        assert_eq!((rig.last, rig.interest()), (Next::Idle, Some(Interest::None)));
        // The frame arrives as soon as it fits. Its 3000 bytes and the header need one byte more than these
        // two chains.
        assert!(!rig.task.arm());
        rig.kick_wanted = false;
        rig.offer(&[1481], true).unwrap();
        assert!(rig.kick_wanted, "{kind:?}");
        rig.poll();
        assert_eq!((rig.last, counter(&card, "received_frames")), (Next::Idle, 0));
        rig.offer(&[1], true).unwrap();
        rig.poll();
        assert_eq!(
            rig.receive(12).map(|(header, frame)| (header.num_buffers.get(), frame.len())),
            Some((3, 3000))
        );
    }
}

#[test]
fn credit_costs_a_part_of_the_budget() {
    for kind in kinds() {
        let card = card(1, NullPort { rate: RATE, lengths: 60..=60 });
        let mut rig = Rig::start(&card, 0, kind, SIZE_MAX, card.features());
        while rig.offer(&[20], true).is_some() {}
        // A chain and its descriptor cost as much as nine descriptors, of which 64 cost 1.
        let mut polls = 0;
        while rig.poll_with(2, false).next == Next::More {
            polls += 1;
            assert!(rig.task.vring().credit() <= 15 * polls, "{kind:?}");
        }
        assert_eq!((rig.last, rig.task.vring().credit(), polls), (Next::Quiet, SIZE_MAX, 8));
        // With the smallest budget, a frame still collects the chains that it needs, in several polls.
        rig.task.return_credit();
        rig.wait_readable();
        while rig.poll_once(1).next == Next::More {}
        assert_eq!(rig.receive(12).unwrap().1.len(), 60);
    }
}

#[test]
fn an_indirect_table_occupies_one_ring_entry() {
    for packed in [false, true] {
        let card = card(1, NullPort { rate: RATE, lengths: 30_000..=30_000 });
        let mut rig = Rig::start(&card, 0, Kind { packed, ..SPLIT }, 64, card.features());
        // These tables have as many descriptors as the ring has entries.
        for _ in 0..16 {
            rig.offer_indirect(&[400; 4]).unwrap();
        }
        rig.wait_readable();
        rig.poll();
        assert_eq!((rig.last, counter(&card, "dropped_long")), (Next::Idle, 0));
        for _ in 0..3 {
            rig.offer_indirect(&[400; 4]).unwrap();
        }
        rig.poll();
        assert_eq!(rig.receive(12).unwrap().1.len(), 30_000);
    }
}

#[test]
fn a_ring_without_room_for_another_chain_is_full() {
    for packed in [false, true] {
        // Half of the lengths do not fit into five chains of three descriptors each.
        let port = NullPort { rate: RATE, lengths: 4350..=4447 };
        let card = card(1, port);
        let mut rig = Rig::start(&card, 0, Kind { packed, ..SPLIT }, 16, card.features());
        let begun = Instant::now();
        while counter(&card, "received_frames") < 5 || counter(&card, "dropped_long") < 5 {
            assert!(begun.elapsed() < TIMEOUT, "a frame waits that never fits");
            while rig.offer(&[294, 294, 294], true).is_some() {}
            rig.poll();
            while rig.receive(12).is_some() {}
        }
    }
}

#[test]
fn the_timer_is_read_only_when_the_far_side_is_due() {
    let card = card(1, port(60..=60));
    let mut rig = Rig::start(&card, 0, SPLIT, 64, card.features());
    while rig.offer(&[1530], true).is_some() {}
    rig.wait_readable();
    assert_eq!(rig.poll_with(100, false).served, 0);
    assert!(rig.poll_with(100, true).served > 0);
    let interval = rig.task.far_side_interval();
    assert!((Duration::from_micros(1)..=Duration::from_micros(2)).contains(&interval));
}

#[test]
fn both_rings_of_a_pair_have_one_affinity() {
    let card = card(2, NullPort::default());
    let group = |index| {
        let rig = Rig::start(&card, index, SPLIT, 64, card.features());
        assert!(rig.task.far_side_interval().is_zero(), "a ring without timer has a far side");
        rig.task.affinity()
    };
    assert_eq!((0..5).map(group).collect::<Vec<_>>(), [Some(0), Some(0), Some(1), Some(1), None]);
}

#[test]
fn a_full_small_ring_has_enough_credit() {
    let card = card(1, NullPort { rate: 1, lengths: 60..=60 });
    let mut rig = Rig::start(&card, 0, SPLIT, 16, card.features());
    while rig.offer(&[765, 765], true).is_some() {}
    rig.poll();
    assert_eq!((rig.last, rig.task.vring().credit()), (Next::Quiet, 8));
}

#[test]
fn a_ring_without_test_frames_watches_no_descriptor() {
    let card = card(1, NullPort::default());
    let mut rig = Rig::start(&card, 0, SPLIT, 64, card.features());
    while rig.offer(&[2048], true).is_some() {}
    rig.poll();
    assert_eq!((rig.last, rig.interest()), (Next::Quiet, None));
}

#[test]
fn a_stop_returns_the_credit() {
    for kind in kinds() {
        let port = port(60..=4000);
        let card = card(1, port.clone());
        let mut rig = Rig::start(&card, 0, kind, 64, card.features());
        receive(&mut rig, &port, 0, 70, &[1530], 12);
        let delivered = counter(&card, "received_frames");
        while rig.offer(&[1530], true).is_some() {}
        // Frames may have arrived since. Take them as well.
        rig.task.return_credit();
        while rig.receive(12).is_some() {}
        let offered = rig.with_device();
        let (next_avail, left) = rig.stop();
        assert!(delivered >= 70 && left == offered, "{kind:?}: {next_avail} {left}");
    }
}

#[test]
fn changes_take_effect_immediately_in_a_quiet_ring() {
    for kind in kinds() {
        let port = port(60..=4000);
        let card = card(1, port.clone());
        let mut rig = Rig::start(&card, 0, kind, SIZE_MAX, card.features());
        let mut number = 0;
        for round in 0..6 {
            receive(&mut rig, &port, number, 10, &[1530], 12);
            number = counter(&card, "received_frames");
            while rig.offer(&[1530], true).is_some() {}
            match round % 3 {
                0 => {
                    let old = rig.change_memory();
                    assert_eq!(Arc::strong_count(&old), 1, "old memory is kept");
                }
                1 => rig.apply(Update::Addresses(GuestRing::addresses())),
                _ => rig.apply(Update::Poll),
            }
            assert_eq!(rig.task.in_flight(), 0);
            while rig.receive(12).is_some() {}
        }
    }
}

#[test]
fn chains_without_room_for_a_header_complete_empty() {
    for packed in [false, true] {
        let port = port(60..=1000);
        let card = card(1, port.clone());
        let mut rig = Rig::start(&card, 0, Kind { packed, ..SPLIT }, 64, card.features());
        rig.offer(&[11], true).unwrap();
        // This chain has no writable buffer at all.
        rig.offer(&[2000], false).unwrap();
        for _ in 0..40 {
            rig.offer(&[2000], true).unwrap();
        }
        poll_until_counted(&mut rig, &card, "received_frames");
        assert_eq!(rig.take().unwrap().2, 0);
        assert_eq!(rig.take().unwrap().2, 0);
        let (_, frame) = rig.receive(12).unwrap();
        assert_eq!(parse_test_frame(&frame).unwrap().1, 0);
        assert_eq!(rig.task.vring().counters().errors.get(), 2);
    }
}

#[test]
fn chains_outside_of_memory_complete_empty() {
    let card = card(1, port(60..=60));
    let mut rig = Rig::start(&card, 0, SPLIT, 64, rig::without(&card, NetFeatures::MRG_RXBUF));
    rig.offer_outside(2000);
    rig.offer(&[2000], true).unwrap();
    poll_until_counted(&mut rig, &card, "received_frames");
    assert_eq!(rig.take().unwrap().2, 0);
    assert_eq!(rig.receive(12).unwrap().1.len(), 60);
}

#[test]
fn pairs_that_the_driver_does_not_use_get_no_frames() {
    let card = card(2, port(60..=60));
    let mut rig = Rig::start(&card, 2, SPLIT, 64, card.features());
    let mut control = Rig::start(&card, 4, SPLIT, 64, card.features());
    while rig.offer(&[2000], true).is_some() {}
    poll_until_counted(&mut rig, &card, "dropped_unused");
    assert_eq!(counter(&card, "received_frames"), 0);
    let id = control.command(&[4, 0, 2, 0]);
    control.poll();
    assert_eq!(control.answer(id), 0);
    poll_until_counted(&mut rig, &card, "received_frames");
    let (_, frame) = rig.receive(12).unwrap();
    assert_eq!(parse_test_frame(&frame).unwrap().0, 1);
    // A frame that waits for chains is dropped when its pair is switched off. Several frames may have come
    // with the first, and one may wait already.
    while rig.receive(12).is_some() {}
    while rig.last != Next::Idle {
        rig.wait_readable();
        rig.poll();
        while rig.receive(12).is_some() {}
    }
    let id = control.command(&[4, 0, 1, 0]);
    control.poll();
    assert_eq!(control.answer(id), 0);
    let received = counter(&card, "received_frames");
    while rig.offer(&[2000], true).is_some() {}
    rig.poll_with(1000, false);
    assert_eq!((rig.receive(12), counter(&card, "received_frames")), (None, received));
}

#[test]
fn all_pairs_get_frames_where_the_front_end_serves_the_control_ring() {
    let card = card(2, port(60..=60));
    // The front-end before this one left the control ring to the card.
    drop(Rig::start(&card, 4, SPLIT, 64, card.features()));
    card.connected();
    card.reset(Driver::Fresh);
    let mut rig = Rig::start(&card, 2, SPLIT, 64, card.features());
    while rig.offer(&[2000], true).is_some() {}
    rig.wait_readable();
    rig.poll();
    assert_eq!(counter(&card, "dropped_unused"), 0);
    assert_eq!(parse_test_frame(&rig.receive(12).unwrap().1).unwrap().0, 1);
}

#[test]
fn the_buffers_of_a_frame_cost_a_part_of_the_budget() {
    for packed in [false, true] {
        let card = card(1, port(1000..=1000));
        let mut rig = Rig::start(&card, 0, Kind { packed, ..SPLIT }, 64, card.features());
        rig.offer_indirect(&[1; 1012]).unwrap();
        rig.poll_with(1000, false);
        rig.wait_readable();
        // The frame itself, and 64 buffers at a time.
        assert!(rig.poll_with(1, true).cost > 1012 / 64);
        assert_eq!(rig.receive(12).unwrap().1.len(), 1000);
    }
}

#[test]
fn skipped_chains_cost_a_part_of_the_budget() {
    for packed in [false, true] {
        let card = card(1, port(60..=60));
        let mut rig = Rig::start(&card, 0, Kind { packed, ..SPLIT }, SIZE_MAX, card.features());
        while rig.offer(&[11], true).is_some() {}
        rig.poll_with(1000, false);
        rig.wait_readable();
        let (mut polls, mut errors) = (0, 0);
        while rig.poll_with(1, true).next == Next::More {
            polls += 1;
            errors = rig.task.vring().counters().errors.get();
            assert!(errors <= 8 * polls, "{errors} chains in {polls} polls");
        }
        assert_eq!((rig.last, errors), (Next::Idle, SIZE_MAX.into()));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Delivers frames of any lengths into buffers of any sizes, with changes in between.
    #[test]
    fn frames_of_any_length_arrive_in_buffers_of_any_size(
        bits in 0..8u8,
        min in 60..3000u32,
        span in 0..5000u32,
        order in 4..8u32,
        lens in prop::collection::vec(1..3000u32, 1..4),
        changes in prop::collection::vec(0..4u8, 1..8),
    ) {
        let kind = Kind { packed: bits & 1 != 0, event_idx: bits & 2 != 0, in_order: bits & 4 != 0 };
        let port = NullPort { rate: RATE, lengths: min..=min + span };
        let size = 1u16 << order;
        let room = u32::from(size) / lens.len() as u32 * lens.iter().sum::<u32>();
        // Other tests have frames that never fit, and chains without room for a header.
        prop_assume!(room >= 12 + min + span && lens.iter().sum::<u32>() >= 12);
        let card = card(1, port.clone());
        let mut rig = Rig::start(&card, 0, kind, size, card.features());
        let mut number = 0;
        for change in changes {
            receive(&mut rig, &port, number, 5, &lens, 12);
            number = counter(&card, "received_frames");
            while rig.offer(&lens, true).is_some() {}
            match change {
                0 => { rig.change_memory(); }
                1 => rig.task.return_credit(),
                2 => rig.apply(Update::Addresses(GuestRing::addresses())),
                _ => {}
            }
        }
        let offered = rig.with_device();
        prop_assert_eq!(rig.stop().1, offered);
    }
}
