//! Completes checksums and segments packets in software, for a driver that did not accept the offloads of a
//! frame. Has no side effects beyond the buffers that it is given.
//!
//! The results are the kernel's: each segment repeats the headers, the identification of IPv4 counts up, FIN
//! and PSH are on the last segment and CWR on the first (Linux, `tcp_gso_segment`).

mod bound;
mod checksum;
mod packet;
mod segments;

pub use bound::{SEGMENTED_BYTES_MAX, SEGMENTS_MAX};
pub(crate) use bound::{TCP_HEADER, UDP_HEADER, count_max, may_be_segmented};
pub use checksum::complete_checksum;
pub(crate) use packet::may_have_checksum;
pub use segments::Segments;

use crate::frame::header::Checksum;
use crate::frame::loop_queue::is_plain;
use kickless_spec::net::{
    GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, HDR_F_DATA_VALID, HDR_F_NEEDS_CSUM, Header,
    NetFeatures,
};
use packet::ip_version;
use zerocopy::FromBytes;

/// The work that a frame needs before a driver can receive it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Undo {
    /// None: the driver accepted all of its offloads.
    Nothing,
    /// The card completes this checksum.
    Checksum(Checksum),
    /// The card segments the packet ([`Segments`]).
    Segments,
}

/// Returns the work that a frame with this header needs before a driver can receive it that `accepted` these
/// `GUEST_*` features.
#[inline]
pub fn undo(header: &Header, frame: &[u8], accepted: NetFeatures) -> Undo {
    if header.gso_type != GSO_NONE && !accepts_segmentation(header, frame, accepted) {
        return Undo::Segments;
    }
    if header.flags & HDR_F_NEEDS_CSUM != 0 && !accepted.contains(NetFeatures::GUEST_CSUM) {
        let (start, offset) = (header.csum_start.get(), header.csum_offset.get());
        return Undo::Checksum(Checksum { start, offset });
    }
    Undo::Nothing
}

fn accepts_segmentation(header: &Header, frame: &[u8], accepted: NetFeatures) -> bool {
    let needs = match header.gso_type & !GSO_ECN {
        GSO_TCPV4 => NetFeatures::GUEST_TSO4,
        GSO_TCPV6 => NetFeatures::GUEST_TSO6,
        GSO_UDP_L4 => match ip_version(frame) {
            Some(4) => NetFeatures::GUEST_USO4,
            Some(6) => NetFeatures::GUEST_USO6,
            _ => return false,
        },
        _ => return false,
    };
    let has_ecn = header.gso_type & GSO_ECN != 0;
    accepted.contains(needs | NetFeatures::GUEST_CSUM)
        && (!has_ecn || accepted.contains(NetFeatures::GUEST_ECN))
}

/// Returns the header of a received frame for a driver that takes the frame as it is. Leaves out the fields
/// that have no meaning there, and a mark of a valid checksum that the driver did not ask for.
pub(crate) fn received_header(header: &Header, accepted: NetFeatures) -> Header {
    let flags = match accepted.contains(NetFeatures::GUEST_CSUM) {
        true => header.flags & (HDR_F_NEEDS_CSUM | HDR_F_DATA_VALID),
        false => 0,
    };
    Header { flags, num_buffers: 0.into(), ..*header }
}

/// Returns whether a driver receives this frame in one buffer as it is, header included. It `accepted` these
/// `GUEST_*` features. The first 64 bytes behind the header decide.
#[inline]
pub(crate) fn passes_as_is(frame: &[u8], accepted: NetFeatures) -> bool {
    is_plain(frame) || is_accepted(frame, accepted)
}

/// Decides for a frame with offloads.
#[inline(never)]
fn is_accepted(frame: &[u8], accepted: NetFeatures) -> bool {
    let Ok((header, frame)) = Header::read_from_prefix(frame) else { return false };
    let received = Header { num_buffers: 1.into(), ..received_header(&header, accepted) };
    received == header && undo(&header, frame, accepted) == Undo::Nothing
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::header::Frame;
    use crate::frame::loop_queue::HEADER;
    use kickless_spec::net::GSO_UDP;
    use proptest::prelude::*;
    use zerocopy::IntoBytes;

    /// Returns any header. Most have values that drivers use.
    fn header() -> impl Strategy<Value = Header> {
        let flags = prop_oneof![4 => 0..4u8, 1 => any::<u8>()];
        let kinds = [GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP, GSO_UDP_L4, GSO_ECN]
            .into_iter()
            .flat_map(|kind| [kind, kind | GSO_ECN])
            .collect::<Vec<_>>();
        let gso_type = prop_oneof![8 => prop::sample::select(kinds), 1 => any::<u8>()];
        let word = || prop_oneof![4 => Just(0), 4 => 1..40u16, 1 => any::<u16>()];
        (flags, gso_type, [word(), word(), word(), word(), word()]).prop_map(|(flags, gso_type, words)| {
            let [hdr_len, gso_size, csum_start, csum_offset, num_buffers] = words.map(Into::into);
            Header { flags, gso_type, hdr_len, gso_size, csum_start, csum_offset, num_buffers }
        })
    }

    /// Returns a frame of IPv4, of IPv6 or of another protocol, with up to three tags.
    fn frame() -> impl Strategy<Value = Vec<u8>> {
        let kind = prop::sample::select(vec![0x0800u16, 0x86dd, 0x0806]);
        (0..4usize, kind, prop::collection::vec(any::<u8>(), 0..150)).prop_map(|(tags, kind, payload)| {
            let tags = [0x81, 0, 0, 5].repeat(tags);
            [&[2; 12][..], &tags, &kind.to_be_bytes(), &payload].concat()
        })
    }

    /// Returns the header that a driver receives in one buffer, if the frame passes as it is. The steps are
    /// those of a frame that is delivered alone.
    fn received_alone(header: &Header, frame: &[u8], accepted: NetFeatures) -> Option<Header> {
        (undo(header, frame, accepted) == Undo::Nothing)
            .then(|| Header { num_buffers: 1.into(), ..received_header(header, accepted) })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]
        /// Headers of any port, and those that the card of a sender with these features passes on.
        #[test]
        fn a_frame_passes_with_the_header_that_it_has_alone(
            header in header(),
            frame in frame(),
            host in any::<u64>(),
            guest in any::<u64>(),
        ) {
            let accepted = NetFeatures::GUEST_OFFLOADS & NetFeatures::from_bits_truncate(guest);
            let passes = |header: &Header| passes_as_is(&[header.as_bytes(), &frame].concat(), accepted);
            prop_assert_eq!(passes(&header), received_alone(&header, &frame, accepted) == Some(header));
            let len = (HEADER + frame.len()) as u64;
            if let Ok(parsed) = Frame::parse(&header, HEADER, len, NetFeatures::from_bits_truncate(host)) {
                let passed = Header { num_buffers: 1.into(), ..parsed.header(&header) };
                let alone = received_alone(&passed, &frame, accepted);
                prop_assert!(alone.is_none_or(|alone| alone == passed));
                prop_assert_eq!(passes(&passed), alone.is_some());
                // The receiver of a parcel has only the head of a frame.
                let head = &[passed.as_bytes(), &frame[..frame.len().min(64)]].concat();
                prop_assert_eq!(passes_as_is(head, accepted), alone.is_some());
            }
        }
    }

    #[test]
    fn a_mark_that_the_driver_did_not_ask_for_does_not_pass() {
        let marked = Header { flags: HDR_F_DATA_VALID, num_buffers: 1.into(), ..Header::default() };
        let frame = [marked.as_bytes(), &[0; 60]].concat();
        assert!(passes_as_is(&frame, NetFeatures::GUEST_CSUM));
        assert!(!passes_as_is(&frame, NetFeatures::GUEST_TSO4));
    }
}
