//! Returns frames through a loop port.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod rig;

use kickless_device::{Device, Interest, Next};
use kickless_spec::net::{GSO_TCPV4, HDR_F_NEEDS_CSUM, Header, NetFeatures};
use kickless_testing::Random;
use rig::{Kind, Rig, SIZE_LONG, SIZE_MAX, card_on, counter, kinds};
use std::collections::VecDeque;
use zerocopy::IntoBytes;

const SPLIT: Kind = Kind { packed: false, event_idx: true, in_order: false };

fn frame(len: usize, number: u8) -> Vec<u8> {
    let mut frame = Header::default().as_bytes().to_vec();
    frame.extend((0..len).map(|n| (n as u8).wrapping_mul(3).wrapping_add(number)));
    frame
}

#[test]
fn frames_return_on_the_same_pair() {
    for kind in kinds() {
        let card = card_on(2, "loop");
        let mut pairs = [0, 2]
            .map(|index| [0, 1].map(|ring| Rig::start(&card, index + ring, kind, SIZE_MAX, card.features())));
        for (number, len) in (0..).zip([14, 60, 1514, 9000, 65_550]) {
            for (pair, [receive, transmit]) in pairs.iter_mut().enumerate() {
                while receive.offer(&[1530], true).is_some() {}
                receive.poll();
                assert_eq!((receive.last, receive.interest()), (Next::Quiet, Some(Interest::Readable)));
                let sent = frame(len, number + 10 * pair as u8);
                transmit.send(&sent, 4096).unwrap();
                assert_eq!(transmit.poll(), 1);
                transmit.take().unwrap();
                // The receive ring may sleep.
                receive.wait_readable();
                assert_eq!(receive.poll(), 1);
                let (header, bytes) = receive.receive(12).unwrap();
                assert!(bytes == sent[12..], "{kind:?} {len}");
                assert_eq!(usize::from(header.num_buffers.get()), (len + 12).div_ceil(1530));
            }
        }
        assert_eq!(counter(&card, "received_frames"), 10);
        for rig in pairs.into_iter().flatten() {
            let offered = rig.with_device();
            assert_eq!(rig.stop().1, offered);
        }
    }
}

#[test]
fn frames_wait_for_chains_or_are_dropped() {
    let card = card_on(1, "loop");
    let mut transmit = Rig::start(&card, 1, SPLIT, SIZE_MAX, card.features());
    let send = |transmit: &mut Rig, frames: usize| {
        for number in 0..frames {
            transmit.send(&frame(60, number as u8), 100).unwrap();
            transmit.poll();
            transmit.take().unwrap();
        }
    };
    send(&mut transmit, 3);
    assert_eq!(counter(&card, "dropped_late"), 3, "no receive ring runs");
    let mut receive = Rig::start(&card, 0, SPLIT, SIZE_MAX, card.features());
    send(&mut transmit, 2000);
    // The batch between the rings holds 1024 frames.
    assert_eq!(counter(&card, "dropped_late"), 3 + 976);
    receive.poll();
    assert_eq!((receive.last, receive.interest()), (Next::Idle, Some(Interest::None)));
    for number in 0..1024 {
        receive.offer(&[100], true).unwrap();
        receive.poll();
        assert_eq!(receive.receive(12).unwrap().1, frame(60, number as u8)[12..]);
    }
    send(&mut transmit, 5);
    receive.offer(&[100], true).unwrap();
    receive.poll();
    receive.stop();
    assert_eq!(counter(&card, "dropped_late"), 3 + 976 + 4);
}

#[test]
fn a_long_frame_is_lost_if_a_buffer_is_outside_of_memory() {
    for kind in kinds() {
        let card = card_on(1, "loop");
        let [mut receive, mut transmit] =
            [0, 1].map(|ring| Rig::start(&card, ring, kind, SIZE_MAX, card.features()));
        receive.offer(&[1530], true).unwrap();
        receive.offer_outside(2000);
        let mut send = |receive: &mut Rig, number| {
            transmit.send(&frame(3000, number), 4096).unwrap();
            transmit.poll();
            receive.poll();
        };
        send(&mut receive, 1);
        assert_eq!([(); 2].map(|()| receive.take().unwrap().2), [0, 0]);
        assert_eq!((receive.counters.errors.get(), counter(&card, "received_frames")), (1, 0));
        receive.offer(&[2000], true).unwrap();
        receive.offer(&[2000], true).unwrap();
        send(&mut receive, 2);
        assert!(receive.receive(12).unwrap().1 == frame(3000, 2)[12..]);
    }
}

/// A worker with many frames looks after kicks and completions in between, whatever the weight of the card.
#[test]
fn a_poll_takes_few_frames_of_its_budget() {
    // Linux leaves the checksums of nearly all TCP packets to the card, so both kinds of frames go in
    // batches.
    for (flags, offset) in [(0, 0), (HDR_F_NEEDS_CSUM, 16)] {
        let card = card_on(1, "loop");
        let mut receive = Rig::start(&card, 0, SPLIT, SIZE_LONG, card.features());
        let mut transmit = Rig::start(&card, 1, SPLIT, SIZE_LONG, card.features());
        let mut sent = frame(60, 0);
        (sent[0], sent[6], sent[8]) = (flags, 34, offset);
        for _ in 0..SIZE_LONG {
            transmit.send(&sent, 100).unwrap();
            receive.offer(&[100], true).unwrap();
        }
        for rig in [&mut transmit, &mut receive] {
            for _ in 0..2 {
                let polled = rig.poll_once(1000);
                assert_eq!((polled.served, polled.cost, polled.next), (256, 256 / 16, Next::More));
            }
            let polled = rig.poll_once(1000);
            assert_eq!((polled.served, polled.next == Next::More), (0, false));
        }
        let (header, _) = receive.receive(12).unwrap();
        assert_eq!((header.flags, header.csum_offset.get()), (flags, offset.into()));
    }
}

/// A long frame is delivered without credit: its buffers are read and written together. Credit would cost as
/// much as eight more descriptors for each buffer.
#[test]
fn the_buffers_of_a_long_frame_are_popped_together() {
    for kind in kinds() {
        let card = card_on(1, "loop");
        let [mut receive, mut transmit] =
            [0, 1].map(|ring| Rig::start(&card, ring, kind, SIZE_LONG, card.features()));
        for number in 0..4 {
            while receive.offer(&[1530], true).is_some() {}
            let sent = frame(65_000, number);
            transmit.send(&sent, 70_000).unwrap();
            transmit.poll();
            let polled = receive.poll_once(1000);
            // One for each 4096 bytes, and one for 64 descriptors. There are 43 buffers.
            assert!(polled.served == 1 && polled.cost <= 16 + 2, "{kind:?} {polled:?}");
            assert!(receive.receive(12).unwrap().1 == sent[12..]);
            transmit.take().unwrap();
        }
    }
}

/// The driver sends with offloads that it does not accept itself.
#[test]
fn offloads_are_undone_for_the_receiver() {
    let card = card_on(1, "loop");
    let accepted = NetFeatures::GUEST_CSUM | NetFeatures::GUEST_TSO4 | NetFeatures::GUEST_TSO6;
    let features = rig::without(&card, accepted | NetFeatures::GUEST_ECN);
    let mut receive = Rig::start(&card, 0, SPLIT, SIZE_MAX, features);
    let mut transmit = Rig::start(&card, 1, SPLIT, SIZE_MAX, features);
    let mut packet = vec![2; 12];
    packet.extend([8, 0, 0x45, 0, 0, 0, 0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    packet.extend([0, 1, 0, 2, 0, 0, 0, 5, 0, 0, 0, 0, 0x50, 0x18, 1, 0, 0, 0, 0, 0]);
    packet.resize(54 + 2500, 7);
    let header = Header {
        flags: HDR_F_NEEDS_CSUM,
        gso_type: GSO_TCPV4,
        gso_size: 1000.into(),
        csum_start: 34.into(),
        csum_offset: 16.into(),
        ..Header::default()
    };
    while receive.offer(&[1530], true).is_some() {}
    transmit.send(&[header.as_bytes(), &packet].concat(), 5000).unwrap();
    // Not a packet: there is nothing to segment.
    transmit.send(&[header.as_bytes(), &[9; 100]].concat(), 5000).unwrap();
    let checksum = Header { gso_type: 0, gso_size: 0.into(), ..header };
    transmit.send(&[checksum.as_bytes(), &packet[..1000]].concat(), 5000).unwrap();
    transmit.poll();
    receive.poll();
    let frames: Vec<_> = std::iter::from_fn(|| receive.receive(12)).collect();
    let lens: Vec<_> = frames.iter().map(|(_, frame)| frame.len()).collect();
    assert_eq!(lens, [1054, 1054, 554, 1000]);
    assert!(frames.iter().all(|(header, _)| (header.flags, header.gso_type) == (0, 0)));
    assert!(frames.iter().all(|(_, frame)| frame[50..52] != [0, 0]), "a checksum is missing");
    assert_eq!(counter(&card, "dropped_offload"), 1);
    assert_eq!(counter(&card, "sent_frames"), 3);
}

/// Frames that are carried in batches, and others between them: in several buffers, in several chains, with
/// an offload, or with an invalid header.
#[test]
fn batches_and_single_frames_keep_their_order() {
    for (seed, kind) in (0..).zip(kinds()) {
        let (mut random, card) = (Random(seed), card_on(1, "loop"));
        let mut receive = Rig::start(&card, 0, kind, 64, card.features());
        let mut transmit = Rig::start(&card, 1, kind, 64, card.features());
        let (mut expected, mut invalid) = (VecDeque::new(), 0);
        for round in 0..60 {
            for _ in 0..random.below(40) {
                let len_max = if random.one_in(8) { 3000 } else { 80 };
                let len = 14 + random.below(len_max);
                let mut sent = frame(len as usize, round);
                let is_invalid = random.one_in(12);
                if is_invalid {
                    sent[1] = 0x7f;
                } else if len >= 16 && random.one_in(12) {
                    (sent[0], sent[6]) = (HDR_F_NEEDS_CSUM, 14);
                }
                let cut = if random.one_in(6) { 200 } else { 4096 };
                if transmit.send(&sent, cut).is_none() {
                    break;
                }
                match is_invalid {
                    true => invalid += 1,
                    false => expected.push_back(sent[12..].to_vec()),
                }
            }
            transmit.poll();
            while transmit.take().is_some() {}
            let chains: [&[u32]; 4] = [&[1530], &[100], &[4096], &[700, 900]];
            while receive.offer(chains[random.below(4) as usize], true).is_some() {}
            for _ in 0..random.below(4) {
                receive.poll_once(1 + random.below(100) as u32);
            }
            while let Some((header, bytes)) = receive.receive(12) {
                assert!(Some(bytes) == expected.pop_front(), "{kind:?} {round}");
                assert!(header.num_buffers.get() > 0);
            }
        }
        for _ in 0..100 {
            while receive.offer(&[4096], true).is_some() {}
            receive.poll();
            while let Some((_, bytes)) = receive.receive(12) {
                assert!(Some(bytes) == expected.pop_front());
            }
        }
        assert!(expected.is_empty(), "{kind:?}");
        assert_eq!(counter(&card, "sent_invalid"), invalid);
        assert_eq!(counter(&card, "sent_frames"), counter(&card, "received_frames"));
    }
}
