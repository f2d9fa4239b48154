//! Connects a switch to a TAP in a network namespace, with a second TAP at the same bridge as the peer.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may")]

mod rig;

use kickless_device::{Device, Driver};
use kickless_memory::Iov;
use kickless_net::{Net, Options, PortError};
use kickless_net_port::{Offloads, ReceiveError, Tap, TapError, TapQueue};
use kickless_spec::features::Features;
use kickless_spec::net::{GSO_TCPV4, HDR_F_NEEDS_CSUM, Header, NetFeatures};
use kickless_testing::{eventually, in_network_namespace, ip, tcp_segmentation};
use rig::packets::segments;
use rig::switch::{EVERYBODY, addressed, mac};
use rig::{Kind, Rig, SIZE_MAX, counter, without};
use std::sync::Arc;
use zerocopy::IntoBytes;

const SPLIT: Kind = Kind { packed: false, event_idx: true, in_order: false };
/// The address of the peer.
const PEER: usize = 9;

fn frame(to: [u8; 6], from: usize, len: usize) -> Vec<u8> {
    let mut frame = addressed(to, from);
    frame.extend((14..len).map(|n| n as u8));
    frame
}

fn open(port: &str, number: usize) -> Result<Arc<Net>, PortError> {
    let mac = Some(mac(number));
    let port = rig::try_open(port, 1, mac)?;
    let options = Options {
        mac,
        mtu: None,
        pairs_max: 1,
        queue_size_max: SIZE_MAX,
        offload: true,
        ring_reset: false,
        port,
    };
    let card = Arc::new(Net::new(options));
    card.reset(Driver::Fresh);
    card.open().unwrap();
    Ok(card)
}

/// A TAP at the bridge, without offloads.
struct Peer(TapQueue);

impl Peer {
    fn new() -> Self {
        ip("link add bridge type bridge forward_delay 0 mcast_snooping 0");
        ip("link set dev bridge up");
        let peer = Tap::open("peer", 1).unwrap();
        peer.set(Offloads::empty(), |_| true);
        for name in ["peer", "host"] {
            if name == "host" {
                ip("tuntap add dev host mode tap");
            }
            ip(&format!("link set dev {name} up mtu 65521 master bridge"));
        }
        Self(peer.queue(0).unwrap())
    }

    fn send(&mut self, header: &Header, frame: &[u8]) {
        self.0.send_copy(header, frame).unwrap();
    }

    /// Returns the frames of a card that have come.
    fn take(&mut self, from: usize) -> Vec<Vec<u8>> {
        let (mut frames, mut bytes) = (Vec::new(), vec![0; 70_000]);
        loop {
            match self.0.receive(&mut Header::default(), &mut Iov::default(), &mut bytes) {
                Ok(len) if bytes[6..12] == mac(from) => frames.push(bytes[..len].to_vec()),
                Ok(_) => {}
                Err(ReceiveError::Empty) => return frames,
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Returns the next frames of a card, at least this number.
    fn receive(&mut self, from: usize, count: usize) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        eventually("the frames of a card arrive", || {
            frames.extend(self.take(from));
            frames.len() >= count
        });
        frames
    }

    /// Waits until the bridge forwards frames, which it does some time after the TAPs are up.
    fn wait_for_bridge(&mut self, pair: &mut Pair, number: usize) {
        eventually("a frame passes the bridge", || {
            pair.send(&Header::default(), &frame(EVERYBODY, number, 30));
            self.send(&Header::default(), &frame(EVERYBODY, PEER, 30));
            !self.take(number).is_empty() && !pair.take().is_empty()
        });
        // Earlier frames arrive before these.
        pair.send(&Header::default(), &frame(EVERYBODY, number, 31));
        while self.receive(number, 1).last().unwrap().len() != 31 {}
        self.send(&Header::default(), &frame(EVERYBODY, PEER, 31));
        while pair.receive(1).last().unwrap().1.len() != 31 {}
    }
}

struct Pair {
    card: Arc<Net>,
    receive: Rig,
    transmit: Rig,
}

impl Pair {
    fn new(card: Arc<Net>, features: Features) -> Self {
        let [receive, transmit] = [0, 1].map(|index| Rig::start(&card, index, SPLIT, SIZE_MAX, features));
        Self { card, receive, transmit }
    }

    fn send(&mut self, header: &Header, frame: &[u8]) {
        self.transmit.send(&[header.as_bytes(), frame].concat(), 4096).unwrap();
        self.transmit.poll();
        self.transmit.take().unwrap();
    }

    /// Returns the frames of the peer that have come.
    fn take(&mut self) -> Vec<(Header, Vec<u8>)> {
        while self.receive.offer(&[1530], true).is_some() {}
        self.receive.poll();
        let taken = std::iter::from_fn(|| self.receive.receive(12));
        taken.filter(|(_, frame)| frame[6..12] == mac(PEER)).collect()
    }

    /// Returns the next frames of the peer, at least this number.
    fn receive(&mut self, count: usize) -> Vec<(Header, Vec<u8>)> {
        let mut frames = Vec::new();
        eventually("the frames of the peer arrive", || {
            frames.extend(self.take());
            frames.len() >= count
        });
        frames
    }
}

/// Returns a TCP packet that is not segmented, and its header.
fn tcp(to: usize, from: usize, len: u16) -> (Header, Vec<u8>) {
    let mut frame = [&mac(to)[..], &mac(from), &[8, 0]].concat();
    frame.extend([0x45, 0]);
    frame.extend((len - 14).to_be_bytes());
    frame.extend([0, 0, 0, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    let sum: u32 = frame[14..].chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
    let checksum = !((sum & 0xffff) + (sum >> 16)) as u16;
    frame[24..26].copy_from_slice(&checksum.to_be_bytes());
    frame.extend([0, 80, 1, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x18, 1, 0, 0, 0, 0, 0]);
    frame.extend((frame.len()..len.into()).map(|n| n as u8));
    (tcp_segmentation(), frame)
}

#[test]
fn frames_pass_between_guests_and_the_host() {
    in_network_namespace(|| {
        let mut peer = Peer::new();
        let first = open("switch:lan,uplink=host", 1).unwrap();
        let features = first.features();
        let mut first = Pair::new(first, features);
        let second = open("switch:lan,uplink=host", 2).unwrap();
        let mut second = Pair::new(second, features);
        peer.wait_for_bridge(&mut first, 1);
        // Both directions, to one card.
        for len in [14, 60, 1514, 9000, 65_535] {
            first.send(&Header::default(), &frame(mac(PEER), 1, len));
            assert!(peer.receive(1, 1) == [frame(mac(PEER), 1, len)], "{len}");
            peer.send(&Header::default(), &frame(mac(1), PEER, len));
            let frames = first.receive(1);
            assert!(frames.len() == 1 && frames[0].1 == frame(mac(1), PEER, len), "{len}");
        }
        // To all: each guest gets it once, and the host not again.
        peer.send(&Header::default(), &frame(EVERYBODY, PEER, 61));
        for pair in [&mut first, &mut second] {
            let frames = pair.receive(1);
            assert_eq!(frames.last().unwrap().1, frame(EVERYBODY, PEER, 61));
        }
        // Only the first knows where the second is, and its frames do not leave the switch.
        second.send(&Header::default(), &frame(mac(1), 2, 60));
        // A packet is segmented by the kernel for the peer, and by the card for a guest that takes none.
        let (header, packet) = tcp(PEER, 1, 20_000);
        first.send(&header, &packet);
        let expected = segments(&header, &packet);
        assert!(peer.receive(1, expected.len()) == expected);
        let (header, packet) = tcp(1, PEER, 20_000);
        peer.send(&header, &packet);
        let (got, whole) = first.receive(1).swap_remove(0);
        assert!(whole == packet && got.gso_type == GSO_TCPV4);
        let card = first.card.clone();
        drop(first);
        let features = without(&card, NetFeatures::GUEST_TSO4);
        let mut first = Pair::new(card, features);
        peer.send(&header, &packet);
        let got: Vec<_> = first.receive(expected.len()).into_iter().map(|(_, frame)| frame).collect();
        assert!(got == segments(&header, &packet));
        // The host cannot send from the address of a card, and a card not from one of the host.
        peer.send(&Header::default(), &frame(mac(1), 2, 62));
        eventually("the forged frame is dropped", || counter(&first.card, "uplink_dropped") == 1);
        // The kernel completes no checksum where a card has judged.
        let checksum = |start: u16, offset: u16| Header {
            flags: HDR_F_NEEDS_CSUM,
            csum_start: start.into(),
            csum_offset: offset.into(),
            ..Header::default()
        };
        let arp = [&EVERYBODY[..], &mac(1), &[8, 6, 0, 1, 8, 0, 6, 4, 0, 2], &mac(1), &[0; 20]].concat();
        first.send(&checksum(14, 12), &arp);
        eventually("the packet is dropped", || counter(&first.card, "uplink_dropped") == 2);
        first.send(&Header::default(), &arp);
        assert!(peer.receive(1, 1) == [arp]);
        // The last card that names the uplink ends it.
        first.card.close().unwrap();
        second.send(&Header::default(), &frame(mac(PEER), 2, 63));
        assert!(peer.receive(2, 1) == [frame(mac(PEER), 2, 63)]);
        let sent = counter(&second.card, "uplink_sent_frames");
        second.card.close().unwrap();
        second.send(&Header::default(), &frame(mac(PEER), 2, 64));
        // It starts again, without the frames from before.
        peer.send(&Header::default(), &frame(mac(2), PEER, 65));
        second.card.open().unwrap();
        second.send(&Header::default(), &frame(mac(PEER), 2, 66));
        assert!(peer.receive(2, 1) == [frame(mac(PEER), 2, 66)]);
        peer.send(&Header::default(), &frame(mac(2), PEER, 67));
        assert_eq!(second.receive(1).last().unwrap().1, frame(mac(2), PEER, 67));
        assert_eq!(counter(&second.card, "uplink_sent_frames"), sent + 1);
    });
}

#[test]
fn a_tap_is_the_uplink_of_one_switch() {
    in_network_namespace(|| {
        ip("tuntap add dev other mode tap");
        let card = open("switch:one,uplink=other", 1).unwrap();
        let other = open("switch:other,uplink=other", 2);
        let error = other.unwrap_err().downcast::<TapError>().unwrap();
        assert!(matches!(*error, TapError::OtherSwitch { .. }));
        drop(card);
        // A child of another test may have a copy of the TAP's descriptor for a moment.
        let mut opened = None;
        eventually("the TAP is free", || {
            opened = open("switch:other,uplink=other", 2).ok();
            opened.is_some()
        });
        let card = opened.unwrap();
        // The TAP is down, and then deleted. The cards go on.
        let features = card.features();
        let mut pair = Pair::new(card, features);
        pair.send(&Header::default(), &frame(EVERYBODY, 2, 60));
        eventually("the frame is dropped", || counter(&pair.card, "uplink_dropped") == 1);
        ip("link del other");
        pair.send(&Header::default(), &frame(EVERYBODY, 2, 60));
        let third = open("switch:other", 3).unwrap();
        let mut third = Pair::new(third, features);
        third.receive.offer(&[1530], true);
        pair.send(&Header::default(), &frame(mac(3), 2, 61));
        third.receive.poll();
        assert!(third.receive.receive(12).is_some());
    });
}
