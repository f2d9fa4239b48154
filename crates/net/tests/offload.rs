//! Compares checksums and segments of the card with those of the kernel, and verdicts on headers.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test may")]

use kickless_memory::Iov;
use kickless_net::offload::{SEGMENTS_MAX, Segments, complete_checksum};
use kickless_net::{Frame, InvalidFrame};
use kickless_net_port::{Offloads, ReceiveError, SendError, Tap, TapQueue};
use kickless_spec::net::{
    GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP, GSO_UDP_L4, HDR_F_NEEDS_CSUM, Header, NetFeatures,
};
use kickless_testing::{LIMIT, Random, in_network_namespace, ip};
use proptest::prelude::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Two TAPs at a bridge. The second one takes no offloads, so the kernel undoes them.
struct Kernel {
    from: TapQueue,
    to: TapQueue,
}

impl Kernel {
    fn new() -> Self {
        let [from, to] = ["a", "b"].map(|name| Tap::open(name, 1).unwrap());
        ip("link add bridge type bridge forward_delay 0 mcast_snooping 0");
        ip("link set dev bridge up");
        for name in ["a", "b"] {
            ip(&format!("link set dev {name} up mtu 65521 master bridge"));
        }
        for tap in [&from, &to] {
            tap.set(Offloads::empty(), |_| true);
        }
        Self { from: from.queue(0).unwrap(), to: to.queue(0).unwrap() }
    }

    /// Returns the frames that arrive for a sent one, up to one of `last` bytes with this mark.
    fn pass(&mut self, header: &Header, frame: &[u8]) -> Vec<Vec<u8>> {
        /// This frame ends the wait, because frames stay in order.
        const END: [u8; 14] = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 9, 9, 9, 9, 9, 0x88, 0xb5];
        self.from.send_copy(header, frame).unwrap();
        self.from.send_copy(&Header::default(), &END).unwrap();
        let mut frames = Vec::new();
        loop {
            let (mut header, mut bytes) = (Header::default(), vec![0; 70_000]);
            match self.to.receive(&mut header, &mut Iov::default(), &mut bytes) {
                Ok(len) if bytes[..14] == END && len < 64 => return frames,
                Ok(len) if bytes[6..12] == SOURCE => {
                    assert_eq!((header.flags & HDR_F_NEEDS_CSUM, header.gso_type), (0, GSO_NONE));
                    bytes.truncate(len);
                    frames.push(bytes);
                }
                Ok(_) => {}
                Err(ReceiveError::Empty) => {
                    let timeout = Timespec { tv_sec: LIMIT.as_secs().cast_signed(), tv_nsec: 0 };
                    assert_eq!(poll(&mut [PollFd::new(&self.to, PollFlags::IN)], Some(&timeout)), Ok(1));
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
}

const SOURCE: [u8; 6] = [2, 0, 0, 0, 0, 1];

/// The shape of a packet.
#[derive(Clone, Debug)]
struct Shape {
    vlan: bool,
    ipv6: bool,
    udp: bool,
    /// Options of IPv4 in words, or an extension header of IPv6.
    options: usize,
    tcp_options: usize,
    tcp_flags: u8,
    payload: usize,
    gso_size: u16,
    seed: u64,
}

fn shape() -> impl Strategy<Value = Shape> {
    let flags = (any::<bool>(), any::<bool>(), any::<bool>());
    let lens = (0..3usize, 0..5usize, 1..20_000usize, 8..4000u16);
    (flags, lens, any::<u8>(), any::<u64>()).prop_map(|((vlan, ipv6, udp), lens, tcp_flags, seed)| {
        let (options, tcp_options, payload, gso_size) = lens;
        let payload = payload.min(usize::from(gso_size) * SEGMENTS_MAX);
        // RST and SYN have no place in a segmented packet.
        let tcp_flags = tcp_flags & !0x06;
        Shape { vlan, ipv6, udp, options, tcp_options, tcp_flags, payload, gso_size, seed }
    })
}

/// Adds in ones' complement, apart from `kickless_spec::checksum`, which is tested here.
fn sum(bytes: &[u8]) -> u16 {
    bytes.chunks(2).fold(0u16, |sum, pair| {
        let pair = u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]);
        let (sum, carry) = sum.overflowing_add(pair);
        sum + u16::from(carry)
    })
}

impl Shape {
    /// Returns the packet and its header, which asks for segments if `segments`, and else for a checksum.
    fn packet(&self, segments: bool) -> (Header, Vec<u8>) {
        let mut random = Random(self.seed | 1);
        let mut bytes = |len: usize| -> Vec<u8> { (0..len).map(|_| random.next() as u8).collect() };
        let mut frame = [&[2, 0, 0, 0, 0, 2][..], &SOURCE].concat();
        if self.vlan {
            frame.extend([0x81, 0, 0, 5]);
        }
        let payload = bytes(self.payload);
        let transport_len = if self.udp { 8 } else { 20 + 4 * self.tcp_options };
        let len = transport_len + self.payload;
        let protocol = if self.udp { 17 } else { 6 };
        let ip = frame.len() + 2;
        let addresses;
        if self.ipv6 {
            let extension = 8 * self.options;
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
            frame.extend(((len + extension) as u16).to_be_bytes());
            let first = if extension > 0 { 60 } else { protocol };
            frame.extend([first, 64]);
            addresses = bytes(32);
            frame.extend(&addresses);
            if extension > 0 {
                // Destination options: padding only.
                frame.extend([protocol, self.options as u8 - 1, 1, extension as u8 - 4]);
                frame.resize(frame.len() + extension - 4, 0);
            }
        } else {
            frame.extend([8, 0, 0x45 + self.options as u8, 0]);
            frame.extend(((20 + 4 * self.options + len) as u16).to_be_bytes());
            frame.extend([bytes(2)[0], 7, 0x40, 0, 64, protocol, 0, 0]);
            addresses = bytes(8);
            frame.extend(&addresses);
            // Options: no operation.
            frame.resize(frame.len() + 4 * self.options, 1);
            let checksum = !sum(&frame[ip..]);
            frame[ip + 10..ip + 12].copy_from_slice(&checksum.to_be_bytes());
        }
        let start = frame.len();
        let pseudo = [&addresses[..], &(len as u32).to_be_bytes(), &[0, protocol]].concat();
        let partial = sum(&pseudo).to_be_bytes();
        let offset = if self.udp {
            frame.extend(bytes(4));
            frame.extend((len as u16).to_be_bytes());
            frame.extend(partial);
            6
        } else {
            frame.extend(bytes(12));
            frame.extend([(transport_len as u8 / 4) << 4, self.tcp_flags, 1, 0]);
            frame.extend(partial);
            frame.extend([0, 0]);
            frame.resize(start + transport_len, 1);
            16
        };
        frame.extend(payload);
        let kind = match (self.udp, self.ipv6) {
            (true, _) => GSO_UDP_L4,
            (false, false) => GSO_TCPV4,
            (false, true) => GSO_TCPV6,
        };
        let ecn = if !self.udp && self.tcp_flags & 0x80 != 0 { GSO_ECN } else { 0 };
        let header = Header {
            flags: HDR_F_NEEDS_CSUM,
            gso_type: if segments { kind | ecn } else { GSO_NONE },
            hdr_len: if segments { (start + transport_len) as u16 } else { 0 }.into(),
            gso_size: if segments { self.gso_size } else { 0 }.into(),
            csum_start: (start as u16).into(),
            csum_offset: offset.into(),
            ..Header::default()
        };
        (header, frame)
    }
}

fn segments_of(header: &Header, frame: &[u8]) -> Vec<Vec<u8>> {
    let Some(mut segments) = Segments::of(header, frame) else { return Vec::new() };
    let mut space = vec![0; segments.len_max(frame)];
    let count = segments.count(frame);
    let mut all = Vec::new();
    while let Some(len) = segments.write_next(frame, &mut space) {
        all.push(space[..len].to_vec());
        assert_eq!(segments.count(frame), count - all.len());
    }
    all
}

/// The kernel's segments and checksums are the card's, byte for byte.
#[test]
fn the_card_segments_as_the_kernel_does() {
    in_network_namespace(|| {
        let mut kernel = Kernel::new();
        let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(300));
        let kernel = std::cell::RefCell::new(&mut kernel);
        runner
            .run(&shape(), |shape| {
                let (header, mut frame) = shape.packet(true);
                // The kernel passes a packet of one segment on as it is.
                if shape.payload > usize::from(shape.gso_size) {
                    prop_assert!(kernel.borrow_mut().pass(&header, &frame) == segments_of(&header, &frame));
                }
                let (header, _) = shape.packet(false);
                let passed = kernel.borrow_mut().pass(&header, &frame);
                let (start, offset) = (header.csum_start.get(), header.csum_offset.get());
                let checksum = kickless_net::Checksum { start, offset };
                prop_assert!(complete_checksum(&mut frame, checksum));
                prop_assert!(passed == [frame]);
                Ok(())
            })
            .unwrap();
    });
}

proptest! {
    /// Each segment is a whole packet with right checksums, and their payloads are that of the frame.
    #[test]
    fn segments_are_whole_packets(shape in shape()) {
        let (header, frame) = shape.packet(true);
        let segments = segments_of(&header, &frame);
        let size = usize::from(shape.gso_size);
        prop_assert_eq!(segments.len(), shape.payload.div_ceil(size));
        let ip = if shape.vlan { 18 } else { 14 };
        let transport = usize::from(header.csum_start.get());
        let payload_at = frame.len() - shape.payload;
        let mut payload: Vec<u8> = Vec::new();
        for segment in &segments {
            payload.extend(&segment[payload_at..]);
            let len = (segment.len() - transport) as u32;
            let addresses = if shape.ipv6 { &segment[ip + 8..ip + 40] } else { &segment[ip + 12..ip + 20] };
            let protocol = if shape.udp { 17 } else { 6 };
            let pseudo = [addresses, &len.to_be_bytes(), &[0, protocol], &segment[transport..]].concat();
            prop_assert_eq!(sum(&pseudo), 0xffff);
            if !shape.ipv6 {
                prop_assert_eq!(sum(&segment[ip..transport]), 0xffff);
                prop_assert_eq!(segment[ip + 2..ip + 4].to_vec(), ((segment.len() - ip) as u16).to_be_bytes());
            }
        }
        prop_assert!(payload == frame[payload_at..]);
    }

    /// Frames and headers of any bytes end without a panic, and the segments are no longer than promised.
    #[test]
    fn any_bytes_can_be_segmented(
        mut frame in prop::collection::vec(any::<u8>(), 0..400),
        kind in prop::sample::select(vec![GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, 3, 0x81]),
        sizes in (0..300u16, 0..300u16, 0..20u16),
        ethernet in prop::sample::select(vec![[8u8, 0], [0x86, 0xdd], [0x81, 0], [1, 2]]),
        version in prop::sample::select(vec![0x45u8, 0x60, 0x4f]),
        protocol in prop::sample::select(vec![6u8, 17, 0, 43, 60]),
    ) {
        for (at, byte) in [(12, ethernet[0]), (13, ethernet[1]), (14, version), (20, protocol), (23, protocol), (20, 0), (21, 0)] {
            if let Some(place) = frame.get_mut(at)
                && (!(20..=21).contains(&at) || version != 0x60)
            {
                *place = byte;
            }
        }
        let (gso_size, start, offset) = sizes;
        let header = Header {
            gso_type: kind,
            gso_size: gso_size.into(),
            csum_start: start.into(),
            csum_offset: offset.into(),
            ..Header::default()
        };
        let _ = segments_of(&header, &frame);
        // The header that the frame would have.
        for start in [34, 54, 62, 74] {
            for offset in [6, 16] {
                let header = Header { csum_start: start.into(), csum_offset: offset.into(), ..header };
                let segments = segments_of(&header, &frame);
                prop_assert!(segments.len() <= SEGMENTS_MAX);
            }
        }
    }
}

/// The TAP takes each frame that the card passes on, unless the frame is not the packet of its header. It
/// refuses each frame that the card drops, unless only virtio forbids the header.
#[test]
fn verdicts_are_those_of_the_kernel() {
    in_network_namespace(|| {
        let mut kernel = Kernel::new();
        let frames = [(false, false, false), (true, false, false), (false, true, false), (true, true, true)]
            .map(|(ipv6, udp, vlan)| {
                let (options, tcp_options, tcp_flags) = (0, 0, 0x18);
                let (payload, gso_size, seed) = (900, 300, 7);
                Shape { vlan, ipv6, udp, options, tcp_options, tcp_flags, payload, gso_size, seed }
                    .packet(true)
            });
        let mut random = Random(1);
        let (mut taken, mut dropped) = (0, 0);
        for round in 0..20_000 {
            let (right, frame) = &frames[round % frames.len()];
            let (start, offset, len) = (right.csum_start.get(), right.csum_offset.get(), frame.len() as u16);
            let mut pick = |values: &[u16]| values[random.below(values.len() as u64) as usize];
            let header = Header {
                flags: pick(&[0, 1, 2, 3, 4, 0xff]) as u8,
                gso_type: pick(&[0, 1, 1, 2, 3, 4, 5, 5, 0x80, 0x81, 0x84, 0x85, 0xff]) as u8,
                hdr_len: pick(&[0, 1, 13, 14, 54, len - 1, len, len + 1, 0xffff]).into(),
                gso_size: pick(&[0, 1, 300, 900, 0xffff]).into(),
                csum_start: pick(&[0, 14, start, start, start, len - 2, len - 1, len, 0xffff]).into(),
                csum_offset: pick(&[
                    0,
                    offset,
                    offset,
                    len - start - 2,
                    len - start - 1,
                    len - start,
                    0xffff,
                ])
                .into(),
                num_buffers: pick(&[0, 1, 0xffff]).into(),
            };
            let parsed = Frame::parse(&header, 12, 12 + frame.len() as u64, NetFeatures::all());
            let verdict = |header: &Header, kernel: &mut Kernel| loop {
                match kernel.from.send_copy(header, frame) {
                    Err(SendError::Full) => {
                        let _ = poll(&mut [PollFd::new(&kernel.from, PollFlags::OUT)], None);
                    }
                    sent => return sent.is_ok(),
                }
            };
            match parsed {
                Ok(parsed) => {
                    let passed = parsed.header(&header);
                    let accepted = verdict(&passed, &mut kernel);
                    // The kernel wants an IP header before a checksum.
                    let has_ip = parsed.checksum.is_none_or(|checksum| checksum.start >= 34);
                    let is_packet = has_ip
                        && (parsed.segmentation.is_none() || Segments::of(&passed, frame).is_some())
                        // A number with a meaning of its own in the kernel (GSO_BY_FRAGS).
                        && passed.gso_size.get() != u16::MAX;
                    assert!(accepted || !is_packet, "the kernel refuses {passed:?}");
                    taken += 1;
                }
                Err(error) => {
                    // The kernel completes checksums of segments that the driver did not ask for.
                    let has_no_checksum = header.flags & HDR_F_NEEDS_CSUM == 0;
                    let is_virtios = error == InvalidFrame::Segmentation && has_no_checksum;
                    // The kernel segments TCP without a bound, and makes fragments of UDP.
                    let is_virtios =
                        is_virtios || error == InvalidFrame::Segments || header.gso_type == GSO_UDP;
                    assert!(is_virtios || !verdict(&header, &mut kernel), "the kernel takes {header:?}");
                    dropped += 1;
                }
            }
            while kernel.to.receive(&mut Header::default(), &mut Iov::default(), &mut [0; 2000]).is_ok() {}
        }
        assert!(taken > 1000 && dropped > 1000, "{taken} {dropped}");
    });
}
