//! Completes checksums and segments packets in software, for a driver that did not accept the offloads of a
//! frame. Has no side effects beyond the buffers that it is given.
//!
//! The results are the kernel's: each segment repeats the headers, the identification of IPv4 counts up, FIN
//! and PSH are on the last segment and CWR on the first (Linux, `tcp_gso_segment`).

mod checksum;
mod packet;
mod segments;

pub use checksum::complete_checksum;
pub use segments::Segments;

use crate::frame::Checksum;
use kickless_spec::net::{
    GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, HDR_F_DATA_VALID, HDR_F_NEEDS_CSUM, Header,
    NetFeatures,
};
use packet::ip_version;

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
