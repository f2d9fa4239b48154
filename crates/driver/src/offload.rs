//! The work on a frame that its sender leaves to its receiver: a checksum, and segmentation.

use kickless_spec::net::{
    GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, HDR_F_DATA_VALID, HDR_F_NEEDS_CSUM, Header,
    NetFeatures,
};

/// The length of a checksum of TCP or UDP.
const CHECKSUM_LEN: usize = 2;

/// The work that the sender of a frame has left to do. The default is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offload {
    /// The state of the checksum.
    pub checksum: Checksum,
    /// The segmentation that the frame needs before it goes to a network with a smaller MTU.
    pub segmentation: Option<Segmentation>,
}

/// The state of the checksum of TCP or UDP in a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checksum {
    /// The checksum in the frame is what its sender made it.
    #[default]
    InFrame,
    /// The checksum is incomplete: the frame has only the sum of the pseudo header in its place.
    Partial {
        /// The offset in the frame of the first byte that the checksum covers. It covers all bytes up to the
        /// end of the frame.
        start: u16,
        /// The offset of its two bytes from `start`.
        offset: u16,
    },
    /// The back-end has checked the checksum of a received frame. A sent frame cannot have this state.
    Verified,
}

/// A large packet that its receiver splits into segments, if it has to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segmentation {
    /// The protocol of the packet.
    pub protocol: Protocol,
    /// The number of bytes of payload in each segment. Not 0.
    pub size: u16,
    /// The length of all headers, which each segment repeats. 0 if it is not known.
    pub header_len: u16,
    /// Whether the packet of TCP has its CWR bit set, which is only for the first segment.
    pub ecn: bool,
}

/// The protocol of a packet with segmentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// TCP over IPv4.
    TcpV4,
    /// TCP over IPv6.
    TcpV6,
    /// UDP over either.
    Udp,
}

/// An offload that is impossible, or that was not negotiated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidOffload {
    /// The checksum is not in the frame.
    #[error("the checksum at {start} + {offset} is not in the frame of {len} bytes")]
    ChecksumOutside {
        /// The offset of the first byte that it covers.
        start: u16,
        /// The offset of the checksum from `start`.
        offset: u16,
        /// The length of the frame.
        len: usize,
    },
    /// The frame needs a checksum or has a checked one, which was not negotiated for its direction.
    #[error("the checksum of the frame is partial or checked, which was not negotiated")]
    ChecksumNotNegotiated,
    /// The frame needs a segmentation that was not negotiated.
    #[error("the frame needs a segmentation that was not negotiated")]
    SegmentationNotNegotiated,
    /// The frame needs segmentation into empty segments, or without a partial checksum.
    #[error("the frame needs segmentation, and its segments have no bytes or its checksum is not partial")]
    Segmentation,
    /// The header names an unknown kind of segmentation.
    #[error("the header names {0} as the kind of segmentation")]
    Kind(u8),
}

/// The features that allow offloads in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Allowed {
    checksum: bool,
    tcp_v4: bool,
    tcp_v6: bool,
    udp: bool,
    ecn: bool,
}

impl Allowed {
    /// Returns the offloads of frames that the driver sends.
    pub(crate) fn to_send(features: NetFeatures) -> Self {
        Self {
            checksum: features.contains(NetFeatures::CSUM),
            tcp_v4: features.contains(NetFeatures::HOST_TSO4),
            tcp_v6: features.contains(NetFeatures::HOST_TSO6),
            udp: features.contains(NetFeatures::HOST_USO),
            ecn: features.contains(NetFeatures::HOST_ECN),
        }
    }

    /// Returns the offloads of frames that the driver receives.
    pub(crate) fn to_receive(features: NetFeatures) -> Self {
        Self {
            checksum: features.contains(NetFeatures::GUEST_CSUM),
            tcp_v4: features.contains(NetFeatures::GUEST_TSO4),
            tcp_v6: features.contains(NetFeatures::GUEST_TSO6),
            udp: features.intersects(NetFeatures::GUEST_USO4.union(NetFeatures::GUEST_USO6)),
            ecn: features.contains(NetFeatures::GUEST_ECN),
        }
    }
}

impl Offload {
    /// Checks the offload of a frame of `len` bytes.
    #[inline]
    pub(crate) fn check(&self, len: usize, allowed: Allowed) -> Result<(), InvalidOffload> {
        if *self == Self::default() { Ok(()) } else { self.check_work(len, allowed) }
    }

    fn check_work(&self, len: usize, allowed: Allowed) -> Result<(), InvalidOffload> {
        match self.checksum {
            Checksum::InFrame => {}
            _ if !allowed.checksum => return Err(InvalidOffload::ChecksumNotNegotiated),
            Checksum::Partial { start, offset } => {
                if usize::from(start) + usize::from(offset) + CHECKSUM_LEN > len {
                    return Err(InvalidOffload::ChecksumOutside { start, offset, len });
                }
            }
            Checksum::Verified => {}
        }
        let Some(segmentation) = self.segmentation else { return Ok(()) };
        if segmentation.size == 0 || !matches!(self.checksum, Checksum::Partial { .. }) {
            return Err(InvalidOffload::Segmentation);
        }
        let is_allowed = match segmentation.protocol {
            Protocol::TcpV4 => allowed.tcp_v4 && (allowed.ecn || !segmentation.ecn),
            Protocol::TcpV6 => allowed.tcp_v6 && (allowed.ecn || !segmentation.ecn),
            Protocol::Udp => allowed.udp && !segmentation.ecn,
        };
        if is_allowed { Ok(()) } else { Err(InvalidOffload::SegmentationNotNegotiated) }
    }

    /// Returns the header with this offload, which is not checked.
    pub fn header(&self) -> Header {
        let mut header = Header::default();
        match self.checksum {
            Checksum::InFrame => {}
            Checksum::Partial { start, offset } => {
                header.flags = HDR_F_NEEDS_CSUM;
                (header.csum_start, header.csum_offset) = (start.into(), offset.into());
            }
            Checksum::Verified => header.flags = HDR_F_DATA_VALID,
        }
        if let Some(Segmentation { protocol, size, header_len, ecn }) = self.segmentation {
            let kind = match protocol {
                Protocol::TcpV4 => GSO_TCPV4,
                Protocol::TcpV6 => GSO_TCPV6,
                Protocol::Udp => GSO_UDP_L4,
            };
            header.gso_type = kind | if ecn { GSO_ECN } else { 0 };
            (header.gso_size, header.hdr_len) = (size.into(), header_len.into());
        }
        header
    }

    /// Returns the offload in a header, without a check of its numbers.
    ///
    /// # Errors
    /// The kind of segmentation is unknown.
    pub fn of_header(header: &Header) -> Result<Self, InvalidOffload> {
        let checksum = if header.flags & HDR_F_NEEDS_CSUM != 0 {
            Checksum::Partial { start: header.csum_start.get(), offset: header.csum_offset.get() }
        } else if header.flags & HDR_F_DATA_VALID != 0 {
            Checksum::Verified
        } else {
            Checksum::InFrame
        };
        let protocol = match header.gso_type & !GSO_ECN {
            GSO_NONE if header.gso_type == GSO_NONE => None,
            GSO_TCPV4 => Some(Protocol::TcpV4),
            GSO_TCPV6 => Some(Protocol::TcpV6),
            GSO_UDP_L4 => Some(Protocol::Udp),
            _ => return Err(InvalidOffload::Kind(header.gso_type)),
        };
        let segmentation = protocol.map(|protocol| Segmentation {
            protocol,
            size: header.gso_size.get(),
            header_len: header.hdr_len.get(),
            ecn: header.gso_type & GSO_ECN != 0,
        });
        Ok(Self { checksum, segmentation })
    }

    /// Returns the header of a frame to send.
    ///
    /// # Errors
    /// The offload is not one of a frame of `len` bytes, or not allowed.
    #[inline]
    pub(crate) fn encode(&self, len: usize, allowed: Allowed) -> Result<Header, InvalidOffload> {
        if *self == Self::default() { Ok(Header::default()) } else { self.encode_work(len, allowed) }
    }

    #[cold]
    fn encode_work(&self, len: usize, allowed: Allowed) -> Result<Header, InvalidOffload> {
        self.check_work(len, allowed)?;
        // A card must not be told that (virtio 1.3, section 5.1.6.2.1).
        if self.checksum == Checksum::Verified {
            return Err(InvalidOffload::ChecksumNotNegotiated);
        }
        Ok(self.header())
    }

    /// Parses the header of a received frame of `len` bytes.
    ///
    /// # Errors
    /// The header makes no sense, or names an offload that is not allowed.
    #[inline]
    pub(crate) fn parse(header: &Header, len: usize, allowed: Allowed) -> Result<Self, InvalidOffload> {
        match (header.flags, header.gso_type) {
            (0, GSO_NONE) => Ok(Self::default()),
            _ => Self::parse_work(header, len, allowed),
        }
    }

    fn parse_work(header: &Header, len: usize, allowed: Allowed) -> Result<Self, InvalidOffload> {
        let mut offload = Self::of_header(header)?;
        if offload.checksum == Checksum::Verified && !allowed.checksum {
            offload.checksum = Checksum::InFrame;
        }
        offload.check(len, allowed).map(|()| offload)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use zerocopy::FromBytes;

    const ALL: NetFeatures = NetFeatures::all();

    fn tcp(size: u16) -> Offload {
        Offload {
            checksum: Checksum::Partial { start: 34, offset: 16 },
            segmentation: Some(Segmentation { protocol: Protocol::TcpV4, size, header_len: 54, ecn: false }),
        }
    }

    #[test]
    fn impossible_offloads_are_refused() {
        let all = Allowed::to_send(ALL);
        let outside = Checksum::Partial { start: 50, offset: 9 };
        let offload = Offload { checksum: outside, segmentation: None };
        let error = InvalidOffload::ChecksumOutside { start: 50, offset: 9, len: 60 };
        assert_eq!(offload.encode(60, all), Err(error));
        assert!(offload.encode(61, all).is_ok());
        assert_eq!(tcp(0).encode(99, all), Err(InvalidOffload::Segmentation));
        assert_eq!(
            Offload { checksum: Checksum::InFrame, ..tcp(9) }.encode(99, all),
            Err(InvalidOffload::Segmentation)
        );
        let none = Allowed::to_send(ALL - NetFeatures::CSUM);
        assert_eq!(offload.encode(99, none), Err(InvalidOffload::ChecksumNotNegotiated));
        for (feature, protocol) in [
            (NetFeatures::HOST_TSO4, Protocol::TcpV4),
            (NetFeatures::HOST_TSO6, Protocol::TcpV6),
            (NetFeatures::HOST_USO, Protocol::Udp),
        ] {
            let Offload { checksum, segmentation } = tcp(9);
            let segmentation = segmentation.map(|segmentation| Segmentation { protocol, ..segmentation });
            let offload = Offload { checksum, segmentation };
            assert!(offload.encode(99, all).is_ok());
            let without = Allowed::to_send(ALL - feature);
            assert_eq!(offload.encode(99, without), Err(InvalidOffload::SegmentationNotNegotiated));
        }
    }

    #[test]
    fn headers_that_lie_are_refused() {
        let all = Allowed::to_receive(ALL);
        let header = Header { gso_type: GSO_ECN, ..Header::default() };
        assert_eq!(Offload::parse(&header, 99, all), Err(InvalidOffload::Kind(GSO_ECN)));
        let header = Header { gso_type: GSO_TCPV4, gso_size: 9.into(), ..Header::default() };
        assert_eq!(Offload::parse(&header, 99, all), Err(InvalidOffload::Segmentation));
        let header = Header { flags: HDR_F_DATA_VALID, ..Header::default() };
        assert_eq!(Offload::parse(&header, 99, all).unwrap().checksum, Checksum::Verified);
        let none = Allowed::to_receive(NetFeatures::empty());
        assert_eq!(Offload::parse(&header, 99, none).unwrap(), Offload::default());
        let header = Header { flags: HDR_F_NEEDS_CSUM, ..Header::default() };
        assert_eq!(Offload::parse(&header, 99, none), Err(InvalidOffload::ChecksumNotNegotiated));
    }

    proptest! {
        /// Encodes what was parsed, and parses it again with the same meaning.
        #[test]
        fn parsed_headers_can_be_encoded(bytes: [u8; 12], len in 0usize..70_000) {
            let header = Header::read_from_bytes(&bytes).unwrap();
            if let Ok(offload) = Offload::parse(&header, len, Allowed::to_receive(ALL)) {
                match offload.encode(len, Allowed::to_send(ALL)) {
                    Ok(again) => {
                        let parsed = Offload::parse(&again, len, Allowed::to_receive(ALL));
                        prop_assert_eq!(parsed, Ok(offload));
                    }
                    Err(_) => prop_assert_eq!(offload.checksum, Checksum::Verified),
                }
            }
        }
    }
}
