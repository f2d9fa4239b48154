//! Exchanges frames between cards of one switch, on real rings.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod rig;

use kickless_device::{Device, DeviceMessage, Interest, Next};
use kickless_io::{EngineKind, EngineOptions};
use kickless_memory::{Gpa, Marks};
use kickless_net::Net;
use kickless_spec::net::{HDR_F_NEEDS_CSUM, Header, NetFeatures};
use kickless_testing::{Random, eventually, tcp_segmentation};
use kickless_worker::{Poll, WorkerPool};
use rig::packets::segments;
use rig::running::Running;
use rig::switch::{EVERYBODY, RECEIVE, TRANSMIT, addressed, mac, name, open};
use rig::{Guest, Kind, Rig, SIZE_MAX, counter, kinds, without};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use zerocopy::IntoBytes;

const SPLIT: Kind = Kind { packed: false, event_idx: true, in_order: false };

/// Adds a card to a switch. Only one with an address checks its guest's source addresses.
fn join(port: &str, mac: Option<[u8; 6]>) -> Arc<Net> {
    rig::card_with(mac, 1, open(port))
}

fn frame(to: [u8; 6], from: usize, len: usize, number: u8) -> Vec<u8> {
    let mut frame = [Header::default().as_bytes(), &addressed(to, from)].concat();
    frame.extend((14..len).map(|n| (n as u8).wrapping_mul(5).wrapping_add(number)));
    frame
}

/// The two rings of a card.
struct Pair {
    card: Arc<Net>,
    receive: Rig,
    transmit: Rig,
}

impl Pair {
    fn new(card: Arc<Net>, kind: Kind) -> Self {
        let features = card.features();
        Self::with(card, kind, features)
    }

    fn with(card: Arc<Net>, kind: Kind, features: kickless_spec::features::Features) -> Self {
        let [receive, transmit] =
            [RECEIVE, TRANSMIT].map(|index| Rig::start(&card, index, kind, SIZE_MAX, features));
        let mut pair = Self { card, receive, transmit };
        pair.refill();
        assert_eq!((pair.receive.last, pair.receive.interest()), (Next::Quiet, Some(Interest::Readable)));
        pair
    }

    /// Offers all chains that the ring has room for.
    fn refill(&mut self) {
        while self.receive.offer(&[1530], true).is_some() {}
        self.receive.poll();
    }

    fn send(&mut self, frame: &[u8]) {
        self.transmit.send(frame, 4096).unwrap();
        assert_eq!(self.transmit.poll(), 1);
        self.transmit.take().unwrap();
    }

    /// Returns the frames that have come, without headers.
    fn take(&mut self) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        loop {
            self.receive.poll();
            let before = frames.len();
            frames.extend(std::iter::from_fn(|| self.receive.receive(12)).map(|(_, frame)| frame));
            if frames.len() == before {
                return frames;
            }
            self.refill();
        }
    }

    fn counter(&self, name: &str) -> u64 {
        counter(&self.card, name)
    }

    /// Stops both rings. Each chain is with the driver or back in the ring.
    fn stop(self) -> Arc<Net> {
        for rig in [self.receive, self.transmit] {
            let offered = rig.with_device();
            assert_eq!(rig.stop().1, offered);
        }
        self.card
    }
}

#[test]
fn frames_pass_between_cards() {
    for kind in kinds() {
        let name = name();
        let mut pairs = [1, 2, 3].map(|number| Pair::new(join(&name, Some(mac(number))), kind));
        // All learn where the others are.
        for (number, pair) in (1..).zip(&mut pairs) {
            pair.send(&frame(EVERYBODY, number, 60, 0));
        }
        pairs.iter_mut().for_each(|pair| assert_eq!(pair.take().len(), 2));
        for (number, len) in (1..).zip([14, 60, 1514, 9000, 65_550]) {
            let sent = frame(mac(2), 1, len, number);
            pairs[0].send(&sent);
            // The receive ring sleeps.
            pairs[1].receive.wait_readable();
            assert!(pairs[1].take() == [&sent[12..]], "{kind:?} {len}");
            assert!(pairs[0].take().is_empty() && pairs[2].take().is_empty());
        }
        assert_eq!(pairs[1].counter("received_frames"), 7);
        for pair in pairs {
            for name in ["dropped_late", "dropped_long", "sent_spoofed", "sent_unforwarded", "sent_invalid"] {
                assert_eq!(pair.counter(name), 0, "{name}");
            }
            pair.stop();
        }
    }
}

/// Returns a TCP packet for card 2 that is not segmented, and its header.
fn tcp() -> (Header, Vec<u8>) {
    let mut frame = [&mac(2)[..], &mac(1), &[8, 0]].concat();
    frame.extend([0x45, 0, 0xfe, 0, 0, 0, 0, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    frame.extend([0, 80, 1, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x18, 1, 0, 0, 0, 0, 0]);
    frame.extend((frame.len()..14 + 0xfe00).map(|n| n as u8));
    (tcp_segmentation(), frame)
}

#[test]
fn a_packet_passes_whole_or_in_segments() {
    let name = name();
    let mut sender = Pair::new(join(&name, Some(mac(1))), SPLIT);
    let (header, packet) = tcp();
    let sent = [header.as_bytes(), &packet].concat();
    let receiver = join(&name, Some(mac(2)));
    for features in [receiver.features(), without(&receiver, NetFeatures::GUEST_TSO4)] {
        let mut receiver = Pair::with(receiver.clone(), SPLIT, features);
        sender.send(&sent);
        receiver.receive.poll();
        if features == receiver.card.features() {
            let (received, whole) = receiver.receive.receive(12).unwrap();
            assert!(whole == packet);
            assert_eq!(Header { num_buffers: 0.into(), ..received }, header);
        } else {
            assert!(receiver.take() == segments(&header, &packet));
        }
        receiver.stop();
    }
}

#[test]
fn a_hostile_guest_is_counted_and_reaches_nobody() {
    let name = name();
    let mut victim = Pair::new(join(&name, Some(mac(1))), SPLIT);
    let mut open = Pair::new(join(&name, None), SPLIT);
    let mut access = Pair::new(join(&format!("{name},vlan=5"), Some(mac(3))), SPLIT);
    let mut fixed = Pair::new(join(&name, Some(mac(4))), SPLIT);
    // It forges the address of a card, from a card with and without an address of its own.
    open.send(&frame(EVERYBODY, 1, 60, 0));
    fixed.send(&frame(EVERYBODY, 9, 60, 0));
    assert_eq!((open.counter("sent_spoofed"), fixed.counter("sent_spoofed")), (1, 1));
    // It answers ARP for another.
    let mut arp = frame(EVERYBODY, 4, 60, 0);
    arp[24..26].copy_from_slice(&[8, 6]);
    arp[34..40].copy_from_slice(&mac(1));
    fixed.send(&arp);
    assert_eq!(fixed.counter("sent_spoofed"), 2);
    // It answers IPv6 neighbours for another: an advertisement with the hardware address of the target.
    let mut advertisement = frame(EVERYBODY, 4, 86, 0);
    advertisement[24..26].copy_from_slice(&[0x86, 0xdd]);
    advertisement[26..].fill(0);
    (advertisement[26], advertisement[32], advertisement[66]) = (0x60, 58, 136);
    advertisement[90..92].copy_from_slice(&[2, 1]);
    advertisement[92..98].copy_from_slice(&mac(4));
    fixed.send(&advertisement);
    assert_eq!(fixed.counter("sent_spoofed"), 2);
    advertisement[92..98].copy_from_slice(&mac(1));
    fixed.send(&advertisement);
    assert_eq!(fixed.counter("sent_spoofed"), 3);
    // It sends a tag on an access port, also of its own VLAN.
    for vlan in [0, 5, 7] {
        let mut tagged = frame(EVERYBODY, 3, 60, 0);
        tagged[24..28].copy_from_slice(&[0x81, 0, 0, vlan]);
        access.send(&tagged);
    }
    assert_eq!(access.counter("sent_tagged"), 3);
    // It fills the table. The addresses of others are still found.
    victim.send(&frame(EVERYBODY, 1, 60, 0));
    for number in 0..2000u16 {
        let mut forged = frame(mac(1), 9, 60, 0);
        forged[18..24].copy_from_slice(&[2, 9, 0, 0, (number >> 8) as u8, number as u8]);
        open.send(&forged);
        victim.take();
    }
    for pair in [&mut open, &mut access, &mut fixed] {
        pair.take();
    }
    fixed.send(&frame(mac(1), 4, 60, 7));
    assert_eq!(victim.take().len(), 1);
    assert!(open.take().is_empty() && access.take().is_empty());
    // VLAN 5 is the access port's and the trunks'.
    access.send(&frame(EVERYBODY, 3, 60, 0));
    for pair in [&mut victim, &mut open, &mut fixed] {
        let frames = pair.take();
        assert_eq!((frames.len(), &frames[0][12..16]), (1, &[0x81, 0, 0, 5][..]));
    }
    for pair in [victim, open, access, fixed] {
        pair.stop();
    }
}

/// The card writes a checksum for a driver that takes none. Guests choose where, and which value.
#[test]
fn a_checksum_changes_nothing_that_was_judged() {
    let name = name();
    let mut sender = Pair::new(join(&format!("{name},vlan=5"), Some(mac(1))), SPLIT);
    let trunk = join(&name, Some(mac(2)));
    let features = without(&trunk, NetFeatures::GUEST_OFFLOADS);
    let mut trunk = Pair::with(trunk, SPLIT, features);
    let send = |pair: &mut Pair, kind: [u8; 2], payload: &[u8], start: u16, offset: u16| {
        let header = Header {
            flags: HDR_F_NEEDS_CSUM,
            csum_start: start.into(),
            csum_offset: offset.into(),
            ..Header::default()
        };
        let ethernet = [&EVERYBODY[..], &mac(1), &kind].concat();
        pair.send(&[header.as_bytes(), &ethernet, payload].concat());
    };
    // The source address and the tag to come are in the header of Ethernet.
    for (start, offset) in [(0, 6), (8, 2), (13, 1)] {
        send(&mut sender, [8, 0], &[0; 46], start, offset);
    }
    assert_eq!(sender.counter("sent_invalid"), 3);
    // The hardware address of ARP, and that of an advertisement. A checksum may make the latter, too.
    let arp = [&[0, 1, 8, 0, 6, 4, 0, 2][..], &mac(1), &[0; 32]].concat();
    send(&mut sender, [8, 6], &arp, 14, 12);
    let mut packet = vec![0x60, 0, 0, 0, 0, 32, 58, 255];
    packet.resize(40, 0);
    packet.push(136);
    packet.resize(64, 0);
    packet.extend([2, 1]);
    packet.extend(mac(1));
    for (start, offset) in [(14, 70 - 14), (54, 70 - 54), (56, 2), (14, 6)] {
        send(&mut sender, [0x86, 0xdd], &packet, start, offset);
    }
    packet[6] = 60;
    send(&mut sender, [0x86, 0xdd], &packet, 14, 40);
    assert!(trunk.take().is_empty());
    assert_eq!((trunk.counter("dropped_offload"), sender.counter("sent_spoofed")), (6, 0));
    // The checksum of an advertisement itself.
    packet[6] = 58;
    send(&mut sender, [0x86, 0xdd], &packet, 54, 2);
    let received = trunk.take();
    assert_eq!((received.len(), &received[0][12..16]), (1, &[0x81, 0, 0, 5][..]));
    assert_ne!(received[0][60..62], [0, 0]);
    sender.stop();
    trunk.stop();
}

/// The guest writes another source address into a frame that the card reads. The copy decides.
#[test]
fn a_frame_that_changes_while_it_is_judged_keeps_its_source() {
    const LAST_BYTE: u64 = 12 + 11;
    /// Frames that pass, and that are refused, until the test has seen enough.
    const ENOUGH: u64 = 20;
    let name = name();
    let mut fixed = Pair::new(join(&name, Some(mac(1))), SPLIT);
    let mut other = Pair::new(join(&name, Some(mac(2))), SPLIT);
    let (view, is_over, chain) = (fixed.transmit.view.clone(), AtomicBool::new(false), AtomicU16::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in [9, 1].into_iter().cycle() {
                if is_over.load(Ordering::Relaxed) {
                    return;
                }
                let at = Gpa(Guest::chain_at(chain.load(Ordering::Relaxed)).0 + LAST_BYTE);
                view.write(at, &[number], &mut Marks::off()).unwrap();
            }
        });
        let mut passed = 0;
        eventually("frames pass, and frames are refused", || {
            for _ in 0..100 {
                let id = fixed.transmit.send(&frame(EVERYBODY, 1, 60, 0), 4096).unwrap();
                chain.store(id, Ordering::Relaxed);
                fixed.transmit.poll();
                fixed.transmit.take().unwrap();
            }
            for frame in other.take() {
                assert_eq!(frame[6..12], mac(1));
                passed += 1;
            }
            passed >= ENOUGH && fixed.counter("sent_spoofed") >= ENOUGH
        });
        is_over.store(true, Ordering::Relaxed);
    });
    fixed.stop();
    other.stop();
}

#[test]
fn a_full_inbox_drops_and_a_ring_that_stops_takes_no_frame_along() {
    let name = name();
    let mut sender = Pair::new(join(&name, Some(mac(1))), SPLIT);
    let mut third = Pair::new(join(&name, Some(mac(3))), SPLIT);
    let receiver = join(&name, Some(mac(2)));
    let mut pair = Pair::new(receiver.clone(), SPLIT);
    pair.send(&frame(EVERYBODY, 2, 60, 0));
    third.send(&frame(EVERYBODY, 3, 60, 0));
    for number in 0..3000u32 {
        sender.send(&frame(mac(2), 1, 60, number as u8));
        let to_third = frame(mac(3), 1, 60, number as u8);
        sender.send(&to_third);
        assert!(third.take().last().is_some_and(|frame| *frame == to_third[12..]), "{number}");
    }
    let dropped = sender.counter("dropped_late");
    assert!((1..3000).contains(&dropped));
    // The sender is killed. Its frames stay.
    sender.receive.kill();
    sender.transmit.kill();
    assert_eq!(pair.take().len() as u64, 3000 - dropped + 1);
    // The receiver stops with frames in its inbox. The next driver gets none of them.
    third.send(&frame(mac(2), 3, 60, 1));
    pair.stop();
    third.send(&frame(mac(2), 3, 60, 2));
    assert_eq!(third.counter("dropped_late"), 1);
    let mut pair = Pair::new(receiver, SPLIT);
    third.send(&frame(mac(2), 3, 60, 3));
    assert!(pair.take() == [&frame(mac(2), 3, 60, 3)[12..]]);
    // The card is removed. Its address is not known any more.
    third.send(&frame(mac(2), 3, 60, 4));
    drop(pair.stop());
    third.send(&frame(mac(2), 3, 60, 5));
    third.stop();
}

/// Visits rings in any order: some of them seldom, a receiver does not refill, and inboxes are full. Each
/// visit of a sender takes as many frames, at the same cost. So cards that are visited as often send as much.
/// Each frame arrives, or is counted.
#[test]
fn a_visit_of_each_sender_takes_and_costs_as_much() {
    const CARDS: usize = 6;
    const BUDGET: u32 = 2;
    const FRAMES: u32 = 16 * BUDGET;
    /// The frames, the decisions about them, and their copies: some four in six are for others, or five. Each
    /// poll rounds it up. A poll ends with the decisions that use up its budget, and their copies.
    const COSTS: std::ops::RangeInclusive<u32> = 3 * BUDGET..=5 * BUDGET;
    for (seed, kind) in (0..).zip(rig::kinds()) {
        let (name, mut random) = (name(), Random(seed));
        let mut cards: Vec<_> = (0..CARDS)
            .map(|number| {
                let card = join(&name, Some(mac(number)));
                let [receive, transmit] =
                    [RECEIVE, TRANSMIT].map(|ring| Rig::start(&card, ring, kind, 64, card.features()));
                (card, receive, transmit, 0)
            })
            .collect();
        for (number, (_, _, transmit, _)) in (0..).zip(&mut cards) {
            transmit.send(&frame(EVERYBODY, number, 60, 0), 4096).unwrap();
            transmit.poll();
            transmit.take().unwrap();
        }
        // The frames that each card has received of each other one.
        let mut received = [[0u64; CARDS]; CARDS];
        let mut take = |number: usize, receive: &mut Rig| {
            while let Some((_, frame)) = receive.receive(12) {
                received[number][usize::from(frame[11])] += 1;
            }
        };
        for visit in 0..3000 {
            // The last three cards are visited seldom.
            let number = random.below(if visit % 8 == 0 { 6 } else { 3 }) as usize;
            let (_, receive, transmit, visits) = &mut cards[number];
            if random.one_in(2) {
                while number != 2 && receive.offer(&[1530], true).is_some() {}
                receive.poll_once(BUDGET);
                take(number, receive);
                continue;
            }
            for to in 0..FRAMES as usize {
                transmit.send(&frame(mac(to % CARDS), number, 60, 0), 4096).unwrap();
            }
            let (mut served, mut cost) = (0, 0);
            while {
                let polled = transmit.poll_once(BUDGET);
                assert!(polled.cost <= BUDGET + 4, "{kind:?} {visit} {polled:?}");
                (served, cost) = (served + polled.served, cost + polled.cost);
                polled.next == Next::More
            } {}
            assert!(served == FRAMES && COSTS.contains(&cost), "{kind:?} {visit} {served} {cost}");
            *visits += 1;
            while transmit.take().is_some() {}
        }
        // Takes the frames that still wait in the inboxes.
        for (number, (_, receive, ..)) in cards.iter_mut().enumerate() {
            while {
                while receive.offer(&[1530], true).is_some() {}
                receive.poll() > 0
            } {
                take(number, receive);
            }
        }
        let (mut sent, mut gone) = (0, 0);
        for (card, _, _, visits) in &cards {
            assert_eq!(counter(card, "sent_frames"), 1 + u64::from(FRAMES * visits));
            assert!(counter(card, "dropped_late") > 0);
            // The first one was for all others.
            sent += counter(card, "sent_frames") - 1 + CARDS as u64 - 1;
            gone += counter(card, "dropped_late") + counter(card, "sent_unforwarded");
        }
        assert_eq!(received.iter().flatten().sum::<u64>(), sent - gone, "{kind:?}");
        let others = |number: usize| (0..CARDS).filter(move |other| *other != number);
        for number in others(2) {
            assert!(
                others(number).all(|other| received[number][other] > 0),
                "{kind:?} {number} {received:?}"
            );
        }
    }
}

/// A frame for all cards costs as many copies. So a poll passes on as many frames as its budget has copies
/// for, and the others later. A stop loses none.
#[test]
fn a_flood_is_carried_in_parts() {
    const BUDGET: u32 = 2;
    const FRAMES: u8 = 32;
    /// The copies of a frame for all other cards, each into an inbox of its own, and the rest of the poll.
    const BEYOND: u32 = 6;
    for (kind, is_stopped) in rig::kinds().flat_map(|kind| [false, true].map(|is_stopped| (kind, is_stopped)))
    {
        let name = name();
        let card = join(&name, Some(mac(0)));
        let mut transmit = Rig::start(&card, TRANSMIT, kind, 64, card.features());
        let mut peers: Vec<_> = (1..=20)
            .map(|number| {
                let card = join(&name, Some(mac(number)));
                Rig::start(&card, RECEIVE, kind, 64, card.features())
            })
            .collect();
        let sent: Vec<_> = (0..FRAMES).map(|number| frame(EVERYBODY, 0, 60, number)).collect();
        for frame in &sent {
            transmit.send(frame, 4096).unwrap();
        }
        let mut polls = 0;
        while {
            let polled = transmit.poll_once(BUDGET);
            polls += 1;
            assert!(polled.cost <= BUDGET + BEYOND, "{kind:?} {polled:?}");
            // The chains come back as soon as their frames are copied.
            assert_eq!(polled.served, if polls == 1 { FRAMES.into() } else { 0 });
            polled.next == Next::More && !(is_stopped && polls == 3)
        } {}
        assert!(if is_stopped { polls == 3 } else { polls > 10 }, "{polls}");
        transmit.stop();
        for peer in &mut peers {
            while peer.offer(&[1530], true).is_some() {}
            peer.poll();
            let received: Vec<_> = std::iter::from_fn(|| peer.receive(12)).map(|(_, frame)| frame).collect();
            assert!(received.iter().eq(sent.iter().map(|frame| &frame[12..])), "{kind:?} {}", received.len());
        }
        assert_eq!(counter(&card, "sent_frames"), u64::from(FRAMES));
    }
}

#[test]
fn the_address_of_a_guest_is_announced() {
    let name = name();
    let card = join(&name, Some(mac(1)));
    let mut other = Pair::new(join(&name, Some(mac(2))), SPLIT);
    card.message(DeviceMessage::SendRarp(mac(1))).unwrap();
    let frames = other.take();
    assert_eq!((frames.len(), &frames[0][6..14]), (1, &[2, 0, 0, 0, 0, 1, 0x80, 0x35][..]));
    // It announces no other address.
    card.message(DeviceMessage::SendRarp(mac(9))).unwrap();
    assert!(other.take().is_empty());
}

/// Two cards on two workers send to each other. Each frame arrives once and in order, or is counted. Both
/// stop at the same time, while frames are on their way. The workers can be of two pools.
#[test]
fn frames_pass_between_workers() {
    let engine = EngineOptions::new(EngineKind::Threads, 8);
    // With the workers of each pool, and the length of the frames. One worker passes long ones directly.
    for (poll, pools, workers, len) in [
        (Poll::Never, 1, 2, 100),
        (Poll::Never, 2, 1, 100),
        (Poll::Never, 1, 1, 100),
        (Poll::Always, 1, 2, 100),
        (Poll::Always, 1, 2, 1000),
        (Poll::Always, 1, 1, 1000),
    ] {
        let options = kickless_worker::Options { workers, engine, cpus: Vec::new(), poll };
        let is_alone = (pools, workers) == (1, 1);
        let pools: Vec<_> = (0..pools).map(|_| Arc::new(WorkerPool::start(&options).unwrap())).collect();
        for kind in kinds() {
            let name = name();
            let cards = [1, 2].map(|number| join(&name, Some(mac(number))));
            // Each card is a device of its own, so that they may be on different workers.
            let mut rings = [0, 1].map(|card: usize| {
                let executor = pools[card % pools.len()].clone().executor(card as u32 + 1);
                [RECEIVE, TRANSMIT].map(|index| Running::start(&executor, &cards[card], index, kind))
            });
            let (mut sent, mut received) = ([0u32; 2], [(0u64, None::<u32>); 2]);
            let mut turn = |rings: &mut [[Running; 2]; 2], sent: &mut [u32; 2]| {
                for (card, [receive, transmit]) in rings.iter_mut().enumerate() {
                    while receive.guest.offer(&[1530], true).is_some() {}
                    receive.kick();
                    while let Some((_, frame)) = receive.guest.receive(12) {
                        let number = u32::from_le_bytes(frame[14..18].try_into().unwrap());
                        let (count, last) = &mut received[card];
                        assert!(last.replace(number).is_none_or(|last| last < number), "out of order");
                        *count += 1;
                    }
                    while transmit.guest.take().is_some() {}
                    for _ in 0..16 {
                        let to = mac(2 - card);
                        let mut frame = frame(to, 1 + card, len, 0);
                        frame[26..30].copy_from_slice(&sent[card].to_le_bytes());
                        if transmit.guest.send(&frame, 4096).is_none() {
                            break;
                        }
                        sent[card] += 1;
                    }
                    transmit.kick();
                }
                received.map(|(count, _)| count)
            };
            let mut counts = [0; 2];
            eventually("frames arrive on both cards", || {
                counts = turn(&mut rings, &mut sent);
                counts.iter().all(|count| *count > 500)
            });
            let stops: Vec<_> = rings.iter().flatten().map(|ring| ring.handle.stop()).collect();
            for stop in stops {
                stop.recv_timeout(kickless_testing::LIMIT).expect("a stop does not complete");
            }
            for (card, [mut receive, mut transmit]) in rings.into_iter().enumerate() {
                counts[card] += std::iter::from_fn(|| receive.guest.receive(12)).count() as u64;
                while transmit.guest.take().is_some() {}
                assert_eq!(counts[card], counter(&cards[card], "received_frames"));
                let taken = u64::from(sent[card]) - transmit.guest.with_device() as u64;
                assert_eq!(taken, counter(&cards[card], "sent_frames"));
                let direct = counter(&cards[card], "sent_directly");
                assert!(
                    if is_alone && len > 500 { direct > 0 } else { len > 500 || direct == 0 },
                    "{direct}"
                );
            }
        }
    }
}
