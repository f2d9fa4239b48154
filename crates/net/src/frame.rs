//! The header of a transmitted frame, and its length. Pure: a header and a length in, what it asks for out.

use kickless_spec::net::{
    ETHERNET_HEADER_LEN, FRAME_MAX, GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP, GSO_UDP_L4,
    HDR_F_NEEDS_CSUM, Header, NetFeatures,
};

/// Length of a checksum of TCP or UDP.
const CHECKSUM_LEN: u32 = 2;

/// A transmitted frame whose header makes sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Bytes of the frame, from its Ethernet header on.
    pub len: u32,
    /// The checksum that is still to be completed.
    pub checksum: Option<Checksum>,
    /// How it is to be segmented.
    pub segmentation: Option<Segmentation>,
}

/// A checksum to be completed. Its place lies within the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checksum {
    /// The first byte of the frame that it covers. It goes to the end of the frame.
    pub start: u16,
    /// Where its two bytes are, counted from `start`.
    pub offset: u16,
}

/// How a frame is to be segmented.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segmentation {
    /// The protocol whose packet it is.
    pub protocol: Protocol,
    /// Bytes of payload in each segment; not zero.
    pub size: u16,
    /// ECN is set.
    pub ecn: bool,
}

/// The protocol of a packet that is to be segmented.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// TCP over IPv4.
    TcpV4,
    /// TCP over IPv6.
    TcpV6,
    /// UDP, to be cut into IP fragments.
    UdpFragments,
    /// UDP, to be cut into datagrams.
    Udp,
}

/// Why a transmitted frame is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    /// It has no whole header, or no whole Ethernet header.
    #[error("the frame is too short")]
    Short,
    /// It is longer than any frame: see [`FRAME_MAX`].
    #[error("the frame is too long")]
    Long,
    /// It asks for a checksum outside of it, or without having negotiated that.
    #[error("the checksum of the frame is not in it")]
    Checksum,
    /// It asks for a segmentation that makes no sense, or was not negotiated.
    #[error("the frame cannot be segmented like this")]
    Segmentation,
}

impl Frame {
    /// Understands the header of a transmitted frame of `len` bytes, header included. `hdr_len` and `num_buffers` are
    /// ignored: the first is a hint that may lie, and the second has no meaning here (virtio 1.3, section 5.1.6.2).
    ///
    /// # Errors
    /// The frame is to be dropped.
    pub fn parse(
        header: &Header,
        header_len: usize,
        len: u64,
        features: NetFeatures,
    ) -> Result<Self, Invalid> {
        let len = len.checked_sub(header_len as u64).ok_or(Invalid::Short)?;
        let len = u32::try_from(len).map_err(|_| Invalid::Long)?;
        if len < ETHERNET_HEADER_LEN as u32 {
            return Err(Invalid::Short);
        }
        if len > (FRAME_MAX - size_of::<Header>()) as u32 {
            return Err(Invalid::Long);
        }
        let checksum = checksum(header, len, features)?;
        let segmentation = segmentation(header, features)?;
        // Each segment has a checksum of its own.
        if segmentation.is_some() && checksum.is_none() {
            return Err(Invalid::Segmentation);
        }
        Ok(Self { len, checksum, segmentation })
    }
}

fn checksum(header: &Header, len: u32, features: NetFeatures) -> Result<Option<Checksum>, Invalid> {
    if header.flags & HDR_F_NEEDS_CSUM == 0 {
        return Ok(None);
    }
    let (start, offset) = (header.csum_start.get(), header.csum_offset.get());
    let end = u32::from(start) + u32::from(offset) + CHECKSUM_LEN;
    if !features.contains(NetFeatures::CSUM) || end > len {
        return Err(Invalid::Checksum);
    }
    Ok(Some(Checksum { start, offset }))
}

fn segmentation(header: &Header, features: NetFeatures) -> Result<Option<Segmentation>, Invalid> {
    let ecn = header.gso_type & GSO_ECN != 0;
    let (protocol, needs) = match header.gso_type & !GSO_ECN {
        GSO_NONE if !ecn => return Ok(None),
        GSO_TCPV4 => (Protocol::TcpV4, NetFeatures::HOST_TSO4),
        GSO_TCPV6 => (Protocol::TcpV6, NetFeatures::HOST_TSO6),
        GSO_UDP if !ecn => (Protocol::UdpFragments, NetFeatures::HOST_UFO),
        GSO_UDP_L4 if !ecn => (Protocol::Udp, NetFeatures::HOST_USO),
        _ => return Err(Invalid::Segmentation),
    };
    let size = header.gso_size.get();
    let is_taken = features.contains(needs) && (!ecn || features.contains(NetFeatures::HOST_ECN));
    match is_taken && size > 0 {
        true => Ok(Some(Segmentation { protocol, size, ecn })),
        false => Err(Invalid::Segmentation),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: NetFeatures = NetFeatures::all();
    const PLAIN: Header = Header {
        flags: 0,
        gso_type: GSO_NONE,
        hdr_len: zerocopy::little_endian::U16::ZERO,
        gso_size: zerocopy::little_endian::U16::ZERO,
        csum_start: zerocopy::little_endian::U16::ZERO,
        csum_offset: zerocopy::little_endian::U16::ZERO,
        num_buffers: zerocopy::little_endian::U16::ZERO,
    };

    fn parse(header: Header, len: u64, features: NetFeatures) -> Result<Frame, Invalid> {
        Frame::parse(&header, size_of::<Header>(), len, features)
    }

    #[test]
    fn lengths() {
        let plain = |len| parse(PLAIN, len, NetFeatures::empty()).map(|frame| frame.len);
        assert_eq!(plain(0), Err(Invalid::Short));
        assert_eq!(plain(25), Err(Invalid::Short));
        assert_eq!(plain(26), Ok(14));
        assert_eq!(plain(65_562), Ok(65_550));
        assert_eq!(plain(65_563), Err(Invalid::Long));
        assert_eq!(plain(u64::from(u32::MAX) + 12), Err(Invalid::Long));
        assert_eq!(plain(u64::MAX), Err(Invalid::Long));
        assert_eq!(Frame::parse(&PLAIN, 10, 24, ALL).map(|frame| frame.len), Ok(14));
    }

    #[test]
    fn a_checksum_lies_within_the_frame() {
        let header = |start: u16, offset: u16| Header {
            flags: HDR_F_NEEDS_CSUM,
            csum_start: start.into(),
            csum_offset: offset.into(),
            ..PLAIN
        };
        let len = 12 + 54;
        let frame = parse(header(34, 16), len, NetFeatures::CSUM).unwrap();
        assert_eq!(frame.checksum, Some(Checksum { start: 34, offset: 16 }));
        assert!(parse(header(34, 18), len, NetFeatures::CSUM).is_ok());
        assert_eq!(parse(header(34, 19), len, NetFeatures::CSUM), Err(Invalid::Checksum));
        assert_eq!(parse(header(u16::MAX, u16::MAX), len, NetFeatures::CSUM), Err(Invalid::Checksum));
        assert_eq!(parse(header(34, 16), len, ALL - NetFeatures::CSUM), Err(Invalid::Checksum));
    }

    #[test]
    fn only_what_was_negotiated_is_segmented() {
        let header = |gso_type, size: u16| Header {
            flags: HDR_F_NEEDS_CSUM,
            gso_type,
            gso_size: size.into(),
            csum_start: 34.into(),
            csum_offset: 16.into(),
            ..PLAIN
        };
        let segmentation = |header, features| parse(header, 4000, features).map(|frame| frame.segmentation);
        let wrong = Err(Invalid::Segmentation);
        for (kind, protocol, feature) in [
            (GSO_TCPV4, Protocol::TcpV4, NetFeatures::HOST_TSO4),
            (GSO_TCPV6, Protocol::TcpV6, NetFeatures::HOST_TSO6),
            (GSO_UDP, Protocol::UdpFragments, NetFeatures::HOST_UFO),
            (GSO_UDP_L4, Protocol::Udp, NetFeatures::HOST_USO),
        ] {
            let is = Some(Segmentation { protocol, size: 1448, ecn: false });
            assert_eq!(segmentation(header(kind, 1448), NetFeatures::CSUM | feature), Ok(is));
            assert_eq!(segmentation(header(kind, 1448), ALL - feature), wrong);
            assert_eq!(segmentation(header(kind, 0), ALL), wrong);
            // A lie that is only a hint.
            let lies = Header { hdr_len: u16::MAX.into(), num_buffers: 7.into(), ..header(kind, 1448) };
            assert_eq!(segmentation(lies, ALL), Ok(is));
            let unchecked = Header { flags: 0, ..header(kind, 1448) };
            assert_eq!(segmentation(unchecked, ALL), wrong);
        }
        let ecn = segmentation(header(GSO_TCPV4 | GSO_ECN, 9), ALL).unwrap().unwrap();
        assert!(ecn.ecn);
        assert_eq!(segmentation(header(GSO_TCPV4 | GSO_ECN, 9), ALL - NetFeatures::HOST_ECN), wrong);
        for kind in [GSO_ECN, GSO_UDP | GSO_ECN, GSO_UDP_L4 | GSO_ECN, 2, 6, 0x7f] {
            assert_eq!(segmentation(header(kind, 9), ALL), wrong, "{kind}");
        }
    }
}
