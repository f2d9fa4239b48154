//! Packets and their headers for tests of network cards.

use kickless_spec::checksum::Sum;
use kickless_spec::net::{GSO_TCPV4, HDR_F_NEEDS_CSUM, Header};

/// Returns the header of a TCP packet over IPv4 without options that the receiver of the frame has to cut
/// into segments of 1448 bytes.
pub fn tcp_segmentation() -> Header {
    Header {
        flags: HDR_F_NEEDS_CSUM,
        gso_type: GSO_TCPV4,
        hdr_len: 54.into(),
        gso_size: 1448.into(),
        csum_start: 34.into(),
        csum_offset: 16.into(),
        ..Header::default()
    }
}

/// Returns the broadcast of a guest that asks for an address (DHCPDISCOVER of RFC 2131).
pub fn dhcp_discover() -> Vec<u8> {
    let mac = [2, 0, 0, 0, 0, 7];
    let mut bootp = vec![1, 1, 6, 0, 1, 2, 3, 4];
    bootp.resize(28, 0);
    bootp.extend(mac);
    bootp.resize(236, 0);
    bootp.extend([99, 130, 83, 99, 53, 1, 1, 255]);
    let udp_len = (8 + bootp.len()) as u16;
    let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255];
    packet[2..4].copy_from_slice(&(20 + udp_len).to_be_bytes());
    let checksum = Sum::default().with(&packet).checksum();
    packet[10..12].copy_from_slice(&checksum);
    packet.extend([0, 68, 0, 67]);
    packet.extend(udp_len.to_be_bytes());
    packet.extend([0, 0]);
    [&[0xff; 6], &mac[..], &[8, 0], &packet, &bootp].concat()
}
