//! Runs cards whose port is an interface with AF_XDP, in network namespaces.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod rig;

use kickless_device::{CaptureTo, Device, DeviceMessage, HandOver, Interest, Next, Operate};
use kickless_net::Net;
use kickless_net::offload::complete_checksum;
use kickless_net_port::{XdpPort, XdpQueue};
use kickless_spec::net::{Header, NetFeatures};
use kickless_testing::{LIMIT, eventually, in_network_namespace, ip, logged, parse_pcapng};
use rig::lost_memory::LosingGuest;
use rig::packets::{explosive, segments, tcp, whole};
use rig::{Kind, Rig, SIZE_MAX, card_on, counter, kinds};
use std::sync::Arc;
use zerocopy::IntoBytes;

const SPLIT: Kind = Kind { packed: false, event_idx: true, in_order: false };
const RECEIVE: u16 = 0;
const TRANSMIT: u16 = 1;
const HEADER: usize = size_of::<Header>();

/// A card at one end of a veth pair, and the host at the other.
struct Network {
    card: Arc<Net>,
    host: XdpQueue,
    host_port: XdpPort,
}

impl Network {
    /// Runs a test in a namespace of its own.
    fn run(test: impl FnOnce(&Self) + Send) {
        in_network_namespace(|| {
            ip("link add card mtu 3400 type veth peer name host mtu 3400");
            for name in ["card", "host"] {
                ip(&format!("link set {name} up"));
            }
            let [card, host] = ["card", "host"].map(|name| XdpPort::open(&name.parse().unwrap(), 1).unwrap());
            let card = card_on(1, card);
            card.open().unwrap();
            let network = Self { card, host: host.queue(0).unwrap(), host_port: host };
            test(&network);
            network.card.close().unwrap();
        });
    }

    fn start(&self, index: u16, kind: Kind) -> Rig {
        Rig::start(&self.card, index, kind, SIZE_MAX, self.card.features())
    }

    fn counter(&self, name: &str) -> u64 {
        counter(&self.card, name)
    }

    fn host_sends(&self, frame: &[u8]) {
        let mut turn = self.host.turn();
        let pushed = turn.push(frame.len(), |space| {
            space[HEADER..].copy_from_slice(frame);
            Ok::<_, ()>(frame.len())
        });
        turn.flush();
        assert_eq!(pushed, Some(Ok(())));
    }

    /// Returns the frames that have come to the host.
    fn host_received(&self) -> Vec<Vec<u8>> {
        let mut turn = self.host.turn();
        std::iter::from_fn(|| turn.receive(|bytes| bytes[HEADER..].to_vec())).collect()
    }

    /// Polls a transmit ring until this number of frames has come to the host.
    fn host_receives(&self, transmit: &mut Rig, count: usize) -> Vec<Vec<u8>> {
        let mut frames = self.host_received();
        eventually("the frames come", || {
            transmit.poll();
            frames.extend(self.host_received());
            frames.len() >= count
        });
        frames
    }
}

fn frame(len: usize, number: u8) -> Vec<u8> {
    (0..len).map(|n| (n as u8).wrapping_mul(3).wrapping_add(number)).collect()
}

fn plain(frame: &[u8]) -> Vec<u8> {
    [Header::default().as_bytes(), frame].concat()
}

/// Polls a receive ring until it delivers a frame.
fn receive(rig: &mut Rig) -> Vec<u8> {
    loop {
        rig.poll();
        if let Some((header, frame)) = rig.receive(HEADER) {
            assert_eq!(Header { num_buffers: 0.into(), ..header }, Header::default());
            return frame;
        }
        assert_eq!((rig.last, rig.interest()), (Next::Quiet, Some(Interest::Readable)));
        rig.wait_readable();
    }
}

#[test]
fn frames_pass_in_both_directions() {
    let dir = tempfile::TempDir::new().unwrap();
    let path = dir.path().join("card.pcapng");
    Network::run(|network| {
        let capture = CaptureTo { path: &path, device: "card", len_max: 14 };
        network.card.set_capture(Some(&capture)).unwrap();
        for kind in kinds() {
            let mut transmit = network.start(TRANSMIT, kind);
            let mut receiving = network.start(RECEIVE, kind);
            for (number, (len, cut)) in (0..).zip([(14, 5), (60, 12), (1514, 100), (3414, 4096)]) {
                transmit.send(&plain(&frame(len, number)), cut).unwrap();
                assert_eq!((transmit.poll(), transmit.take().unwrap().2), (1, 0));
                assert_eq!(network.host_receives(&mut transmit, 1), [frame(len, number)], "{kind:?}");
                while receiving.offer(&[1530], true).is_some() {}
                network.host_sends(&frame(len, number + 100));
                assert!(receive(&mut receiving) == frame(len, number + 100), "{kind:?} {len}");
            }
            // A frame that no interface carries here.
            transmit.send(&plain(&frame(4000, 0)), 4096).unwrap();
            transmit.poll();
            transmit.take().unwrap();
            for rig in [transmit, receiving] {
                let offered = rig.with_device();
                assert_eq!(rig.stop().1, offered);
            }
        }
        network.card.set_capture(None).unwrap();
        assert_eq!(network.counter("sent_refused"), kinds().count() as u64);
        for name in ["sent_invalid", "dropped_long", "dropped_late", "sent_down", "dropped_by_kernel"] {
            assert_eq!(network.counter(name), 0, "{name}");
        }
        let contents = parse_pcapng(&std::fs::read(&path).unwrap());
        let of = |direction| {
            let frames = contents.frames.iter().filter(|frame| frame.direction == direction);
            frames.map(|frame| frame.len).collect::<Vec<_>>()
        };
        assert_eq!(of(1), [14, 60, 1514, 3414].repeat(kinds().count()));
        assert_eq!(of(2), [14, 60, 1514, 3414, 4000].repeat(kinds().count()));
    });
}

#[test]
fn an_interface_gets_no_lost_bytes() {
    for (len, kept) in [(60, 26), (1514, 26), (1514, 0)] {
        Network::run(|network| {
            let mut guest = LosingGuest::start(&network.card);
            let bytes = [Header::default().as_bytes(), &frame(len, 1)].concat();
            guest.send_and_lose(&bytes, kept, &[bytes.len()]);
            guest.check_broken();
            let mut other = network.start(TRANSMIT, SPLIT);
            other.send(&[Header::default().as_bytes(), &frame(61, 2)].concat(), 4096).unwrap();
            let received = network.host_receives(&mut other, 1);
            assert!(received == [frame(61, 2)], "{len} {kept}");
        });
    }
}

#[test]
fn offloads_are_undone() {
    Network::run(|network| {
        let mut transmit = network.start(TRANSMIT, SPLIT);
        for (payload, size) in [(500, 0), (20_000, 1448), (1448, 1448), (40_000, 400)] {
            let (header, mut packet) = tcp(payload, size);
            transmit.send(&[header.as_bytes(), &packet].concat(), 4096).unwrap();
            let expected = if size == 0 {
                let at = kickless_net::Checksum { start: 34, offset: 16 };
                assert!(complete_checksum(&mut packet, at));
                vec![packet]
            } else {
                segments(&header, &packet)
            };
            assert!(network.host_receives(&mut transmit, expected.len()) == expected, "{payload} {size}");
            transmit.take().unwrap();
        }
        // These packets have more segments than the card and the host have memory for. The card waits, and
        // the host does not.
        let (header, packet) = tcp(60_000, 500);
        let mut expected = Vec::new();
        for _ in 0..10 {
            transmit.send(&[header.as_bytes(), &packet].concat(), 20_000).unwrap();
            expected.extend(segments(&header, &packet));
        }
        let mut got = Vec::new();
        eventually("the packets are sent", || {
            transmit.poll();
            got.extend(network.host_received());
            got.len() as u64 + network.host_port.dropped() == expected.len() as u64
        });
        assert!(got.len() >= 1024 && got[..1024] == expected[..1024]);
        while transmit.take().is_some() {}
        assert_eq!((network.counter("sent_frames"), transmit.interest()), (14, Some(Interest::None)));
        // The first four packets become 1, 14, 1 and 100 frames, and the others 120 each.
        assert_eq!(network.counter("sent_segments"), 13 + 99 + 10 * 119);
        // A packet that is not what its header says, and one whose segments are too long for an interface.
        let (header, mut packet) = tcp(2000, 1448);
        packet[23] = 17;
        transmit.send(&[header.as_bytes(), &packet].concat(), 4096).unwrap();
        let (header, packet) = tcp(10_000, 4000);
        transmit.send(&[header.as_bytes(), &packet].concat(), 4096).unwrap();
        assert_eq!((transmit.poll(), network.counter("sent_refused")), (2, 2));
    });
}

/// The interface gets no packet that would become too many frames. The driver pays for each frame of another,
/// also if it waits.
#[test]
fn segments_are_bounded_and_paid() {
    Network::run(|network| {
        let mut transmit = network.start(TRANSMIT, SPLIT);
        for (number, packet) in (1..).zip(explosive()) {
            transmit.send(&packet, 9000).unwrap();
            let polled = transmit.poll_once(10_000);
            assert!(polled.served == 1 && polled.cost <= 20, "{polled:?}");
            assert_eq!(network.counter("sent_refused"), number);
        }
        let packet = tcp(64_000, 500);
        transmit.send(&whole(&packet), 20_000).unwrap();
        let polled = transmit.poll_once(10_000);
        assert_eq!((polled.served, polled.cost), (1, 128));
        let expected = segments(&packet.0, &packet.1);
        assert!(network.host_receives(&mut transmit, expected.len()) == expected);
        assert_eq!((network.counter("sent_frames"), network.counter("sent_segments")), (1, 127));
    });
}

#[test]
fn a_frame_without_chains_waits_in_the_card() {
    Network::run(|network| {
        let mut receiving = network.start(RECEIVE, SPLIT);
        for number in 0..3 {
            network.host_sends(&frame(2000, number));
        }
        receiving.wait_readable();
        receiving.poll();
        assert_eq!((receiving.last, receiving.interest()), (Next::Idle, Some(Interest::None)));
        for number in 0..3 {
            for _ in 0..3 {
                receiving.offer(&[700], true).unwrap();
            }
            assert!(receive(&mut receiving) == frame(2000, number));
        }
        // Frames for an earlier driver are not for the next one.
        network.host_sends(&frame(60, 9));
        receiving.wait_readable();
        receiving.stop();
        let mut receiving = network.start(RECEIVE, SPLIT);
        receiving.offer(&[1530], true).unwrap();
        network.host_sends(&frame(60, 10));
        assert!(receive(&mut receiving) == frame(60, 10));
        // A driver that takes short frames only gets no other.
        let features = rig::without(&network.card, NetFeatures::MRG_RXBUF | NetFeatures::GUEST_OFFLOADS);
        receiving.stop();
        let mut receiving = Rig::start(&network.card, RECEIVE, SPLIT, SIZE_MAX, features);
        for _ in 0..2 {
            receiving.offer(&[1530], true).unwrap();
        }
        network.host_sends(&frame(1519, 1));
        network.host_sends(&frame(60, 2));
        assert!(receive(&mut receiving) == frame(60, 2));
        assert_eq!(network.counter("dropped_long"), 1);
    });
}

#[test]
fn an_interface_that_goes_away_costs_frames_only() {
    Network::run(|network| {
        let mut transmit = network.start(TRANSMIT, SPLIT);
        let mut send = |number| {
            transmit.send(&plain(&frame(60, number)), 100).unwrap();
            transmit.poll();
            transmit.take().unwrap();
            assert_eq!((transmit.last, transmit.interest()), (Next::Idle, Some(Interest::None)));
        };
        ip("link set card down");
        (0..3).for_each(&mut send);
        // The first one finds it out, and stays with the kernel.
        assert_eq!(network.counter("sent_down"), 2);
        ip("link set card up");
        send(3);
        eventually("the frames come", || network.host_received().ends_with(&[frame(60, 3)]));
        ip("link del card");
        (4..7).for_each(&mut send);
        assert_eq!((network.counter("sent_down"), network.counter("dropped_by_kernel")), (4, 0));
        let mut receiving = network.start(RECEIVE, SPLIT);
        receiving.offer(&[1530], true).unwrap();
        receiving.poll();
        assert_eq!(receiving.last, Next::Quiet);
    });
}

/// A socket whose interface is gone has no event.
#[test]
fn a_card_that_only_receives_finds_out_that_its_interface_is_gone() {
    Network::run(|network| {
        let mut receiving = network.start(RECEIVE, SPLIT);
        receiving.poll();
        ip("link set card down");
        assert_eq!((receiving.last, receiving.interest()), (Next::Quiet, Some(Interest::Readable)));
        ip("link del card");
        eventually("it waits for nothing any more", || receiving.interest() == Some(Interest::None));
        receiving.stop();
    });
}

#[test]
fn a_larger_mtu_than_the_port_carries_is_warned_of() {
    Network::run(|network| {
        let mtu = |mtu| logged(|| network.card.message(DeviceMessage::SetMtu(mtu)).unwrap()).1;
        assert_eq!(mtu(3810), "");
        assert!(mtu(3811).contains("a larger MTU than the port carries"));
        assert_eq!(mtu(3811), "");
    });
}

#[test]
fn a_card_on_an_interface_does_not_pass_to_another_process() {
    Network::run(|network| {
        let why = network.card.refuses().unwrap();
        assert!(why.contains("xdp") && why.contains("remove the card"), "{why}");
    });
}

#[test]
fn a_guest_that_has_moved_is_announced() {
    Network::run(|network| {
        network.card.message(DeviceMessage::SendRarp([2, 0, 0, 0, 0, 9])).unwrap();
        let begin = std::time::Instant::now();
        let frame = loop {
            if let Some(frame) = network.host_received().pop() {
                break frame;
            }
            assert!(begin.elapsed() < LIMIT);
        };
        assert_eq!((frame.len(), &frame[6..14]), (60, &[2, 0, 0, 0, 0, 9, 0x80, 0x35][..]));
    });
}
