//! Translates offloads between the headers of frames and the driver.

use kickless_driver::{Checksum, Offload};
use kickless_spec::net::{Header, NetFeatures};

/// Returns the features of a receiver that accepts what a back-end with these features accepts.
pub(super) fn accepted(negotiated: NetFeatures) -> NetFeatures {
    let mut accepted = NetFeatures::empty();
    for (sent, received) in [
        (NetFeatures::CSUM, NetFeatures::GUEST_CSUM),
        (NetFeatures::HOST_TSO4, NetFeatures::GUEST_TSO4),
        (NetFeatures::HOST_TSO6, NetFeatures::GUEST_TSO6),
        (NetFeatures::HOST_ECN, NetFeatures::GUEST_ECN),
        (NetFeatures::HOST_USO, NetFeatures::GUEST_USO4 | NetFeatures::GUEST_USO6),
    ] {
        accepted.set(received, negotiated.contains(sent));
    }
    accepted
}

/// Returns the offload of a sent frame with this header, which is valid.
pub(super) fn of_header(header: &Header) -> Offload {
    let mut offload = Offload::of_header(header).unwrap_or_default();
    // A card must not be told that a checksum is right.
    if offload.checksum == Checksum::Verified {
        offload.checksum = Checksum::InFrame;
    }
    offload
}

/// Returns the header of a received frame, as in one buffer.
pub(super) fn header_of(offload: &Offload) -> Header {
    Header { num_buffers: 1.into(), ..offload.header() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kickless_spec::net::{
        GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, HDR_F_DATA_VALID, HDR_F_NEEDS_CSUM,
    };

    #[test]
    fn headers_are_translated_and_back() {
        for (gso_type, flags) in [
            (GSO_NONE, 0),
            (GSO_NONE, HDR_F_NEEDS_CSUM),
            (GSO_TCPV4, HDR_F_NEEDS_CSUM),
            (GSO_TCPV6 | GSO_ECN, HDR_F_NEEDS_CSUM),
            (GSO_UDP_L4, HDR_F_NEEDS_CSUM),
        ] {
            let mut header = Header { gso_type, flags, num_buffers: 1.into(), ..Header::default() };
            if flags != 0 {
                (header.csum_start, header.csum_offset) = (34.into(), 16.into());
            }
            if gso_type != GSO_NONE {
                (header.gso_size, header.hdr_len) = (1448.into(), 54.into());
            }
            assert_eq!(header_of(&of_header(&header)), header);
        }
        let checked = Offload { checksum: Checksum::Verified, segmentation: None };
        assert_eq!(header_of(&checked).flags, HDR_F_DATA_VALID);
        let all = accepted(NetFeatures::all());
        assert_eq!(all, NetFeatures::GUEST_OFFLOADS - NetFeatures::GUEST_UFO);
        assert!(accepted(NetFeatures::GUEST_OFFLOADS).is_empty());
    }
}
