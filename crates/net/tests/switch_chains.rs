//! Frames in chains of several buffers between cards of a switch. The driver gets the same headers and bytes,
//! whether a frame comes directly or in a batch.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod rig;

use kickless_device::{Operate, Update};
use kickless_memory::{Gpa, Log, Map, View};
use kickless_spec::net::{
    GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, HDR_F_NEEDS_CSUM, Header, NetFeatures,
};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use rig::pair::{HEADER, Pair, plain};
use rig::{Kind, MEMORY};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use zerocopy::IntoBytes;

/// The features of a driver that sends frames with offloads.
const HOST_OFFLOADS: NetFeatures = NetFeatures::CSUM
    .union(NetFeatures::HOST_TSO4)
    .union(NetFeatures::HOST_TSO6)
    .union(NetFeatures::HOST_ECN)
    .union(NetFeatures::HOST_USO);

/// A frame that a driver sends.
#[derive(Clone, Debug)]
struct Sent {
    header: Header,
    is_ipv6: bool,
    is_udp: bool,
    len: usize,
    /// The lengths of the buffers before the last one.
    pieces: Vec<usize>,
    is_indirect: bool,
}

impl Sent {
    fn bytes(&self, number: usize) -> Vec<u8> {
        let mut bytes = plain(self.len, number);
        bytes[..HEADER].copy_from_slice(self.header.as_bytes());
        let protocol = if self.is_udp { 17 } else { 6 };
        let (ip, tcp) = match self.is_ipv6 {
            false => (&[8, 0, 0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, protocol][..], HEADER + 34),
            true => (&[0x86, 0xdd, 0x60, 0, 0, 0, 0, 0, protocol, 64][..], HEADER + 54),
        };
        bytes[HEADER + 12..][..ip.len()].copy_from_slice(ip);
        bytes[tcp + 12..tcp + 14].copy_from_slice(&[0x50, 0x18]);
        bytes
    }
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

fn header() -> impl Strategy<Value = Header> {
    let tcp = vec![GSO_NONE, GSO_TCPV4, GSO_TCPV4, GSO_TCPV4, GSO_TCPV6, GSO_TCPV6 | GSO_ECN, GSO_UDP_L4];
    let start = prop_oneof![9 => prop::sample::select(vec![34, 54]), 1 => any::<u16>()];
    let fields = (prop::sample::select(tcp), start, 0..3u16, prop::bool::weighted(0.9));
    fields.prop_map(|(gso_type, start, num_buffers, has_offload)| {
        let header = Header { num_buffers: num_buffers.into(), ..Header::default() };
        let gso_size = if gso_type == GSO_NONE { 0 } else { 1448 };
        if !has_offload {
            return header;
        }
        Header {
            flags: HDR_F_NEEDS_CSUM,
            gso_type,
            gso_size: gso_size.into(),
            hdr_len: start.wrapping_add(20).into(),
            csum_start: start.into(),
            csum_offset: if gso_type == GSO_UDP_L4 { 6 } else { 16 }.into(),
            ..header
        }
    })
}

/// Returns the lengths of the buffers of a frame, as drivers cut it, or of any lengths.
fn pieces(len: usize) -> impl Strategy<Value = Vec<usize>> {
    let some =
        |piece: std::ops::Range<usize>, count: std::ops::Range<usize>| prop::collection::vec(piece, count);
    prop_oneof![
        // All of it, or the header alone.
        1 => Just(Vec::new()),
        2 => Just(vec![HEADER]),
        3 => Just(vec![2048; len / 2048]),
        2 => Just(vec![HEADER + 54, 4096, 32_768]),
        2 => some(1..5000, 1..17),
        1 => some(1..2, 1..20),
        1 => some(100..130, 1..3),
    ]
}

fn sent() -> impl Strategy<Value = Sent> {
    let len = prop_oneof![1 => 80..2000usize, 2 => 4000..4200usize, 4 => 4096..20_000usize, 2 => 20_000..65_500usize];
    let rest = (header(), any::<bool>(), prop::bool::weighted(0.2), any::<bool>());
    (len.prop_flat_map(|len| (Just(len), pieces(len))), rest).prop_map(
        |((len, pieces), (header, is_ipv6, is_udp, is_indirect))| {
            // Most packets are what their header says.
            let is_ipv6 = if header.gso_type == GSO_TCPV4 { false } else { is_ipv6 };
            let is_udp = header.gso_type == GSO_UDP_L4 || is_udp && header.gso_type == GSO_NONE;
            // The ring has room for all frames of a burst.
            let is_indirect = is_indirect || pieces.len() > 8;
            Sent { header, is_ipv6, is_udp, len, pieces, is_indirect }
        },
    )
}

fn some_of(features: NetFeatures) -> impl Strategy<Value = NetFeatures> {
    // Most drivers lack none or few.
    (any::<u64>(), any::<u64>(), any::<u64>(), any::<u64>()).prop_map(move |(one, two, three, four)| {
        features & NetFeatures::from_bits_truncate(one & two & three & four)
    })
}

fn burst() -> impl Strategy<Value = Burst> {
    let buffers = prop::sample::select(vec![1526u32, 2048, 2048, 4096, 65_562, 300]);
    let missing = prop::option::weighted(0.1, some_of(NetFeatures::GUEST_OFFLOADS));
    let frames = prop::collection::vec(sent(), 1..6);
    (missing, prop::collection::vec(buffers, 1..3), frames).prop_map(|(missing, buffers, frames)| {
        let offloads = missing.map(|missing| NetFeatures::GUEST_OFFLOADS - missing);
        Burst { offloads, buffers, frames }
    })
}

/// Everything that the ways must have in common.
#[derive(PartialEq)]
struct Seen {
    frames: Vec<(Header, Vec<u8>)>,
    counters: [Vec<(&'static str, u64)>; 2],
    /// The pages of the receiver that are marked in the log.
    dirty: Vec<u64>,
}

/// Carries bursts, directly where that is possible, or in batches only. Returns also the number of frames in
/// several buffers that went directly.
fn carry(kind: Kind, missing: [NetFeatures; 2], bursts: &[Burst], is_direct: bool) -> (Seen, u64) {
    let mut pair = Pair::new(kind, missing);
    let len = (MEMORY / 4096).div_ceil(8).next_multiple_of(4096);
    let log = Arc::new(Log::map(kickless_testing::memfd(len), 0, len).unwrap());
    let map = Map::new(pair.receive.view.map().slots().to_vec()).unwrap();
    let view = Arc::new(View::new(map).with_log(Some(log.clone())).unwrap());
    pair.receive.apply(Update::Memory(view.clone()));
    pair.receive.view = view;
    let (mut frames, mut chains) = (Vec::new(), 0);
    for (number, burst) in bursts.iter().enumerate() {
        if let Some(offloads) = burst.offloads {
            pair.set_offloads(offloads);
        }
        for (at, sent) in burst.frames.iter().enumerate() {
            let bytes = sent.bytes(number + at);
            pair.transmit.send_pieces(&bytes, &sent.pieces, sent.is_indirect).unwrap();
        }
        let has_single = burst.frames.iter().any(|sent| sent.pieces.is_empty());
        let mut idle = 0;
        while idle < 3 {
            pair.refill(&burst.buffers);
            let before = frames.len();
            if is_direct {
                let direct = pair.poll_beside(1000);
                chains += if has_single { 0 } else { direct };
            } else {
                pair.transmit.poll_once(1000);
                while pair.transmit.take().is_some() {}
            }
            frames.extend(pair.receive());
            idle = if frames.len() > before || pair.transmit.with_device() > 0 { 0 } else { idle + 1 };
        }
    }
    let counters = pair
        .cards
        .each_ref()
        .map(|card| card.counters().into_iter().filter(|(name, _)| *name != "sent_directly").collect());
    let dirty = (0..MEMORY / 4096).filter(|page| log.is_marked(Gpa(page * 4096))).collect();
    (Seen { frames, counters, dirty }, chains)
}

#[test]
fn a_frame_in_several_buffers_arrives_alike_directly_and_in_a_batch() {
    let missing = (some_of(HOST_OFFLOADS), some_of(NetFeatures::GUEST_OFFLOADS | NetFeatures::MRG_RXBUF));
    let cases = (0..8u8, missing, prop::collection::vec(burst(), 1..8));
    let direct = AtomicU64::new(0);
    let result = TestRunner::new(ProptestConfig::with_cases(120)).run(&cases, |(bits, missing, bursts)| {
        let is = |bit: u8| bits & 1 << bit != 0;
        let kind = Kind { packed: is(0), event_idx: is(1), in_order: is(2) };
        let (one, chains) = carry(kind, missing.into(), &bursts, true);
        let (other, _) = carry(kind, missing.into(), &bursts, false);
        prop_assert_eq!(&one.counters, &other.counters);
        for (number, (one, other)) in one.frames.iter().zip(&other.frames).enumerate() {
            prop_assert_eq!(one.0, other.0, "frame {}", number);
            prop_assert!(one.1 == other.1, "frame {number}");
        }
        prop_assert_eq!(one.frames.len(), other.frames.len());
        prop_assert!(one.dirty == other.dirty);
        direct.fetch_add(chains, Ordering::Relaxed);
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
    let direct = direct.into_inner();
    assert!(direct > 150, "only {direct} frames in several buffers went directly");
}
