//! Cuts a packet of TCP or UDP into segments.

use super::bound::is_bounded;
use super::checksum::finish;
use super::packet::{Packet, TCP, UDP};
use kickless_spec::checksum::Sum;
use kickless_spec::net::{GSO_ECN, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, Header};

const IPV4_TOTAL_LENGTH: usize = 2;
const IPV4_IDENTIFICATION: usize = 4;
const IPV4_CHECKSUM: usize = 10;
const IPV6_PAYLOAD_LENGTH: usize = 4;
const IPV6_HEADER: usize = 40;
const TCP_SEQUENCE: usize = 4;
const TCP_FLAGS: usize = 13;
const TCP_CHECKSUM: usize = 16;
const UDP_LENGTH: usize = 4;
const UDP_CHECKSUM: usize = 6;

const FIN: u8 = 0x01;
const PSH: u8 = 0x08;
const CWR: u8 = 0x80;

/// The segments of one frame that are not made yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segments {
    packet: Packet,
    /// Bytes of payload in each segment but the last.
    size: usize,
    /// Offset of the next segment's payload in the frame.
    next: usize,
    /// The number of the next segment, from 0.
    number: u32,
    is_done: bool,
}

impl Segments {
    /// Begins to segment a frame. Returns `None` if its header does not describe a packet that the frame
    /// contains. Returns `None` also for more than [`SEGMENTS_MAX`](super::SEGMENTS_MAX) segments, or more
    /// than [`SEGMENTED_BYTES_MAX`](super::SEGMENTED_BYTES_MAX) bytes of all segments.
    pub fn of(header: &Header, frame: &[u8]) -> Option<Self> {
        let packet = Packet::find(frame)?;
        let (protocol, version, checksum) = match header.gso_type & !GSO_ECN {
            GSO_TCPV4 => (TCP, 4, TCP_CHECKSUM),
            GSO_TCPV6 => (TCP, 6, TCP_CHECKSUM),
            GSO_UDP_L4 => (UDP, packet.version, UDP_CHECKSUM),
            _ => return None,
        };
        // Another packet may be inside of this one. The card would have to segment that one.
        let is_this = usize::from(header.csum_start.get()) == packet.transport
            && usize::from(header.csum_offset.get()) == checksum;
        let size = usize::from(header.gso_size.get());
        if (packet.protocol, packet.version) != (protocol, version) || !is_this || size == 0 {
            return None;
        }
        if !is_bounded(packet.payload, frame.len() - packet.payload, size) {
            return None;
        }
        let segments = Self { packet, size, next: packet.payload, number: 0, is_done: false };
        // A longer packet has no length in its header.
        (segments.len_max(frame) - packet.ip <= usize::from(u16::MAX)).then_some(segments)
    }

    /// Returns the length of the longest segment of this frame.
    pub fn len_max(&self, frame: &[u8]) -> usize {
        self.packet.payload + self.size.min(frame.len().saturating_sub(self.packet.payload))
    }

    /// Returns the number of segments of this frame that are not made yet.
    pub fn count(&self, frame: &[u8]) -> usize {
        match self.is_done {
            true => 0,
            // A packet without payload has one.
            false => frame.len().saturating_sub(self.next).div_ceil(self.size).max(1),
        }
    }

    /// Returns the number of segments that were made.
    pub fn made(&self) -> usize {
        self.number as usize
    }

    /// Returns the length of the next segment of this frame, or `None` after the last one.
    pub fn next_len(&self, frame: &[u8]) -> Option<usize> {
        let left = frame.len().saturating_sub(self.next);
        (!self.is_done).then(|| self.packet.payload + self.size.min(left))
    }

    /// Returns the number of bytes of all segments of this frame that are not made yet.
    pub fn bytes(&self, frame: &[u8]) -> usize {
        let payload = if self.is_done { 0 } else { frame.len().saturating_sub(self.next) };
        payload + self.count(frame) * self.packet.payload
    }

    /// Writes the next segment of `frame`, the one of [`Segments::of`], to the beginning of `into`. Returns
    /// its length, or `None` after the last one. `into` has [`Segments::len_max`] bytes at least.
    pub fn write_next(&mut self, frame: &[u8], into: &mut [u8]) -> Option<usize> {
        if self.is_done {
            return None;
        }
        let Packet { payload, .. } = self.packet;
        let end = (self.next + self.size).min(frame.len());
        let data = frame.get(self.next..end)?;
        let segment = into.get_mut(..payload + data.len())?;
        segment[..payload].copy_from_slice(frame.get(..payload)?);
        segment[payload..].copy_from_slice(data);
        let is_last = end == frame.len();
        self.set_headers(segment, frame.len(), is_last);
        self.next = end;
        self.number = self.number.wrapping_add(1);
        self.is_done = is_last;
        Some(payload + data.len())
    }

    /// Makes the copied headers those of this segment. `whole` is the length of the frame.
    fn set_headers(&self, segment: &mut [u8], whole: usize, is_last: bool) {
        let Packet { version, protocol, ip, transport, payload } = self.packet;
        let (head, rest) = segment.split_at_mut(transport);
        let ip_header = &mut head[ip..];
        // Lossless, because IP has at most 65536 bytes in a frame.
        let (len_before, len) = ((whole - transport) as u32, rest.len() as u32);
        let ip_len = ip_header.len() as u32 + len;
        if version == 4 {
            put(ip_header, IPV4_TOTAL_LENGTH, ip_len as u16);
            let identification = get(ip_header, IPV4_IDENTIFICATION).wrapping_add(self.number as u16);
            put(ip_header, IPV4_IDENTIFICATION, identification);
            put(ip_header, IPV4_CHECKSUM, 0);
            let checksum = Sum::default().with(ip_header).checksum();
            ip_header[IPV4_CHECKSUM..IPV4_CHECKSUM + 2].copy_from_slice(&checksum);
        } else {
            put(ip_header, IPV6_PAYLOAD_LENGTH, (ip_len - IPV6_HEADER as u32) as u16);
        }
        let checksum_at = match protocol {
            TCP => {
                let sequence = u32::from_be_bytes([rest[4], rest[5], rest[6], rest[7]]);
                let offset = (self.next - payload) as u32;
                rest[TCP_SEQUENCE..TCP_SEQUENCE + 4]
                    .copy_from_slice(&sequence.wrapping_add(offset).to_be_bytes());
                if !is_last {
                    rest[TCP_FLAGS] &= !(FIN | PSH);
                }
                if self.number > 0 {
                    rest[TCP_FLAGS] &= !CWR;
                }
                TCP_CHECKSUM
            }
            _ => {
                put(rest, UDP_LENGTH, len as u16);
                UDP_CHECKSUM
            }
        };
        // The field holds the sum of the pseudo-header, which contains the length of the whole packet. The
        // length of the segment takes its place.
        let sum = Sum::default().with(&(!len_before).to_be_bytes()).with(&len.to_be_bytes()).with(rest);
        let checksum = if protocol == UDP { finish(sum) } else { sum.checksum() };
        rest[checksum_at..checksum_at + 2].copy_from_slice(&checksum);
    }
}

fn get(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn put(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_be_bytes());
}
