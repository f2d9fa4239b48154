//! The frames that a thread sends: a short head, and bytes of no meaning behind it.

use kickless_driver::{Checksum, Frame, Offload, Protocol, Segmentation};
use kickless_spec::checksum::Sum;
use serde::Serialize;

/// The destination is a broadcast address, the source one for local use, and the EtherType one for
/// experiments.
const ETHERNET: [u8; 14] = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, 1, 0x88, 0xb5];
pub(super) const ADDRESS_LEN: usize = 6;
const ETHERTYPE: usize = 2 * ADDRESS_LEN;
const ETHERTYPE_IPV4: [u8; 2] = [8, 0];
/// The header of an IPv4 packet from one address for documentation to another (RFC 5737), without its length
/// and checksum.
const IPV4: [u8; 20] = [0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 6, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2];
const IPV4_LEN: usize = 2;
const IPV4_CHECKSUM: usize = 10;
const IPV4_ADDRESSES: usize = 12;
/// The header of a TCP segment to the port for discarded data, with ACK, without its checksum.
const TCP: [u8; 20] = [0xc0, 0, 0, 9, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 0xff, 0xff, 0, 0, 0, 0];
/// The protocol, as it is in the pseudo-header.
const TCP_PROTOCOL: [u8; 2] = [0, 6];
const TCP_START: usize = ETHERNET.len() + IPV4.len();
const TCP_CHECKSUM: usize = 16;
/// The length of all headers of a TCP packet.
const TCP_HEAD: usize = TCP_START + TCP.len();
/// The length of the time in a frame.
pub(super) const STAMP_LEN: usize = 8;

/// The shortest packet of TCP, and the longest one, whose length fits into the header of IPv4.
pub(crate) const TCP_FRAME_MIN: u32 = (TCP_HEAD + STAMP_LEN) as u32;
pub(crate) const TCP_FRAME_MAX: u32 = ETHERNET.len() as u32 + u16::MAX as u32;

/// The work that packets of TCP leave to the card and to the receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Work {
    /// To complete the checksum.
    Checksum,
    /// To cut the packet into segments with so many bytes of data, and to complete their checksums.
    Segments(u16),
}

/// The beginning of the frames that a thread sends.
#[derive(Clone, Debug)]
pub(super) struct Head {
    ethernet: [u8; ETHERNET.len()],
    /// The headers behind that of Ethernet, in packets of TCP.
    tcp: Option<TcpHead>,
}

#[derive(Clone, Debug)]
struct TcpHead {
    bytes: [u8; TCP_HEAD - ETHERNET.len()],
    offload: Offload,
}

impl Head {
    /// Returns the head of frames of `frame_len` bytes, which have an EtherType for experiments. If they
    /// leave work to the card, they are packets of TCP.
    pub(super) fn new(frame_len: u32, work: Option<Work>) -> Self {
        let mut ethernet = ETHERNET;
        let tcp = work.map(|work| {
            ethernet[ETHERTYPE..].copy_from_slice(&ETHERTYPE_IPV4);
            // Lossless: the options allow no longer frame.
            TcpHead::new((frame_len - ETHERNET.len() as u32) as u16, work)
        });
        Self { ethernet, tcp }
    }

    /// Sets the addresses of the frames.
    pub(super) fn set_addresses(&mut self, to: [u8; ADDRESS_LEN], from: [u8; ADDRESS_LEN]) {
        self.ethernet[..ADDRESS_LEN].copy_from_slice(&to);
        self.ethernet[ADDRESS_LEN..ETHERTYPE].copy_from_slice(&from);
    }

    /// Returns the offset of the time in a frame.
    pub(super) fn stamp(&self) -> usize {
        if self.tcp.is_some() { TCP_HEAD } else { ETHERNET.len() }
    }

    /// Writes the beginning of a frame, with its time.
    #[inline]
    pub(super) fn write(&self, frame: &mut Frame<'_>, stamp: u64) {
        frame.write(0, &self.ethernet);
        if let Some(TcpHead { bytes, offload }) = &self.tcp {
            frame.write(ETHERNET.len(), bytes);
            frame.set_offload(*offload);
        }
        frame.write(self.stamp(), &stamp.to_le_bytes());
    }

    /// Returns the work that is left for a packet that came back, if it is not that with which packets with
    /// this header are sent. `None` also for frames of others. A packet with segments may come with the mark
    /// of a valid checksum.
    #[inline]
    pub(super) fn other_work(&self, frame: &Frame<'_>) -> Option<Offload> {
        let TcpHead { offload, .. } = self.tcp.as_ref()?;
        let mut ethernet = [0; ETHERNET.len()];
        frame.read(0, &mut ethernet);
        if ethernet != self.ethernet {
            return None;
        }
        let size = |offload: &Offload| offload.segmentation.map(|segmentation| segmentation.size);
        let found = frame.offload();
        let is_same = size(&found) == size(offload)
            && (offload.segmentation.is_some() || found.checksum == offload.checksum);
        (!is_same).then_some(found)
    }
}

impl TcpHead {
    /// Returns the headers of a packet of `ip_len` bytes.
    fn new(ip_len: u16, work: Work) -> Self {
        let (mut ip, mut tcp) = (IPV4, TCP);
        ip[IPV4_LEN..IPV4_LEN + 2].copy_from_slice(&ip_len.to_be_bytes());
        let checksum = Sum::default().with(&ip).checksum();
        ip[IPV4_CHECKSUM..IPV4_CHECKSUM + 2].copy_from_slice(&checksum);
        // The card adds the sum of the segment to that of the pseudo-header.
        let tcp_len = ip_len - IPV4.len() as u16;
        let pseudo =
            Sum::default().with(&ip[IPV4_ADDRESSES..]).with(&TCP_PROTOCOL).with(&tcp_len.to_be_bytes());
        tcp[TCP_CHECKSUM..TCP_CHECKSUM + 2].copy_from_slice(&pseudo.to_bytes());
        let mut bytes = [0; TCP_HEAD - ETHERNET.len()];
        bytes[..ip.len()].copy_from_slice(&ip);
        bytes[ip.len()..].copy_from_slice(&tcp);
        let segmentation = match work {
            Work::Checksum => None,
            Work::Segments(size) => {
                let (protocol, header_len) = (Protocol::TcpV4, TCP_HEAD as u16);
                Some(Segmentation { protocol, size, header_len, ecn: false })
            }
        };
        let checksum = Checksum::Partial { start: TCP_START as u16, offset: TCP_CHECKSUM as u16 };
        Self { bytes, offload: Offload { checksum, segmentation } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_headers_of_a_packet_are_right() {
        let lens = [TCP_FRAME_MIN, 1514, 65_000, TCP_FRAME_MAX];
        let works = [Work::Checksum, Work::Segments(1448)];
        for (len, work) in lens.into_iter().flat_map(|len| works.map(|work| (len, work))) {
            let head = Head::new(len, Some(work));
            let bytes = head.tcp.as_ref().unwrap().bytes;
            let (ip, tcp) = bytes.split_at(IPV4.len());
            assert_eq!(Sum::default().with(ip).to_bytes(), [0xff; 2], "the checksum of the IP header");
            assert_eq!(u32::from(u16::from_be_bytes([ip[2], ip[3]])) + 14, len);
            // The pseudo-header: both addresses, the protocol and the length.
            let tcp_len = (len - 34) as u16;
            let pseudo = [&ip[12..], &[0, 6], &tcp_len.to_be_bytes()].concat();
            assert_eq!(Sum::default().with(&pseudo).to_bytes(), tcp[16..18]);
            assert_eq!(head.stamp(), 54);
        }
        let plain = Head::new(64, None);
        assert_eq!((plain.stamp(), plain.tcp.is_none()), (14, true));
    }
}
