//! Packets that a card segments, and what they become.

use kickless_net::offload::Segments;
use kickless_spec::net::{GSO_TCPV4, GSO_TCPV6, HDR_F_NEEDS_CSUM, Header};
use zerocopy::IntoBytes;

/// Returns a TCP packet of IPv4 with this payload, whose checksum is partial, and its header.
pub fn tcp(payload: usize, size: u16) -> (Header, Vec<u8>) {
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0];
    frame.extend([0x45, 0, 0, 0, 0, 0, 0, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    frame.extend([0, 80, 1, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x18, 1, 0, 0, 0, 0, 0]);
    frame.extend((0..payload).map(|n| n as u8));
    let len = (frame.len() - 14) as u16;
    frame[16..18].copy_from_slice(&len.to_be_bytes());
    let gso_type = if size > 0 { GSO_TCPV4 } else { 0 };
    let flags = HDR_F_NEEDS_CSUM;
    let (csum_start, csum_offset) = (34.into(), 16.into());
    let header =
        Header { flags, gso_type, gso_size: size.into(), csum_start, csum_offset, ..Header::default() };
    (header, frame)
}

/// Returns a TCP packet of IPv6 with so many bytes of extension headers, a multiple of 8, and its header.
pub fn tcp_behind_extensions(extensions: usize, payload: usize, size: u16) -> (Header, Vec<u8>) {
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x86, 0xdd, 0x60, 0, 0, 0];
    frame.extend(((extensions + 20 + payload) as u16).to_be_bytes());
    frame.extend([if extensions > 0 { 60 } else { 6 }, 64]);
    frame.extend([0xfd; 32]);
    let mut left = extensions;
    while left > 0 {
        let here = left.min(2048);
        left -= here;
        // Destination options, which are all padding of one byte.
        frame.extend([if left > 0 { 60 } else { 6 }, (here / 8 - 1) as u8]);
        frame.resize(frame.len() + here - 2, 0);
    }
    let start = frame.len();
    frame.extend([0, 80, 1, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x18, 1, 0, 0, 0, 0, 0]);
    frame.extend((0..payload).map(|n| n as u8));
    let header = Header {
        flags: HDR_F_NEEDS_CSUM,
        gso_type: GSO_TCPV6,
        gso_size: size.into(),
        csum_start: (start as u16).into(),
        csum_offset: 16.into(),
        ..Header::default()
    };
    (header, frame)
}

/// Returns a frame behind its header.
pub fn whole((header, frame): &(Header, Vec<u8>)) -> Vec<u8> {
    [header.as_bytes(), frame].concat()
}

/// Returns packets that would become too many frames, or too many bytes, behind their headers: 1360 frames of
/// 62 KiB, 64 000 of 55 bytes, 129 of 554 bytes, and 63 of 32 KiB.
pub fn explosive() -> [Vec<u8>; 4] {
    [
        tcp_behind_extensions(62 << 10, 1360, 1),
        tcp(64_000, 1),
        tcp(128 * 500 + 100, 500),
        tcp_behind_extensions(32 << 10, 32_000, 510),
    ]
    .map(|packet| whole(&packet))
}

/// Returns the segments of a packet.
pub fn segments(header: &Header, packet: &[u8]) -> Vec<Vec<u8>> {
    let mut segments = Segments::of(header, packet).unwrap();
    let mut space = vec![0; 2000];
    std::iter::from_fn(|| segments.write_next(packet, &mut space).map(|len| space[..len].to_vec())).collect()
}
