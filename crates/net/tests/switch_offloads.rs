//! Frames with offloads between cards of a switch. The driver gets the same headers and bytes, whether a
//! frame comes directly, in a batch or alone.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod rig;

use kickless_device::Operate;
use kickless_spec::net::{
    GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP, GSO_UDP_L4, HDR_F_NEEDS_CSUM, Header, NetFeatures,
};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use rig::Kind;
use rig::pair::{HEADER, Pair};
use rig::switch::ethernet;
use std::sync::atomic::{AtomicU64, Ordering};
use zerocopy::IntoBytes;

/// The number of batches after a refusal that are not offered, and one more.
const PAUSE: usize = 8;
/// The features of a driver that sends frames with offloads.
const HOST_OFFLOADS: NetFeatures = NetFeatures::CSUM
    .union(NetFeatures::HOST_TSO4)
    .union(NetFeatures::HOST_TSO6)
    .union(NetFeatures::HOST_ECN)
    .union(NetFeatures::HOST_USO);

/// The way of a frame to its receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Direct,
    Batch,
    /// The receiver filters, so each frame is delivered alone.
    Alone,
}

/// A packet of IP, or something else.
#[derive(Clone, Copy, Debug)]
enum Packet {
    Ip { version: u8, is_udp: bool },
    Other,
}

#[derive(Clone, Debug)]
struct Sent {
    header: Header,
    tags: usize,
    packet: Packet,
    len: usize,
    /// The buffers of the chain have this length.
    cut: usize,
}

impl Sent {
    fn bytes(&self, number: usize) -> Vec<u8> {
        let mut bytes = ethernet(1, 0);
        bytes[..HEADER].copy_from_slice(self.header.as_bytes());
        bytes.truncate(bytes.len() - 2);
        bytes.extend([0x81, 0, 0, 5].repeat(self.tags));
        match self.packet {
            Packet::Other => bytes.extend([0x88, 0xb5]),
            Packet::Ip { version, is_udp } => {
                let protocol = if is_udp { 17 } else { 6 };
                match version {
                    4 => {
                        bytes.extend([8, 0, 0x45, 0, 0, 0, 0, number as u8, 0x40, 0, 64, protocol, 0, 0]);
                        bytes.extend([10, 0, 0, 1, 10, 0, 0, 2]);
                    }
                    _ => {
                        bytes.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 0, protocol, 64]);
                        bytes.extend([0xfd; 32]);
                    }
                }
                // The ports, a sequence number, and the length of a header of TCP.
                bytes.extend([0, 1, 0, 2, 0, 0, 0, 5, 0, 0, 0, 0, 0x50, 0x18, 1, 0]);
            }
        }
        bytes.extend((0..self.len).map(|n| (n * 7 + number) as u8));
        bytes
    }
}

/// Returns a header. Most have values that drivers use.
fn header() -> impl Strategy<Value = Header> {
    let flags = prop_oneof![2 => Just(0), 6 => Just(HDR_F_NEEDS_CSUM), 1 => any::<u8>()];
    let kinds = vec![GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, GSO_TCPV4 | GSO_ECN, GSO_TCPV6 | GSO_ECN, GSO_UDP];
    let gso_type = prop_oneof![8 => Just(GSO_NONE), 4 => prop::sample::select(kinds), 1 => any::<u8>()];
    let size = prop_oneof![1 => Just(0), 8 => 100..2000u16];
    let start = prop_oneof![6 => prop::sample::select(vec![34, 38, 54, 58]), 1 => any::<u16>()];
    let offset = prop_oneof![6 => prop::sample::select(vec![6, 16]), 1 => any::<u16>()];
    let fields = (flags, gso_type, prop_oneof![Just(54), 0..100u16], size, start, offset, 0..3u16);
    fields.prop_map(|(flags, gso_type, hdr_len, gso_size, csum_start, csum_offset, num_buffers)| {
        let [hdr_len, gso_size, csum_start, csum_offset, num_buffers] =
            [hdr_len, gso_size, csum_start, csum_offset, num_buffers].map(Into::into);
        Header { flags, gso_type, hdr_len, gso_size, csum_start, csum_offset, num_buffers }
    })
}

/// Returns a segment of TCP as Linux sends it.
fn usual() -> impl Strategy<Value = Sent> {
    let (flags, start, offset) = (HDR_F_NEEDS_CSUM, 34.into(), 16.into());
    let header = Header { flags, csum_start: start, csum_offset: offset, ..Header::default() };
    let packet = Packet::Ip { version: 4, is_udp: false };
    (480..1400usize).prop_map(move |len| Sent { header, tags: 0, packet, len, cut: 20_000 })
}

fn sent() -> impl Strategy<Value = Sent> {
    let ip = (prop::sample::select(vec![4, 6]), any::<bool>());
    let packet = prop_oneof![
        6 => ip.prop_map(|(version, is_udp)| Packet::Ip { version, is_udp }),
        1 => Just(Packet::Other),
    ];
    let len = prop_oneof![1 => 0..100usize, 6 => 480..1400usize, 1 => 2500..9000usize];
    let tags = prop_oneof![6 => Just(0), 1 => 1..3usize];
    let cut = prop_oneof![9 => Just(20_000), 1 => 2000..5000usize];
    let any = (header(), tags, packet, len, cut).prop_map(|(header, tags, packet, len, cut)| Sent {
        header,
        tags,
        packet,
        len,
        cut,
    });
    prop_oneof![usual(), any]
}

/// Frames that are sent together.
#[derive(Clone, Debug)]
struct Burst {
    /// The receiver switches its offloads to these before.
    offloads: Option<NetFeatures>,
    /// The lengths of the receiver's buffers, in turn.
    buffers: Vec<u32>,
    frames: Vec<Sent>,
}

fn some_of(features: NetFeatures) -> impl Strategy<Value = NetFeatures> {
    // Most drivers lack none or few.
    (any::<u64>(), any::<u64>(), any::<u64>())
        .prop_map(move |(one, two, three)| features & NetFeatures::from_bits_truncate(one & two & three))
}

fn burst() -> impl Strategy<Value = Burst> {
    let buffers = prop::sample::select(vec![1526u32, 2048, 4096, 65_562, 300]);
    let missing = prop::option::weighted(0.2, some_of(NetFeatures::GUEST_OFFLOADS));
    (missing, prop::collection::vec(buffers, 1..3), prop::collection::vec(sent(), 1..16)).prop_map(
        |(missing, buffers, frames)| {
            let offloads = missing.map(|missing| NetFeatures::GUEST_OFFLOADS - missing);
            Burst { offloads, buffers, frames }
        },
    )
}

/// Two cards of a switch, of which the first one sends to the second one.
struct Two {
    pair: Pair,
    /// The frames of bursts that went directly.
    direct: u64,
}

impl Two {
    fn new(kind: Kind, missing: [NetFeatures; 2], way: Way) -> Self {
        // A filter takes all VLANs then.
        let mut pair = Pair::new(kind, missing.map(|missing| missing | NetFeatures::CTRL_VLAN));
        // The command switches the promiscuous mode.
        pair.command(&[0, 0, u8::from(way != Way::Alone)]);
        Self { pair, direct: 0 }
    }

    /// Has a burst carried. Returns the received frames.
    fn carry(&mut self, burst: &Burst, number: usize, way: Way) -> Vec<(Header, Vec<u8>)> {
        if let Some(offloads) = burst.offloads {
            self.pair.set_offloads(offloads);
        }
        let mut frames = Vec::new();
        // After a refusal, the sender offers nothing for some batches.
        for _ in 0..PAUSE {
            self.pair.transmit.send(&[&ethernet(1, 0)[..], &[0; 600]].concat(), 4096).unwrap();
            frames.extend(self.carry_all(&[2048], way));
        }
        for (at, sent) in burst.frames.iter().enumerate() {
            self.pair.transmit.send(&sent.bytes(number + at), sent.cut).unwrap();
        }
        let before = self.pair.sent_directly();
        frames.extend(self.carry_all(&burst.buffers, way));
        self.direct += self.pair.sent_directly() - before;
        frames
    }

    /// Polls the rings until all frames have arrived, in buffers with these lengths in turn.
    fn carry_all(&mut self, buffers: &[u32], way: Way) -> Vec<(Header, Vec<u8>)> {
        let mut frames = Vec::new();
        let mut polls = 0;
        while polls < 3 {
            let mut lens = buffers.iter().cycle();
            while self.pair.receive.offer(&[*lens.next().unwrap()], true).is_some() {}
            let before = frames.len();
            if way == Way::Direct {
                self.pair.poll_beside(1000);
            } else {
                self.pair.transmit.poll_once(1000);
            }
            while self.pair.transmit.take().is_some() {}
            self.pair.receive.poll_once(1000);
            frames.extend(std::iter::from_fn(|| self.pair.receive.receive(HEADER)));
            polls = if frames.len() > before { 0 } else { polls + 1 };
        }
        assert_eq!(self.pair.transmit.with_device(), 0);
        frames
    }
}

/// Everything that the ways must have in common.
type Seen = (Vec<(Header, Vec<u8>)>, [Vec<(&'static str, u64)>; 2]);

/// Carries bursts between cards whose drivers lack these features. Returns also the number of frames that
/// went directly.
fn carry(kind: Kind, missing: [NetFeatures; 2], bursts: &[Burst], way: Way) -> (Seen, u64) {
    let mut two = Two::new(kind, missing, way);
    let frames =
        bursts.iter().enumerate().flat_map(|(number, burst)| two.carry(burst, number, way)).collect();
    let counters = two
        .pair
        .cards
        .each_ref()
        .map(|card| card.counters().into_iter().filter(|(name, _)| *name != "sent_directly").collect());
    ((frames, counters), two.direct)
}

#[test]
fn the_way_of_a_frame_does_not_change_it() {
    let missing = (some_of(HOST_OFFLOADS), some_of(NetFeatures::GUEST_OFFLOADS | NetFeatures::MRG_RXBUF));
    let cases = (0..8u8, missing, prop::collection::vec(burst(), 1..8));
    let (direct, accepted) = (AtomicU64::new(0), AtomicU64::new(0));
    let result = TestRunner::new(ProptestConfig::with_cases(150)).run(&cases, |(bits, missing, bursts)| {
        let is = |bit: u8| bits & 1 << bit != 0;
        let kind = Kind { packed: is(0), event_idx: is(1), in_order: is(2) };
        let [one, others @ ..] =
            [Way::Alone, Way::Batch, Way::Direct].map(|way| (way, carry(kind, missing.into(), &bursts, way)));
        let (_, (seen, _)) = one;
        for (way, (other, frames)) in others {
            prop_assert!(way == Way::Direct || frames == 0);
            prop_assert_eq!(&seen.1, &other.1, "{:?}", way);
            for (number, (one, other)) in seen.0.iter().zip(&other.0).enumerate() {
                prop_assert_eq!(one.0, other.0, "frame {}, {:?}", number, way);
                prop_assert!(one.1 == other.1, "frame {}, {:?}", number, way);
            }
            prop_assert_eq!(seen.0.len(), other.0.len());
            direct.fetch_add(frames, Ordering::Relaxed);
        }
        let with_offloads = seen.0.iter().filter(|(header, _)| header.flags & HDR_F_NEEDS_CSUM != 0);
        accepted.fetch_add(with_offloads.count() as u64, Ordering::Relaxed);
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
    let [direct, accepted] = [direct, accepted].map(AtomicU64::into_inner);
    assert!(direct > 300 && accepted > 300, "{direct} frames went directly, {accepted} had offloads");
}
