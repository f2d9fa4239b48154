//! Packets that a card segments, and what they become.

use kickless_net::offload::Segments;
use kickless_spec::net::{GSO_TCPV4, HDR_F_NEEDS_CSUM, Header};

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

/// Returns the segments of a packet.
pub fn segments(header: &Header, packet: &[u8]) -> Vec<Vec<u8>> {
    let mut segments = Segments::of(header, packet).unwrap();
    let mut space = vec![0; 2000];
    std::iter::from_fn(|| segments.write_next(packet, &mut space).map(|len| space[..len].to_vec())).collect()
}
