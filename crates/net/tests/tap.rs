//! Runs cards on TAPs in network namespaces, with a second TAP at the same bridge as the peer.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may")]

mod rig;

use kickless_device::{CaptureTo, Device, DeviceMessage, Interest, Next, Operate, Update};
use kickless_memory::Iov;
use kickless_net::Net;
use kickless_net_port::{ReceiveError, Tap, TapQueue};
use kickless_spec::features::Features;
use kickless_spec::net::{GSO_TCPV4, HDR_F_NEEDS_CSUM, Header, NetFeatures};
use kickless_testing::{
    CapturedFrame, LIMIT, eventually, in_network_namespace, ip, parse_pcapng, tc, with_subscriber,
};
use rig::{Guest, Kind, Rig, SIZE_MAX, card_on, counter, kinds};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::BTreeSet;
use std::io::{Read, pipe};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};
use zerocopy::IntoBytes;

const SPLIT: Kind = Kind { packed: false, event_idx: true, in_order: false };
const RECEIVE: u16 = 0;
const TRANSMIT: u16 = 1;
/// The source address of frames of these tests. The kernel sends other frames too.
const SOURCE: [u8; 6] = [2, 0, 0, 0, 0, 1];

/// Returns a broadcast frame with an EtherType for experiments.
fn frame(len: usize) -> Vec<u8> {
    let mut frame = vec![0xff; 6];
    frame.extend(SOURCE);
    frame.extend([0x88, 0xb5]);
    frame.extend((14..len).map(|n| n as u8));
    frame
}

fn with_header(header: Header, frame: &[u8]) -> Vec<u8> {
    [header.as_bytes(), frame].concat()
}

fn wait(fd: impl AsFd, flags: PollFlags) {
    let timeout = Timespec { tv_sec: LIMIT.as_secs().cast_signed(), tv_nsec: 0 };
    assert_eq!(poll(&mut [PollFd::new(&fd, flags)], Some(&timeout)), Ok(1), "{flags:?}");
}

/// A card on a TAP, and a peer at the same bridge.
struct Network {
    card: Arc<Net>,
    peer: TapQueue,
}

impl Network {
    fn new(pairs: u16) -> Self {
        let (tap, peer) = (Tap::open("card", pairs).unwrap(), Tap::open("peer", 1).unwrap());
        ip("link add bridge type bridge forward_delay 0 mcast_snooping 0");
        ip("link set dev bridge up");
        for name in ["card", "peer"] {
            ip(&format!("link set dev {name} up mtu 65521 master bridge"));
        }
        // Without offloads: the kernel segments for the peer.
        peer.set(kickless_net_port::Offloads::empty(), |_| true);
        let card = card_on(pairs, tap);
        card.open().unwrap();
        Self { card, peer: peer.queue(0).unwrap() }
    }

    /// Returns the next frame of a test that the peer receives.
    fn at_peer(&mut self) -> (Header, Vec<u8>) {
        loop {
            match self.arrived() {
                Some(frame) => return frame,
                None => wait(&self.peer, PollFlags::IN),
            }
        }
    }

    /// Returns the next frame of a test, if the peer has received one.
    fn arrived(&mut self) -> Option<(Header, Vec<u8>)> {
        loop {
            let mut bytes = vec![0; 70_000];
            let mut header = Header::default();
            match self.peer.receive(&mut header, &mut Iov::default(), &mut bytes) {
                Ok(len) if bytes[6..12] == SOURCE => {
                    bytes.truncate(len);
                    return Some((header, bytes));
                }
                Ok(_) => {}
                Err(ReceiveError::Empty) => return None,
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn start(&self, index: u16, kind: Kind, features: Features) -> Rig {
        Rig::start(&self.card, index, kind, SIZE_MAX, features)
    }

    /// Polls a receive ring until it delivers a frame of a test.
    fn receive(&mut self, rig: &mut Rig) -> (Header, Vec<u8>) {
        loop {
            rig.poll();
            while let Some((header, frame)) = rig.receive(12) {
                if frame[6..12] == SOURCE {
                    return (header, frame);
                }
            }
            if rig.interest() == Some(Interest::Readable) {
                rig.wait_readable();
            }
        }
    }

    /// Waits until the TAP of the card delivers frames with these features. Sends frames until one arrives.
    fn wait_until_attached(&mut self, rig: &mut Rig) {
        eventually("the queue is attached", || {
            self.peer.send_copy(&Header::default(), &frame(60)).unwrap();
            rig.poll();
            std::iter::from_fn(|| rig.receive(12)).any(|(_, bytes)| bytes == frame(60))
        });
        // Frames that were sent meanwhile arrive first.
        self.peer.send_copy(&Header::default(), &frame(61)).unwrap();
        while self.receive(rig).1 != frame(61) {
            while rig.offer(&[2048], true).is_some() {}
        }
    }
}

#[test]
fn frames_pass_in_both_directions() {
    in_network_namespace(|| {
        let mut network = Network::new(2);
        for kind in kinds() {
            let features = network.card.features();
            let mut transmit = network.start(TRANSMIT, kind, features);
            let mut receive = network.start(RECEIVE, kind, features);
            while receive.offer(&[1530], true).is_some() {}
            network.wait_until_attached(&mut receive);
            let mut sent = 0;
            for (len, cut) in [(14, 5), (60, 12), (1514, 100), (9000, 4096), (65_535, 4096)] {
                transmit.send(&with_header(Header::default(), &frame(len)), cut).unwrap();
                assert_eq!((transmit.poll(), transmit.last), (1, Next::Idle));
                assert_eq!(transmit.take().unwrap().2, 0);
                assert_eq!(network.at_peer().1, frame(len), "{kind:?}");
                sent += 1;
            }
            for len in [14, 59, 60, 1514, 1518, 1519, 9000, 65_535] {
                while receive.offer(&[1530], true).is_some() {}
                network.peer.send_copy(&Header::default(), &frame(len)).unwrap();
                let (header, bytes) = network.receive(&mut receive);
                assert_eq!(bytes, frame(len), "{kind:?}");
                assert_eq!(usize::from(header.num_buffers.get()), (len + 12).div_ceil(1530), "{len}");
                assert_eq!((receive.last, receive.interest()), (Next::Quiet, Some(Interest::Readable)));
            }
            for rig in [transmit, receive] {
                let offered = rig.with_device();
                assert_eq!(rig.stop().1, offered);
            }
            assert!(sent > 0);
        }
        for name in ["sent_refused", "sent_down", "sent_invalid", "dropped_long", "dropped_late"] {
            assert_eq!(counter(&network.card, name), 0, "{name}");
        }
    });
}

#[test]
fn frames_are_captured() {
    in_network_namespace(|| {
        let dir = tempfile::TempDir::new().unwrap();
        let path = dir.path().join("card.pcapng");
        let mut network = Network::new(1);
        let features = network.card.features();
        let mut transmit = network.start(TRANSMIT, SPLIT, features);
        let mut receive = network.start(RECEIVE, SPLIT, features);
        while receive.offer(&[1530], true).is_some() {}
        network.wait_until_attached(&mut receive);
        network.card.set_capture(Some(&CaptureTo { path: &path, device: "card", len_max: 2000 })).unwrap();
        // The second frame spans several chains, and the third waits in the card for chains.
        for len in [60, 9000, 65_535] {
            transmit.send(&with_header(Header::default(), &frame(len)), 4096).unwrap();
            transmit.poll();
            while receive.offer(&[1530], true).is_some() {}
            network.peer.send_copy(&Header::default(), &frame(len)).unwrap();
            assert_eq!(network.receive(&mut receive).1, frame(len));
        }
        network.card.set_capture(None).unwrap();
        let contents = parse_pcapng(&std::fs::read(&path).unwrap());
        for direction in [1, 2] {
            // The kernel sends other frames too.
            let is_ours = |captured: &&CapturedFrame| captured.bytes[6..12] == SOURCE;
            let of = contents.frames.iter().filter(|captured| captured.direction == direction);
            let lens: Vec<_> = of.filter(is_ours).map(|captured| captured.len).collect();
            assert_eq!(lens, [60, 9000, 65_535], "{direction}");
        }
        for captured in contents.frames.iter().filter(|captured| captured.bytes[6..12] == SOURCE) {
            assert!(captured.bytes == frame(captured.len)[..captured.len.min(2000)]);
        }
    });
}

#[test]
fn a_frame_in_more_pieces_than_the_kernel_takes_is_sent() {
    in_network_namespace(|| {
        let mut network = Network::new(1);
        for kind in kinds() {
            let mut guest = Guest::prepare(kind, SIZE_MAX).behind_iommu();
            guest.translate_all();
            guest.translate_pages();
            let vring = guest.vring(TRANSMIT, guest.first_avail(), None);
            let mut rig = Rig::start_on(&network.card, guest, vring, network.card.features());
            let sent = rig.send_scattered(&with_header(Header::default(), &frame(14)));
            assert_eq!((rig.poll(), rig.last), (1, Next::Idle));
            assert!(network.at_peer().1 == sent);
            rig.take().unwrap();
        }
    });
}

#[test]
fn a_frame_without_room_stays_in_the_ring() {
    in_network_namespace(|| {
        let mut network = Network::new(1);
        let bridge = ["fdb", "add", "02:00:00:00:00:99", "dev", "peer", "master", "static"];
        assert!(std::process::Command::new("bridge").args(bridge).status().unwrap().success());
        tc("qdisc add dev peer root tbf rate 100mbit burst 4000 limit 100000000");
        let mut slow = frame(1400);
        slow[..6].copy_from_slice(&[2, 0, 0, 0, 0, 0x99]);
        let slow = with_header(Header::default(), &slow);
        for kind in kinds() {
            let features = network.card.features();
            let mut rig = network.start(TRANSMIT, kind, features);
            let fill = |rig: &mut Rig| {
                for _ in 0..10_000 {
                    let _ = rig.send(&slow, 2000);
                    rig.poll();
                    if rig.last == Next::Quiet {
                        return;
                    }
                    while rig.take().is_some() {}
                }
                panic!("the send buffer is not bounded");
            };
            fill(&mut rig);
            while rig.take().is_some() {}
            // The refused frame is credit. Kicks stay off, and the TAP is watched.
            assert_eq!((rig.interest(), rig.task.vring().credit()), (Some(Interest::Writable), 1));
            assert_eq!(rig.task.in_flight(), 0);
            // A poll for which the TAP is not due does not ask it.
            assert_eq!(rig.poll_with(100, false).next, Next::Quiet);
            let sent = counter(&network.card, "sent_frames");
            let event = rig.task.event().unwrap().fd.try_clone_to_owned().unwrap();
            wait(&event, PollFlags::OUT);
            rig.poll();
            assert_eq!((rig.last, rig.interest()), (Next::Idle, Some(Interest::None)), "{kind:?}");
            assert!(counter(&network.card, "sent_frames") > sent);
            while rig.take().is_some() {}
            // New memory and a stop return it.
            fill(&mut rig);
            rig.change_memory();
            assert_eq!((rig.task.vring().credit(), rig.task.in_flight()), (0, 0));
            rig.poll();
            while rig.take().is_some() {}
            let offered = rig.with_device();
            assert_eq!(rig.stop().1, offered);
        }
        assert_eq!(counter(&network.card, "sent_refused"), 0);
        while network.peer.receive(&mut Header::default(), &mut Iov::default(), &mut [0; 2000]).is_ok() {}
    });
}

#[test]
fn refused_frames_are_dropped_and_counted() {
    in_network_namespace(|| {
        let (mut log, write) = pipe().unwrap();
        let subscriber = tracing_subscriber::fmt().with_writer(Mutex::new(write)).finish();
        with_subscriber(subscriber, || {
            let mut network = Network::new(1);
            let features = network.card.features();
            let mut transmit = network.start(TRANSMIT, SPLIT, features);
            let mut receive = network.start(RECEIVE, SPLIT, features);
            while receive.offer(&[1530], true).is_some() {}
            network.wait_until_attached(&mut receive);
            let plain = with_header(Header::default(), &frame(60));
            // This frame has no TCP header, which only the kernel finds out.
            let tcp = Header {
                flags: HDR_F_NEEDS_CSUM,
                gso_type: GSO_TCPV4,
                gso_size: 10.into(),
                csum_start: 50.into(),
                csum_offset: 8.into(),
                ..Header::default()
            };
            let send = |transmit: &mut Rig, bytes: &[u8]| {
                transmit.send(bytes, 100).unwrap();
                assert_eq!((transmit.poll(), transmit.last), (1, Next::Idle));
                assert_eq!(transmit.take().unwrap().2, 0);
            };
            let counts = |network: &Network| {
                ["sent_frames", "sent_refused", "sent_down"].map(|name| counter(&network.card, name))
            };
            send(&mut transmit, &with_header(tcp, &frame(60)));
            assert_eq!(counts(&network), [0, 1, 0]);
            ip("link set dev card down");
            send(&mut transmit, &plain);
            assert_eq!(counts(&network), [0, 1, 1]);
            ip("link set dev card up");
            send(&mut transmit, &plain);
            assert_eq!(counts(&network), [1, 1, 1]);
            // The card lives on without its TAP.
            ip("link del card");
            for sent in 2..5 {
                send(&mut transmit, &plain);
                assert_eq!(counts(&network), [1, 1, sent]);
                receive.poll();
                assert_eq!((receive.last, receive.interest()), (Next::Quiet, Some(Interest::None)));
            }
            let offered = receive.with_device();
            assert_eq!(receive.stop().1, offered);
            let mut receive = network.start(RECEIVE, SPLIT, features);
            receive.offer(&[1530], true).unwrap();
            receive.poll();
            network.card.close().unwrap();
        });
        let mut lines = String::new();
        log.read_to_string(&mut lines).unwrap();
        assert_eq!(lines.matches("the TAP was deleted").count(), 1, "{lines}");
    });
}

/// Returns a TCP packet with this payload, and the header that makes the receiver segment it.
fn tcp(payload: usize) -> (Header, Vec<u8>) {
    let mut frame = vec![0xff; 6];
    frame.extend(SOURCE);
    frame.extend([8, 0]);
    let total = (40 + payload) as u16;
    frame.extend([
        0x45,
        0,
        (total >> 8) as u8,
        total as u8,
        0,
        1,
        0x40,
        0,
        64,
        6,
        0,
        0,
        10,
        0,
        0,
        1,
        10,
        0,
        0,
        2,
    ]);
    let sum: u32 = frame[14..].chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
    let checksum = !((sum & 0xffff) + (sum >> 16)) as u16;
    frame[24..26].copy_from_slice(&checksum.to_be_bytes());
    frame.extend([0, 1, 0, 2, 0, 0, 0, 5, 0, 0, 0, 0, 0x50, 0x18, 1, 0]);
    // The sum of the pseudo-header.
    let pseudo = 2 * 0x0a00 + 3 + 6 + 20 + payload as u32;
    frame.extend((((pseudo & 0xffff) + (pseudo >> 16)) as u16).to_be_bytes());
    frame.extend([0, 0]);
    frame.extend((0..payload).map(|n| n as u8));
    let header = Header {
        flags: HDR_F_NEEDS_CSUM,
        gso_type: GSO_TCPV4,
        hdr_len: 54.into(),
        gso_size: 1000.into(),
        csum_start: 34.into(),
        csum_offset: 16.into(),
        ..Header::default()
    };
    (header, frame)
}

#[test]
fn packets_pass_unsegmented_if_the_driver_accepts_that() {
    in_network_namespace(|| {
        let mut network = Network::new(1);
        let (header, packet) = tcp(60_000);
        let long = NetFeatures::GUEST_OFFLOADS - NetFeatures::GUEST_CSUM;
        let mut features = vec![network.card.features()];
        features.push(rig::without(&network.card, long));
        features.push(rig::without(&network.card, NetFeatures::GUEST_OFFLOADS));
        let mut whole = BTreeSet::new();
        for (round, features) in features.into_iter().chain([network.card.features()]).enumerate() {
            let mut rig = network.start(RECEIVE, SPLIT, features);
            while rig.offer(&[1530], true).is_some() {}
            network.wait_until_attached(&mut rig);
            if round % 3 == 0 {
                // The TAP follows the rings a moment later. Until then, it delivers segments.
                eventually("the driver's offloads are in force", || {
                    network.peer.send_copy(&header, &packet).unwrap();
                    while rig.offer(&[1530], true).is_some() {}
                    let (received, bytes) = network.receive(&mut rig);
                    let kind = (received.gso_type, received.gso_size);
                    bytes == packet && kind == (GSO_TCPV4, header.gso_size)
                });
            } else {
                // Segments of an earlier round may come first. They are the same.
                let mut frames = BTreeSet::new();
                network.peer.send_copy(&header, &packet).unwrap();
                while frames.len() < 60 {
                    while rig.offer(&[1530], true).is_some() {}
                    let (header, bytes) = network.receive(&mut rig);
                    // The first of these drivers accepts partial checksums.
                    assert_eq!(header.gso_type, 0);
                    assert!(round == 1 || header.flags & HDR_F_NEEDS_CSUM == 0);
                    assert_eq!(bytes.len(), 1054);
                    frames.insert(bytes);
                }
                whole = frames;
            }
            let offered = rig.with_device();
            assert_eq!(rig.stop().1, offered);
        }
        // In the other direction, the kernel segments for the peer, as it did for the card.
        let mut rig = network.start(TRANSMIT, SPLIT, network.card.features());
        rig.send(&with_header(header, &packet), 4096).unwrap();
        rig.poll();
        let at_peer: BTreeSet<_> = (0..60).map(|_| network.at_peer().1).collect();
        assert_eq!(at_peer, whole);
        assert_eq!(counter(&network.card, "dropped_offload"), 0);
    });
}

/// A frame that the kernel has queued before the driver changed is segmented by the card.
#[test]
fn packets_that_were_queued_before_are_segmented_by_the_card() {
    in_network_namespace(|| {
        // A TAP with one queue stays attached while no ring runs.
        ip("tuntap add dev card mode tap");
        let mut network = Network::new(1);
        let mut rig = network.start(RECEIVE, SPLIT, network.card.features());
        while rig.offer(&[1530], true).is_some() {}
        network.wait_until_attached(&mut rig);
        rig.stop();
        // The rings of this driver start before the thread of the card has set other offloads, or after it.
        let (header, packet) = tcp(60_000);
        let long = NetFeatures::GUEST_OFFLOADS - NetFeatures::GUEST_CSUM;
        let plain = rig::without(&network.card, NetFeatures::GUEST_OFFLOADS);
        for features in [plain, rig::without(&network.card, long), plain - Features::VERSION_1] {
            network.peer.send_copy(&header, &packet).unwrap();
            let mut rig = network.start(RECEIVE, SPLIT, features);
            let mut frames = Vec::new();
            while frames.len() < 60 {
                while rig.offer(&[1530], true).is_some() {}
                rig.poll();
                while let Some((header, frame)) = rig.receive(12) {
                    assert_eq!((header.flags & HDR_F_NEEDS_CSUM, header.gso_type), (0, 0));
                    frames.extend((frame[6..12] == SOURCE).then_some(frame));
                }
            }
            assert!(frames.iter().all(|frame| frame.len() == 1054));
            for (nth, frame) in frames.iter().enumerate() {
                assert_eq!(frame[38..42], (5 + 1000 * nth as u32).to_be_bytes());
            }
            rig.stop();
        }
    });
}

#[test]
fn queues_follow_the_pairs_in_use() {
    in_network_namespace(|| {
        let mut network = Network::new(3);
        let features = network.card.features();
        let mut rigs: Vec<_> = [0, 2, 4].map(|index| Some(network.start(index, SPLIT, features))).into();
        for rig in rigs.iter_mut().flatten() {
            while rig.offer(&[1530], true).is_some() {}
        }
        // Each flow of the peer goes to one of the attached queues. A queue that is detached gets nothing.
        let arrives_at = |network: &mut Network, rigs: &mut Vec<Option<Rig>>, wanted: &[usize]| {
            eventually("frames arrive at the pairs in use alone", || {
                let mut seen = vec![0; rigs.len()];
                for flow in 0..64u8 {
                    let (_, mut packet) = tcp(100);
                    packet[34..36].copy_from_slice(&[7, flow]);
                    network.peer.send_copy(&Header::default(), &packet).unwrap();
                }
                for (rig, seen) in rigs.iter_mut().zip(&mut seen) {
                    let Some(rig) = rig else { continue };
                    rig.poll();
                    while let Some((_, frame)) = rig.receive(12) {
                        *seen += usize::from(frame[6..12] == SOURCE);
                    }
                    while rig.offer(&[1530], true).is_some() {}
                }
                (0..seen.len()).all(|pair| (seen[pair] > 0) == wanted.contains(&pair))
                    && seen.iter().sum::<usize>() >= 64
            });
        };
        arrives_at(&mut network, &mut rigs, &[0, 1, 2]);
        rigs[1].take().unwrap().stop();
        arrives_at(&mut network, &mut rigs, &[0, 2]);
        rigs[0].take().unwrap().stop();
        arrives_at(&mut network, &mut rigs, &[2]);
        rigs[1] = Some(network.start(2, SPLIT, features));
        arrives_at(&mut network, &mut rigs, &[1, 2]);
        // Our control ring says how many pairs the driver uses.
        let mut control = network.start(6, SPLIT, features);
        rigs[0] = Some(network.start(0, SPLIT, features));
        for (pairs, used) in [(1, &[0][..]), (3, &[0, 1, 2]), (2, &[0, 1])] {
            let id = control.command(&[4, 0, pairs, 0]);
            control.poll();
            assert_eq!(control.answer(id), 0);
            control.take().unwrap();
            arrives_at(&mut network, &mut rigs, used);
        }
        network.card.close().unwrap();
    });
}

/// The driver switches its offloads off and on. The kernel then segments for it.
#[test]
fn the_tap_follows_the_offloads_of_the_driver() {
    in_network_namespace(|| {
        let mut network = Network::new(1);
        let features = network.card.features();
        let mut rig = network.start(RECEIVE, SPLIT, features);
        let mut control = network.start(2, SPLIT, features);
        while rig.offer(&[1530], true).is_some() {}
        network.wait_until_attached(&mut rig);
        let (header, packet) = tcp(9000);
        for is_on in [true, false, true] {
            let offloads = NetFeatures::GUEST_CSUM | NetFeatures::GUEST_TSO4;
            let offloads = if is_on { offloads } else { NetFeatures::empty() };
            let id = control.command(&[&[5, 0][..], &offloads.bits().to_le_bytes()].concat());
            control.poll();
            assert_eq!(control.answer(id), 0);
            control.take().unwrap();
            eventually("the driver's offloads are in force", || {
                network.peer.send_copy(&header, &packet).unwrap();
                while rig.offer(&[1530], true).is_some() {}
                let len = network.receive(&mut rig).1.len();
                assert!(is_on || len == 1054, "the driver gets a packet that it does not accept");
                (len == packet.len()) == is_on
            });
        }
    });
}

#[test]
fn an_announcement_is_seen_in_the_network() {
    in_network_namespace(|| {
        for pairs in [1, 2] {
            let mut network = Network::new(pairs);
            // No ring has started, so no queue is attached.
            // A bridge can lose the first frames, so front-ends announce an address several times as well.
            let (mut sent, mut received) = (0, None);
            eventually("an announcement arrives", || {
                network.card.message(DeviceMessage::SendRarp(SOURCE)).unwrap();
                sent += 1;
                received = network.arrived();
                received.is_some()
            });
            let (_, bytes) = received.unwrap();
            assert_eq!(
                (&bytes[..6], &bytes[6..12], &bytes[12..14]),
                (&[0xff; 6][..], &SOURCE[..], &[0x80, 0x35][..])
            );
            assert_eq!(bytes.len(), 60);
            assert_eq!(counter(&network.card, "announcements"), sent);
            ip("link set dev card down");
            network.card.message(DeviceMessage::SendRarp(SOURCE)).unwrap();
            ip("link del bridge");
        }
    });
}

#[test]
fn a_change_of_memory_or_a_stop_does_not_wait_for_frames() {
    in_network_namespace(|| {
        let mut network = Network::new(1);
        for kind in kinds() {
            let mut rig = network.start(RECEIVE, kind, network.card.features());
            while rig.offer(&[1530], true).is_some() {}
            network.wait_until_attached(&mut rig);
            for update in 0..4 {
                network.peer.send_copy(&Header::default(), &frame(3000)).unwrap();
                assert_eq!(network.receive(&mut rig).1, frame(3000));
                while rig.offer(&[1530], true).is_some() {}
                rig.poll();
                match update % 2 {
                    0 => assert_eq!(Arc::strong_count(&rig.change_memory()), 1, "old memory is kept"),
                    _ => rig.apply(Update::Poll),
                }
                assert_eq!(rig.task.in_flight(), 0);
            }
            let offered = rig.with_device();
            assert_eq!(rig.stop().1, offered, "{kind:?}");
        }
    });
}
