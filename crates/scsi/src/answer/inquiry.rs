//! Standard INQUIRY data (SPC-4, section 6.6.2).

use crate::command::Inquiry;
use crate::cut::cut;
use crate::unit::{Identity, Unit};
use crate::vpd;

/// Length of the data: up to the eight version descriptors, and 22 reserved bytes.
const LEN: usize = 96;
/// The type of a disk, of a well-known logical unit, and of nothing, in the first byte.
const DISK: u8 = 0x00;
const WELL_KNOWN: u8 = 0x1e;
const ABSENT: u8 = 0x7f;
/// Version: SPC-4.
const VERSION: u8 = 6;
/// HISUP, because numbers of logical units are hierarchical, and response data format 2.
const FORMAT: u8 = 0x12;
/// CMDQUE: the logical unit queues commands.
const CMDQUE: u8 = 0x02;
/// Version descriptors: SAM-5, SPC-4, SBC-3, no version claimed.
const VERSIONS: [u16; 3] = [0x00a0, 0x0460, 0x04c0];
const VERSIONS_AT: usize = 58;

/// Returns the answer to INQUIRY. An absent logical unit answers with the identity of any one of its target.
pub fn inquiry(request: &Inquiry, unit: Unit<'_>, identity: &Identity) -> Vec<u8> {
    let kind = match unit {
        Unit::Disk(_) => DISK,
        Unit::ReportLuns => WELL_KNOWN,
        Unit::Absent => ABSENT,
    };
    let bytes = match (request.page, unit) {
        (None, _) => standard(kind, identity),
        (Some(page), Unit::Disk(disk)) => vpd::page(page, disk, identity),
        (Some(_), _) => vpd::no_pages(kind),
    };
    cut(bytes, request.allocation)
}

fn standard(kind: u8, identity: &Identity) -> Vec<u8> {
    let mut bytes = vec![0; LEN];
    bytes[0] = kind;
    bytes[2] = VERSION;
    bytes[3] = FORMAT;
    bytes[4] = LEN as u8 - 5;
    bytes[7] = CMDQUE;
    bytes[8..16].copy_from_slice(identity.vendor());
    bytes[16..32].copy_from_slice(identity.product());
    bytes[32..36].copy_from_slice(identity.revision());
    for (version, at) in VERSIONS.into_iter().zip((VERSIONS_AT..).step_by(2)) {
        bytes[at..at + 2].copy_from_slice(&version.to_be_bytes());
    }
    bytes
}
