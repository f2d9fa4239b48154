//! Packets that become many frames: between cards, to a TAP and from it. `stream.rs` and `xdp.rs` have those
//! of these ports.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod rig;

use kickless_device::{Device, Limit, Limits, Next, Rate};
use kickless_net::offload::{SEGMENTED_BYTES_MAX, SEGMENTS_MAX, Segments};
use kickless_net::{Frame, InvalidFrame, Net};
use kickless_net_port::Tap;
use kickless_spec::net::{FRAME_MAX, GSO_UDP_L4, NetFeatures};
use proptest::prelude::*;
use rig::packets::{explosive, segments, tcp, tcp_behind_extensions, whole};
use rig::switch::{ethernet, name, open};
use rig::{Kind, Rig, SIZE_LONG, SIZE_MAX, card_on, card_with, counter, without};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;

const SPLIT: Kind = Kind { packed: false, event_idx: true, in_order: false };
const RECEIVE: u16 = 0;
const TRANSMIT: u16 = 1;
const HEADER: usize = 12;
/// A budget that no poll of these tests uses up.
const BUDGET: u32 = 10_000;
/// The most cost of dropping a packet: its own, that of the chain, and that of looking for room.
const DROP_MAX: u32 = 3;

/// Two cards: the frames of the first one's driver are for the second one's, which segments nothing.
struct Cards {
    sender: Arc<Net>,
    transmit: Rig,
    receiver: Arc<Net>,
    receive: Rig,
}

impl Cards {
    fn of(sender: Arc<Net>, receiver: Arc<Net>, missing: NetFeatures, size: u16) -> Self {
        let transmit = Rig::start(&sender, TRANSMIT, SPLIT, SIZE_MAX, sender.features());
        let features = without(&receiver, NetFeatures::GUEST_OFFLOADS | missing);
        let receive = Rig::start(&receiver, RECEIVE, SPLIT, size, features);
        Self { sender, transmit, receiver, receive }
    }

    /// Returns two cards of a switch, and a loop port.
    fn all(missing: NetFeatures, size: u16) -> [Self; 2] {
        let switch = name();
        let [sender, receiver] = [(); 2].map(|()| card_with(None, 1, open(&switch)));
        // The switch learns where the address of the packets is.
        let mut answers = Rig::start(&receiver, TRANSMIT, SPLIT, SIZE_MAX, receiver.features());
        answers.send(&ethernet(0, 1), 4096).unwrap();
        answers.poll();
        let looping = card_on(1, "loop");
        [Self::of(sender, receiver, missing, size), Self::of(looping.clone(), looping, missing, size)]
    }

    /// Sends a packet in one buffer, or in several. Returns its cost.
    fn send(&mut self, packet: &[u8], cut: usize) -> u32 {
        self.transmit.send(packet, cut).unwrap();
        let polled = self.transmit.poll_once(BUDGET);
        assert_eq!((polled.served, polled.next), (1, Next::Idle));
        self.transmit.take().unwrap();
        polled.cost
    }
}

/// Returns sizes of segments, most of which are short.
fn size() -> impl Strategy<Value = u16> {
    prop_oneof![1..16u16, 1..600u16, 490..520u16, 1..=u16::MAX]
}

/// Returns lengths up to this one, many of which are near one of its ends.
fn up_to(max: usize) -> impl Strategy<Value = usize> {
    prop_oneof![0..=max, 0..=max.min(700), max.saturating_sub(2000)..=max]
}

/// Returns the bytes of extension headers, and those of the payload.
fn lens() -> impl Strategy<Value = (usize, usize)> {
    up_to(65_470 / 8).prop_flat_map(|words| (Just(8 * words), up_to(65_470 - 8 * words)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// The card makes no more than the bounds, and passes on no packet of which a kernel makes much more.
    #[test]
    fn segments_are_bounded((extensions, payload) in lens(), size in size()) {
        let (header, frame) = tcp_behind_extensions(extensions, payload, size);
        let headers = frame.len() - payload;
        let count = payload.div_ceil(size.into()).max(1);
        let bytes = payload + count * headers;
        let is_bounded = count <= SEGMENTS_MAX && bytes <= SEGMENTED_BYTES_MAX;
        let segments = Segments::of(&header, &frame);
        prop_assert_eq!(segments.is_some(), is_bounded);
        if let Some(mut segments) = segments {
            prop_assert_eq!((segments.count(&frame), segments.bytes(&frame)), (count, bytes));
            let mut space = vec![0; segments.len_max(&frame)];
            let mut made = (0, 0);
            while let Some(len) = segments.next_len(&frame) {
                prop_assert_eq!(segments.write_next(&frame, &mut space), Some(len));
                made = (made.0 + 1, made.1 + len);
                prop_assert_eq!(made.0, segments.made());
                prop_assert_eq!((made.0 + segments.count(&frame), made.1 + segments.bytes(&frame)), (count, bytes));
            }
            prop_assert_eq!(made, (count, bytes));
            prop_assert!(segments.write_next(&frame, &mut space).is_none());
        }
        match Frame::parse(&header, HEADER, (HEADER + frame.len()) as u64, NetFeatures::all()) {
            Ok(parsed) => {
                // The header of TCP has 20 bytes, and might have had 60.
                prop_assert!(count <= SEGMENTS_MAX + 40usize.div_ceil(size.into()) && bytes <= SEGMENTED_BYTES_MAX);
                prop_assert!(parsed.segments_max() as usize >= count);
            }
            Err(error) => {
                prop_assert_eq!(error, InvalidFrame::Segments);
                prop_assert!(!is_bounded || headers > 450);
            }
        }
    }

    /// No lie about the place of the header of TCP makes a packet cheaper than the number of its segments.
    #[test]
    fn the_place_of_a_header_may_be_a_lie((extensions, payload) in lens(), size in size(), start: u16) {
        let (mut header, frame) = tcp_behind_extensions(extensions, payload, size);
        header.csum_start = start.into();
        if let Ok(parsed) = Frame::parse(&header, HEADER, (HEADER + frame.len()) as u64, NetFeatures::all()) {
            let count = payload.div_ceil(size.into());
            prop_assert!(count <= SEGMENTS_MAX + (FRAME_MAX / SEGMENTS_MAX).div_ceil(size.into()));
            // Up to 450 bytes may be headers.
            prop_assert!(parsed.segments_max() as usize + 450usize.div_ceil(size.into()) >= count);
        }
    }
}

#[test]
fn a_packet_that_would_become_too_many_frames_is_refused() {
    for mut cards in Cards::all(NetFeatures::empty(), SIZE_LONG) {
        while cards.receive.offer(&[2048], true).is_some() {}
        for (number, packet) in (1..).zip(explosive()) {
            for (twice, cut) in [4096, 70_000].into_iter().enumerate() {
                let cost = cards.send(&packet, cut);
                assert!(cost <= 20, "{number} costs {cost}");
                assert_eq!(counter(&cards.sender, "sent_refused"), 2 * number - 1 + twice as u64);
            }
        }
        let polled = cards.receive.poll_once(BUDGET);
        assert_eq!((polled.served, polled.cost), (0, 0));
        for name in ["sent_frames", "sent_invalid"] {
            assert_eq!(counter(&cards.sender, name), 0, "{name}");
        }
        assert_eq!((cards.receive.take(), cards.transmit.counters.errors.get()), (None, 0));
    }
}

/// A card that does not accept packets gets all segments up to the bound. The sender pays for their number,
/// and the receiver for each.
#[test]
fn segments_are_paid_by_both_cards() {
    // The most segments, usual ones, and those of a short packet.
    for (payload, size, sent, received) in
        [(SEGMENTS_MAX * 500, 500, 43, 128), (64_000, 1448, 16, 45), (SEGMENTS_MAX * 8, 8, 43, 128)]
    {
        for mut cards in Cards::all(NetFeatures::empty(), SIZE_LONG) {
            while cards.receive.offer(&[2048], true).is_some() {}
            let packet = tcp(payload, size);
            // In several buffers, and then in one.
            for cut in [9000, 70_000] {
                let cost = cards.send(&whole(&packet), cut);
                assert!((sent..=sent + 1).contains(&cost), "{size}: {cost}");
                let polled = cards.receive.poll_once(BUDGET);
                assert_eq!(polled.served as usize, payload.div_ceil(size.into()));
                assert!((received..2 * received).contains(&polled.cost), "{size}: {polled:?}");
                for segment in segments(&packet.0, &packet.1) {
                    assert!(cards.receive.receive(HEADER).unwrap().1 == segment);
                }
                while cards.receive.offer(&[2048], true).is_some() {}
            }
        }
    }
}

/// Each card that gets a copy of a packet may have to segment it.
#[test]
fn a_packet_for_all_costs_its_segments_for_each_card() {
    let switch = name();
    let cards = [(); 4].map(|()| card_with(None, 1, open(&switch)));
    let _rings = [1, 2, 3].map(|card: usize| {
        Rig::start(&cards[card], RECEIVE, SPLIT, SIZE_MAX, without(&cards[card], NetFeatures::GUEST_OFFLOADS))
    });
    let mut transmit = Rig::start(&cards[0], TRANSMIT, SPLIT, SIZE_MAX, cards[0].features());
    for (size, cost) in [(500, 42 + 3 * 42), (1448, 16 + 3 * 15)] {
        // 126 segments, and 44.
        transmit.send(&whole(&tcp(63_000, size)), 70_000).unwrap();
        let polled = transmit.poll_once(BUDGET);
        assert!((cost..=cost + 3).contains(&polled.cost), "{polled:?}");
    }
}

/// A frame of another sender comes after all segments at the latest, and the poll ends in between.
#[test]
fn a_poll_ends_between_segments() {
    let packet = whole(&tcp(SEGMENTS_MAX * 500, 500));
    let ends = |receive: &mut Rig| {
        for polls in 1.. {
            let polled = receive.poll_once(10);
            assert!(polled.served <= 10 && polled.cost <= 11, "{polled:?}");
            if polled.next != Next::More {
                assert!(polls > 12, "{polls}");
                return;
            }
        }
    };
    let [mut cards, _] = Cards::all(NetFeatures::empty(), SIZE_LONG);
    while cards.receive.offer(&[2048], true).is_some() {}
    cards.send(&packet, 70_000);
    ends(&mut cards.receive);
    // A driver that accepts packets of IPv6 has credit for 64 KiB.
    let (card, peer) = tap_card(true);
    let features = without(&card, NetFeatures::GUEST_TSO4);
    let mut receive = Rig::start(&card, RECEIVE, SPLIT, SIZE_LONG, features);
    while receive.offer(&[2048], true).is_some() {}
    receive.poll();
    peer.send(&packet).unwrap();
    ends(&mut receive);
}

/// Segments that are too long for the driver are not made. A packet of them is dropped once.
#[test]
fn a_packet_of_too_long_segments_is_dropped_once() {
    for mut cards in Cards::all(NetFeatures::empty(), SIZE_LONG) {
        while cards.receive.offer(&[2048], true).is_some() {}
        // This driver takes frames of the length of its MTU. 15 segments, and 4 with headers of 12 KiB.
        for packet in [tcp(60_000, 4000), tcp_behind_extensions(12 << 10, 2000, 500)] {
            cards.send(&whole(&packet), 9000);
            let dropped = counter(&cards.receiver, "dropped_long");
            let polled = cards.receive.poll_once(BUDGET);
            assert!(polled.served == 0 && polled.cost <= DROP_MAX, "{polled:?}");
            assert_eq!(counter(&cards.receiver, "dropped_long"), dropped + 1);
        }
        assert_eq!(cards.receive.take(), None);
    }
}

/// The buffers of the driver are too few or too short for segments that it would take.
#[test]
fn a_packet_without_room_for_its_segments_is_dropped_once() {
    // A full ring has no room for one segment. Then two segments have room, and a buffer behind them not.
    let lists: [(_, u16, &[u32], _); 2] =
        [(NetFeatures::empty(), 4, &[100; 4], 0), (NetFeatures::MRG_RXBUF, 128, &[2048, 2048, 500, 2048], 2)];
    for (missing, size, buffers, expected) in lists {
        for mut cards in Cards::all(missing, size) {
            for len in buffers {
                cards.receive.offer(&[*len], true).unwrap();
            }
            cards.send(&whole(&tcp(20_000, 1000)), 70_000);
            let served = cards.receive.poll();
            assert_eq!((served, counter(&cards.receiver, "dropped_long")), (expected, 1), "{size}");
            // The next frame finds the other buffers.
            cards.send(&whole(&tcp(200, 0)), 70_000);
            assert_eq!(cards.receive.poll(), 1);
        }
    }
}

/// Segments that wait for buffers are made when there are some.
#[test]
fn segments_wait_for_buffers() {
    let [mut cards, _] = Cards::all(NetFeatures::empty(), SIZE_LONG);
    let packet = tcp(20_000, 1448);
    cards.send(&whole(&packet), 70_000);
    for segment in segments(&packet.0, &packet.1) {
        assert_eq!((cards.receive.poll(), cards.receive.last), (0, Next::Idle));
        cards.receive.offer(&[700], true).unwrap();
        cards.receive.poll();
        cards.receive.offer(&[900], true).unwrap();
        cards.receive.poll();
        let (_, received) = cards.receive.receive(HEADER).unwrap();
        assert!(received == segment);
        // The last segment has needed one buffer only.
        cards.receive.task.return_credit();
    }
    cards.receive.stop();
}

/// Returns a card on a TAP, or on what stands for one, and the host's end.
fn tap_card(segments_udp: bool) -> (Arc<Net>, UnixDatagram) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (ours, peer) = socketpair(AddressFamily::UNIX, SocketType::DGRAM, flags, None).unwrap();
    (card_on(1, Tap::over_sockets(vec![ours], segments_udp)), peer.into())
}

/// Linux 6.18 makes 65 000 segments in the call that sends such a packet, which takes 50 ms.
#[test]
fn the_host_gets_no_packet_that_would_become_too_many_frames() {
    let (card, peer) = tap_card(true);
    let mut transmit = Rig::start(&card, TRANSMIT, SPLIT, SIZE_MAX, card.features());
    let short = whole(&tcp(1000, 2));
    for (number, packet) in (1..).zip(explosive().into_iter().chain([short])) {
        transmit.send(&packet, 9000).unwrap();
        let polled = transmit.poll_once(BUDGET);
        assert!(polled.served == 1 && polled.cost <= 20, "{polled:?}");
        assert_eq!(counter(&card, "sent_refused"), number);
    }
    assert!(peer.recv(&mut [0; 100]).is_err());
    // A packet that the kernel may segment costs a part of its segments, alone and in a batch.
    for (packet, cost) in
        [(tcp(64_000, 500), 43..=44), (tcp(64_000, 1448), 16..=17), (tcp(1600, 16), 34..=36)]
    {
        transmit.send(&whole(&packet), 9000).unwrap();
        let polled = transmit.poll_once(BUDGET);
        assert!(cost.contains(&polled.cost), "{polled:?}");
        let mut got = vec![0; 70_000];
        let len = peer.recv(&mut got).unwrap();
        assert!(got[..len] == whole(&packet));
    }
    assert_eq!((counter(&card, "sent_frames"), counter(&card, "sent_segments")), (3, 0));
}

/// Returns a packet of UDP with this payload, behind its header.
fn udp(payload: usize, size: u16) -> Vec<u8> {
    // The header of UDP is 12 bytes shorter than that of TCP.
    let (mut header, mut frame) = tcp(payload - 12, size);
    (header.gso_type, header.csum_offset) = (GSO_UDP_L4, 6.into());
    frame[23] = 17;
    whole(&(header, frame))
}

/// A card that cuts UDP itself makes a call for each datagram.
#[test]
fn datagrams_are_paid() {
    let (card, peer) = tap_card(false);
    let mut transmit = Rig::start(&card, TRANSMIT, SPLIT, SIZE_MAX, card.features());
    transmit.send(&udp(1000, 100), 9000).unwrap();
    let polled = transmit.poll_once(BUDGET);
    // The header of UDP is no data of an eleventh one.
    assert_eq!((polled.served, polled.cost), (1, 10));
    let received = std::iter::from_fn(|| peer.recv(&mut [0; 200]).ok()).collect::<Vec<_>>();
    assert_eq!(received, [HEADER + 42 + 100; 10]);
    assert_eq!((counter(&card, "sent_frames"), counter(&card, "sent_segments")), (1, 9));
    transmit.send(&udp(1000, 1), 9000).unwrap();
    assert_eq!((transmit.poll(), counter(&card, "sent_refused")), (1, 1));
    assert!(peer.recv(&mut [0; 200]).is_err());
}

/// The host may send packets that the card would not take from a driver. They pass to a driver that accepts
/// them, and become nothing otherwise.
#[test]
fn packets_of_the_host_become_few_frames() {
    for (missing, received) in [(NetFeatures::empty(), 1), (NetFeatures::GUEST_OFFLOADS, 0)] {
        let (card, peer) = tap_card(true);
        let mut receive = Rig::start(&card, RECEIVE, SPLIT, SIZE_LONG, without(&card, missing));
        for (number, packet) in (1..).zip(explosive()) {
            while receive.offer(&[2048], true).is_some() {}
            // The first read prepares for short frames.
            peer.send(&packet).unwrap();
            let polled = receive.poll_once(BUDGET);
            assert_eq!(polled.served, received);
            assert_eq!(counter(&card, "dropped_offload"), u64::from(1 - received) * number);
            assert!(received > 0 || polled.cost < 10 + 48 * 9 / 64, "{polled:?}");
            while receive.take().is_some() {}
        }
    }
}

/// Frames that the card makes of a packet count for a limit. A packet that passes whole is one frame.
#[test]
fn a_limit_counts_the_frames_that_the_card_makes() {
    for (segments_udp, frames) in [(true, 1), (false, 10)] {
        let (card, peer) = tap_card(segments_udp);
        let mut transmit = Rig::start(&card, TRANSMIT, SPLIT, SIZE_MAX, card.features());
        // A bucket admits one frame more than it has, and units come so rarely that none comes here.
        let rare = Limit { sustained: Rate { per_second: 1, burst: 15 }, peak: Rate::default() };
        let requests = [Limit::default(), Limit::default(), rare];
        transmit.limiter.set(&Limits { requests, ..Limits::default() });
        for _ in 0..20 {
            transmit.send(&udp(1000, 100), 9000).unwrap();
        }
        let mut served = 0;
        while !matches!(transmit.last, Next::Throttled { .. }) {
            served += transmit.poll_once(BUDGET).served;
            while peer.recv(&mut [0; 2000]).is_ok() {}
        }
        assert_eq!(served, 16u32.div_ceil(frames), "{segments_udp}");
    }
}
