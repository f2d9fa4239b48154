//! Parses the header of a transmitted frame, and makes the one to pass on. Has no state.

use crate::frame::loop_queue::{HEADER, PLAIN};
use crate::offload::{TCP_HEADER, UDP_HEADER, count_max, may_be_segmented};
use kickless_spec::net::{
    ETHERNET_HEADER_LEN, FRAME_MAX, GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, HDR_F_NEEDS_CSUM,
    HEADER_NUM_BUFFERS, Header, NetFeatures,
};
use zerocopy::{FromBytes, IntoBytes};

/// Offset of the kind of segmentation in a header.
const HEADER_GSO_TYPE: usize = std::mem::offset_of!(Header, gso_type);
/// Length of a checksum of TCP or UDP.
const CHECKSUM_LEN: u32 = 2;

/// A transmitted frame with a valid header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Length of the frame, without the virtio-net header.
    pub len: u32,
    /// The checksum that the device must complete.
    pub checksum: Option<Checksum>,
    /// The segmentation that the device must perform.
    pub segmentation: Option<Segmentation>,
}

/// A checksum that the driver left incomplete. Its two bytes are within the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checksum {
    /// Offset in the frame of the first byte that it covers. It covers all bytes up to the end of the frame.
    pub start: u16,
    /// Offset of its two bytes from `start`.
    pub offset: u16,
}

/// The segmentation that a frame requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segmentation {
    /// The protocol of the packet.
    pub protocol: Protocol,
    /// Bytes of payload in each segment. Not zero.
    pub size: u16,
    /// Whether the packet has explicit congestion notification (ECN) set.
    pub ecn: bool,
}

/// The protocol of a packet that the device must segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// TCP over IPv4.
    TcpV4,
    /// TCP over IPv6.
    TcpV6,
    /// UDP, segmented into datagrams.
    Udp,
}

impl Protocol {
    /// Returns the length of the shortest header.
    fn header_len(self) -> u32 {
        match self {
            Self::TcpV4 | Self::TcpV6 => TCP_HEADER,
            Self::Udp => UDP_HEADER,
        }
    }
}

/// The reason to drop a transmitted frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidFrame {
    /// The virtio-net header or the Ethernet header is incomplete.
    #[error("the frame is too short")]
    Short,
    /// The frame is longer than [`FRAME_MAX`] allows.
    #[error("the frame is too long")]
    Long,
    /// The checksum is outside of the packet in the frame, or the driver did not negotiate checksums.
    #[error("the checksum is outside of the packet, or not negotiated")]
    Checksum,
    /// The segmentation is invalid, or the driver did not negotiate it.
    #[error("the segmentation of the frame is invalid, or not negotiated")]
    Segmentation,
    /// The packet would become too many segments, or too many bytes
    /// ([`SEGMENTS_MAX`](crate::offload::SEGMENTS_MAX)).
    #[error("the packet would become too many segments")]
    Segments,
}

/// Returns whether a header has no offload.
pub(crate) fn has_no_offload(header: &Header) -> bool {
    header.flags & HDR_F_NEEDS_CSUM == 0 && header.gso_type == GSO_NONE
}

/// Returns the most segments that a frame behind its header, which is valid, can become. Returns 0 if none
/// are asked for.
#[inline]
pub(crate) fn segments_max(frame: &[u8]) -> u32 {
    if frame.get(HEADER_GSO_TYPE).is_none_or(|kind| *kind == GSO_NONE) { 0 } else { count_segments(frame) }
}

/// Counts those of a packet.
#[inline(never)]
fn count_segments(frame: &[u8]) -> u32 {
    Header::read_from_prefix(frame).map_or(0, |(header, frame)| {
        // Lossless, because a frame is no longer than `FRAME_MAX`.
        let header_len = match header.gso_type {
            GSO_UDP_L4 => UDP_HEADER,
            _ => TCP_HEADER,
        };
        count_max(frame.len() as u32, header.csum_start.get(), header_len, header.gso_size.get())
    })
}

/// Sets the header at the beginning of a frame to one that is passed on, as a driver receives it in one
/// buffer.
pub(crate) fn set_header(head: &mut [u8], header: &Header) {
    let header = Header { num_buffers: 1.into(), ..*header };
    head[..HEADER].copy_from_slice(header.as_bytes());
}

/// Sets the number of buffers in the header at the beginning of a frame.
pub(crate) fn set_num_buffers(head: &mut [u8], buffers: u16) {
    head[HEADER_NUM_BUFFERS..HEADER].copy_from_slice(&buffers.to_le_bytes());
}

/// Replaces the driver's header of a frame of `len` bytes, header included, by the one to pass on. Returns
/// `false` if the header is invalid. `head` is the beginning of the frame at least.
#[inline]
pub(crate) fn pass_header(head: &mut [u8], len: usize, features: NetFeatures) -> bool {
    let Ok((header, _)) = Header::read_from_prefix(head) else { return false };
    if has_no_offload(&header) {
        head[..HEADER].copy_from_slice(&PLAIN);
        return true;
    }
    pass_offloads(head, &header, len, features)
}

/// Does it for a frame with offloads.
#[inline(never)]
fn pass_offloads(head: &mut [u8], header: &Header, len: usize, features: NetFeatures) -> bool {
    let parsed = Frame::parse(header, HEADER, len as u64, features);
    parsed.map(|parsed| set_header(head, &parsed.header(header))).is_ok()
}

impl Frame {
    /// Parses the header of a transmitted frame of `len` bytes, header included. Ignores two fields (virtio
    /// 1.3, section 5.1.6.2): `hdr_len` is a hint that may be wrong, and `num_buffers` has no meaning in
    /// transmitted frames.
    ///
    /// # Errors
    /// The frame is invalid, and the device drops it.
    #[inline]
    pub fn parse(
        header: &Header,
        header_len: usize,
        len: u64,
        features: NetFeatures,
    ) -> Result<Self, InvalidFrame> {
        let len = len.checked_sub(header_len as u64).ok_or(InvalidFrame::Short)?;
        let len = u32::try_from(len).map_err(|_| InvalidFrame::Long)?;
        if len < ETHERNET_HEADER_LEN as u32 {
            return Err(InvalidFrame::Short);
        }
        if len > (FRAME_MAX - size_of::<Header>()) as u32 {
            return Err(InvalidFrame::Long);
        }
        let checksum = checksum(header, len, features)?;
        let segmentation = match header.gso_type {
            GSO_NONE => None,
            _ => Some(segmentation(header, len, checksum, features)?),
        };
        Ok(Self { len, checksum, segmentation })
    }

    /// Returns the most segments that the packet in this frame can become, or 0 if none are asked for.
    pub fn segments_max(&self) -> u32 {
        match (self.segmentation, self.checksum) {
            (Some(Segmentation { size, protocol, .. }), Some(Checksum { start, .. })) => {
                count_max(self.len, start, protocol.header_len(), size)
            }
            _ => 0,
        }
    }

    /// Returns the header to pass on with this frame, which was parsed from `header`. Fields without a
    /// meaning are zero, and so is a length of headers that the frame cannot have.
    pub fn header(&self, header: &Header) -> Header {
        let is_possible = (ETHERNET_HEADER_LEN as u32..=self.len).contains(&header.hdr_len.get().into());
        let mut passed = Header::default();
        if let Some(Checksum { start, offset }) = self.checksum {
            passed.flags = HDR_F_NEEDS_CSUM;
            (passed.csum_start, passed.csum_offset) = (start.into(), offset.into());
        }
        if self.segmentation.is_some() {
            (passed.gso_type, passed.gso_size) = (header.gso_type, header.gso_size);
            passed.hdr_len = if is_possible { header.hdr_len } else { 0.into() };
        }
        passed
    }
}

fn checksum(header: &Header, len: u32, features: NetFeatures) -> Result<Option<Checksum>, InvalidFrame> {
    if header.flags & HDR_F_NEEDS_CSUM == 0 {
        return Ok(None);
    }
    let (start, offset) = (header.csum_start.get(), header.csum_offset.get());
    let end = u32::from(start) + u32::from(offset) + CHECKSUM_LEN;
    // In the Ethernet header it would change the addresses.
    let is_in_packet = usize::from(start) >= ETHERNET_HEADER_LEN && end <= len;
    if !features.contains(NetFeatures::CSUM) || !is_in_packet {
        return Err(InvalidFrame::Checksum);
    }
    Ok(Some(Checksum { start, offset }))
}

/// Returns the segmentation of a frame of `len` bytes with one.
#[inline(never)]
fn segmentation(
    header: &Header,
    len: u32,
    checksum: Option<Checksum>,
    features: NetFeatures,
) -> Result<Segmentation, InvalidFrame> {
    let ecn = header.gso_type & GSO_ECN != 0;
    let (protocol, needs) = match header.gso_type & !GSO_ECN {
        GSO_TCPV4 => (Protocol::TcpV4, NetFeatures::HOST_TSO4),
        GSO_TCPV6 => (Protocol::TcpV6, NetFeatures::HOST_TSO6),
        GSO_UDP_L4 if !ecn => (Protocol::Udp, NetFeatures::HOST_USO),
        _ => return Err(InvalidFrame::Segmentation),
    };
    let size = header.gso_size.get();
    let is_negotiated = features.contains(needs) && (!ecn || features.contains(NetFeatures::HOST_ECN));
    match checksum {
        Some(Checksum { start, .. }) if is_negotiated && size > 0 => match may_be_segmented(len, start, size)
        {
            true => Ok(Segmentation { protocol, size, ecn }),
            false => Err(InvalidFrame::Segments),
        },
        // Segments need their own checksums, so the driver must have asked for a checksum as well.
        _ => Err(InvalidFrame::Segmentation),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kickless_spec::net::GSO_UDP;

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

    fn parse(header: Header, len: u64, features: NetFeatures) -> Result<Frame, InvalidFrame> {
        Frame::parse(&header, size_of::<Header>(), len, features)
    }

    #[test]
    fn lengths() {
        let plain = |len| parse(PLAIN, len, NetFeatures::empty()).map(|frame| frame.len);
        assert_eq!(plain(0), Err(InvalidFrame::Short));
        assert_eq!(plain(25), Err(InvalidFrame::Short));
        assert_eq!(plain(26), Ok(14));
        assert_eq!(plain(65_562), Ok(65_550));
        assert_eq!(plain(65_563), Err(InvalidFrame::Long));
        assert_eq!(plain(u64::from(u32::MAX) + 12), Err(InvalidFrame::Long));
        assert_eq!(plain(u64::MAX), Err(InvalidFrame::Long));
        assert_eq!(Frame::parse(&PLAIN, 10, 24, ALL).map(|frame| frame.len), Ok(14));
    }

    #[test]
    fn a_checksum_outside_of_the_frame_is_invalid() {
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
        assert_eq!(parse(header(34, 19), len, NetFeatures::CSUM), Err(InvalidFrame::Checksum));
        assert_eq!(parse(header(u16::MAX, u16::MAX), len, NetFeatures::CSUM), Err(InvalidFrame::Checksum));
        assert_eq!(parse(header(34, 16), len, ALL - NetFeatures::CSUM), Err(InvalidFrame::Checksum));
    }

    #[test]
    fn a_header_is_passed_on_without_what_has_no_meaning() {
        let lies = Header { flags: !HDR_F_NEEDS_CSUM, hdr_len: 7.into(), gso_size: 9.into(), ..PLAIN };
        let frame = parse(lies, 100, ALL).unwrap();
        assert_eq!(frame.header(&lies), PLAIN);
        let tcp = |hdr_len: u16| Header {
            flags: HDR_F_NEEDS_CSUM,
            gso_type: GSO_TCPV4,
            gso_size: 9.into(),
            csum_start: 34.into(),
            csum_offset: 16.into(),
            hdr_len: hdr_len.into(),
            ..PLAIN
        };
        for (said, passed) in [(0, 0), (13, 0), (14, 14), (54, 54), (88, 88), (89, 0), (u16::MAX, 0)] {
            let header = Header { num_buffers: 3.into(), ..tcp(said) };
            assert_eq!(parse(header, 100, ALL).unwrap().header(&header), tcp(passed));
        }
    }

    #[test]
    fn a_segmentation_that_is_not_negotiated_is_invalid() {
        let header = |gso_type, size: u16| Header {
            flags: HDR_F_NEEDS_CSUM,
            gso_type,
            gso_size: size.into(),
            csum_start: 34.into(),
            csum_offset: 16.into(),
            ..PLAIN
        };
        let segmentation = |header, features| parse(header, 4000, features).map(|frame| frame.segmentation);
        let wrong = Err(InvalidFrame::Segmentation);
        for (kind, protocol, feature) in [
            (GSO_TCPV4, Protocol::TcpV4, NetFeatures::HOST_TSO4),
            (GSO_TCPV6, Protocol::TcpV6, NetFeatures::HOST_TSO6),
            (GSO_UDP_L4, Protocol::Udp, NetFeatures::HOST_USO),
        ] {
            let is = Some(Segmentation { protocol, size: 1448, ecn: false });
            assert_eq!(segmentation(header(kind, 1448), NetFeatures::CSUM | feature), Ok(is));
            assert_eq!(segmentation(header(kind, 1448), ALL - feature), wrong);
            assert_eq!(segmentation(header(kind, 0), ALL), wrong);
            // Ignored fields may have any value.
            let ignored = Header { hdr_len: u16::MAX.into(), num_buffers: 7.into(), ..header(kind, 1448) };
            assert_eq!(segmentation(ignored, ALL), Ok(is));
            let unchecked = Header { flags: 0, ..header(kind, 1448) };
            assert_eq!(segmentation(unchecked, ALL), wrong);
        }
        let ecn = segmentation(header(GSO_TCPV4 | GSO_ECN, 90), ALL).unwrap().unwrap();
        assert!(ecn.ecn);
        assert_eq!(segmentation(header(GSO_TCPV4 | GSO_ECN, 9), ALL - NetFeatures::HOST_ECN), wrong);
        for kind in [GSO_ECN, GSO_UDP, GSO_UDP_L4 | GSO_ECN, 2, 6, 0x7f] {
            assert_eq!(segmentation(header(kind, 9), ALL), wrong, "{kind}");
        }
    }

    /// A packet of two full segments is paid as two, in a chain and as a copy.
    #[test]
    fn the_shortest_header_is_no_payload() {
        for (kind, header_len, offset) in [(GSO_TCPV4, 20, 16), (GSO_TCPV6, 20, 16), (GSO_UDP_L4, 8, 6)] {
            let header = Header {
                flags: HDR_F_NEEDS_CSUM,
                gso_type: kind,
                gso_size: 1000.into(),
                csum_start: 34.into(),
                csum_offset: offset.into(),
                ..Header::default()
            };
            for (payload, count) in [(2000, 2), (2001, 3)] {
                let frame = [header.as_bytes(), &vec![0; 34 + header_len + payload]].concat();
                let parsed = Frame::parse(&header, HEADER, frame.len() as u64, ALL).unwrap();
                assert_eq!((parsed.segments_max(), segments_max(&frame)), (count, count), "{kind}");
            }
        }
    }
}
