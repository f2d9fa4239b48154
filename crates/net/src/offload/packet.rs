//! Finds the headers of a packet in a frame.

use crate::frame::header::Checksum;
use crate::frame::protocols::{
    AUTHENTICATION, ETHERTYPE_ARP, ETHERTYPE_IPV4, ETHERTYPE_IPV6, ETHERTYPE_SERVICE, ETHERTYPE_VLAN, ICMPV6,
    IPV6_EXTENSIONS, IPV6_HEADER, IPV6_NEXT_HEADER,
};
use kickless_spec::net::{ETHERNET_HEADER_LEN, VLAN_TAG_LEN};

/// VLAN tags that are looked for. Networks use two at most.
const TAGS_MAX: usize = 2;

const IPV4_HEADER_MIN: usize = 20;
const IPV4_PROTOCOL: usize = 9;

pub(super) const TCP: u8 = 6;
pub(super) const UDP: u8 = 17;
const TCP_HEADER_MIN: usize = 20;
const TCP_DATA_OFFSET: usize = 12;
const UDP_HEADER: usize = 8;

const ICMPV6_CHECKSUM: u16 = 2;

/// The places of the headers in a frame with a TCP or UDP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Packet {
    /// 4 or 6.
    pub(super) version: u8,
    /// [`TCP`] or [`UDP`].
    pub(super) protocol: u8,
    /// Offset of the IP header.
    pub(super) ip: usize,
    /// Offset of the TCP or UDP header.
    pub(super) transport: usize,
    /// Offset of the data.
    pub(super) payload: usize,
}

/// Returns the version of IP in the frame, or `None` for other packets.
pub(super) fn ip_version(frame: &[u8]) -> Option<u8> {
    ip_header(frame).map(|(version, _)| version)
}

/// Returns the version of IP, and the offset of its header.
fn ip_header(frame: &[u8]) -> Option<(u8, usize)> {
    match behind_tags(frame)? {
        (ETHERTYPE_IPV4, at) => Some((4, at)),
        (ETHERTYPE_IPV6, at) => Some((6, at)),
        _ => None,
    }
}

/// Returns the type of the packet in a frame, and its offset. `None` if the frame has too many tags.
fn behind_tags(frame: &[u8]) -> Option<(u16, usize)> {
    let mut at = ETHERNET_HEADER_LEN;
    for _ in 0..=TAGS_MAX {
        let kind = u16::from_be_bytes([*frame.get(at - 2)?, *frame.get(at - 1)?]);
        if ![ETHERTYPE_VLAN, ETHERTYPE_SERVICE].contains(&kind) {
            return Some((kind, at));
        }
        at += VLAN_TAG_LEN;
    }
    None
}

/// Returns whether a checksum in this place changes nothing that the rules of a switch have judged: the
/// addresses and tags of a frame, and the hardware addresses in packets of ARP and of neighbour discovery.
/// Guests choose the place and the value of a checksum.
pub(crate) fn may_have_checksum(frame: &[u8], at: Checksum) -> bool {
    let start = usize::from(at.start);
    match behind_tags(frame) {
        None | Some((ETHERTYPE_ARP, _)) => false,
        Some((ETHERTYPE_IPV6, packet)) => match ipv6(frame, packet) {
            Some((ICMPV6, message)) => (start, at.offset) == (message, ICMPV6_CHECKSUM),
            Some((next, upper)) => next != AUTHENTICATION && start >= upper,
            None => false,
        },
        Some((_, packet)) => start >= packet,
    }
}

impl Packet {
    /// Finds the headers of a frame. Returns `None` if it is no whole TCP or UDP packet, or a fragment.
    pub(super) fn find(frame: &[u8]) -> Option<Self> {
        let (version, ip) = ip_header(frame)?;
        let (protocol, transport) = match version {
            4 => ipv4(frame, ip)?,
            _ => ipv6(frame, ip)?,
        };
        let header = match protocol {
            TCP => {
                let len = usize::from(*frame.get(transport + TCP_DATA_OFFSET)? >> 4) * 4;
                if len < TCP_HEADER_MIN {
                    return None;
                }
                len
            }
            UDP => UDP_HEADER,
            _ => return None,
        };
        let payload = transport + header;
        (payload <= frame.len()).then_some(Self { version, protocol, ip, transport, payload })
    }
}

fn ipv4(frame: &[u8], ip: usize) -> Option<(u8, usize)> {
    let first = *frame.get(ip)?;
    let len = usize::from(first & 0xf) * 4;
    // The fragment's offset, or "more fragments".
    let fragment = u16::from_be_bytes([*frame.get(ip + 6)?, *frame.get(ip + 7)?]) & 0x3fff;
    if first >> 4 != 4 || len < IPV4_HEADER_MIN || fragment != 0 {
        return None;
    }
    Some((*frame.get(ip + IPV4_PROTOCOL)?, ip + len))
}

fn ipv6(frame: &[u8], ip: usize) -> Option<(u8, usize)> {
    if *frame.get(ip)? >> 4 != 6 {
        return None;
    }
    let (mut next, mut at) = (*frame.get(ip + IPV6_NEXT_HEADER)?, ip + IPV6_HEADER);
    // Segments repeat these headers. Each turn moves forward by 8 bytes at least, so the end of the frame
    // ends the loop.
    while IPV6_EXTENSIONS.contains(&next) {
        next = *frame.get(at)?;
        at += (usize::from(*frame.get(at + 1)?) + 1) * 8;
    }
    Some((next, at))
}
