//! Vital product data (SPC-4, section 7.8; SBC-3, section 6.5).

use crate::unit::{Identity, Properties};
use kickless_spec::scsi::opcode::{
    VPD_BLOCK_DEVICE_CHARACTERISTICS, VPD_BLOCK_LIMITS, VPD_DEVICE_IDENTIFICATION,
    VPD_LOGICAL_BLOCK_PROVISIONING, VPD_SUPPORTED_PAGES, VPD_UNIT_SERIAL_NUMBER,
};

/// The pages of a disk, in the order of their codes.
pub(crate) const PAGES: [u8; 6] = [
    VPD_SUPPORTED_PAGES,
    VPD_UNIT_SERIAL_NUMBER,
    VPD_DEVICE_IDENTIFICATION,
    VPD_BLOCK_LIMITS,
    VPD_BLOCK_DEVICE_CHARACTERISTICS,
    VPD_LOGICAL_BLOCK_PROVISIONING,
];

/// The code sets and the types of designators.
const BINARY: u8 = 1;
const ASCII: u8 = 2;
const T10_VENDOR_ID: u8 = 1;
const NAA: u8 = 3;
/// Lengths of the pages of SBC-3, without their heads.
const BLOCK_LIMITS_LEN: usize = 0x3c;
const CHARACTERISTICS_LEN: usize = 0x3c;
const PROVISIONING_LEN: usize = 4;
/// The medium rotation rate of a disk that does not rotate.
const NON_ROTATING: u16 = 1;
/// The bit UGAVALID.
const ALIGNMENT_IS_VALID: u32 = 1 << 31;
/// The provisioning types of a disk that frees blocks: as much space as blocks, and less.
const RESOURCE_PROVISIONED: u8 = 1;
const THIN_PROVISIONED: u8 = 2;

/// Returns a page of a disk. A page that it does not have is empty.
pub(crate) fn page(code: u8, disk: &Properties, identity: &Identity) -> Vec<u8> {
    let body = match code {
        VPD_SUPPORTED_PAGES => PAGES.to_vec(),
        VPD_UNIT_SERIAL_NUMBER => identity.serial().as_bytes().to_vec(),
        VPD_DEVICE_IDENTIFICATION => identification(identity),
        VPD_BLOCK_LIMITS => block_limits(disk),
        VPD_BLOCK_DEVICE_CHARACTERISTICS => characteristics(disk),
        VPD_LOGICAL_BLOCK_PROVISIONING => provisioning(disk),
        _ => Vec::new(),
    };
    with_head(0, code, &body)
}

/// Returns the list of pages of a logical unit that has only this one.
pub(crate) fn no_pages(kind: u8) -> Vec<u8> {
    with_head(kind, VPD_SUPPORTED_PAGES, &[VPD_SUPPORTED_PAGES])
}

fn with_head(kind: u8, code: u8, body: &[u8]) -> Vec<u8> {
    let [high, low] = (body.len() as u16).to_be_bytes();
    [&[kind, code, high, low], body].concat()
}

/// Returns the designators of the logical unit (SPC-4, section 7.8.6).
fn identification(identity: &Identity) -> Vec<u8> {
    let serial = identity.serial().as_bytes();
    let t10 = [&identity.vendor()[..], identity.product(), serial].concat();
    let naa = identity.naa();
    let naa_head = [BINARY, NAA, 0, naa.len() as u8];
    [&naa_head[..], &naa, &[ASCII, T10_VENDOR_ID, 0, t10.len() as u8], &t10].concat()
}

fn block_limits(disk: &Properties) -> Vec<u8> {
    let mut body = vec![0; BLOCK_LIMITS_LEN];
    let mut put = |at: usize, bytes: &[u8]| {
        // Positions in the standard count from the head of the page.
        body[at - 4..at - 4 + bytes.len()].copy_from_slice(bytes);
    };
    put(5, &[disk.compare_blocks_max]);
    put(6, &disk.transfer_granularity.to_be_bytes());
    put(8, &disk.transfer_blocks_max.to_be_bytes());
    put(12, &disk.transfer_blocks_best.min(disk.transfer_blocks_max).to_be_bytes());
    if let Some(unmap) = disk.unmap {
        put(20, &unmap.blocks_max.to_be_bytes());
        put(24, &unmap.ranges_max.to_be_bytes());
        put(28, &unmap.granularity.to_be_bytes());
        if unmap.granularity != 0 {
            put(32, &(unmap.alignment | ALIGNMENT_IS_VALID).to_be_bytes());
        }
    }
    put(36, &u64::from(disk.write_same_blocks_max).to_be_bytes());
    body
}

fn characteristics(disk: &Properties) -> Vec<u8> {
    let mut body = vec![0; CHARACTERISTICS_LEN];
    let rotation = if disk.is_solid_state { NON_ROTATING } else { 0 };
    body[..2].copy_from_slice(&rotation.to_be_bytes());
    body
}

fn provisioning(disk: &Properties) -> Vec<u8> {
    let mut body = vec![0; PROVISIONING_LEN];
    let by_write_same = disk.unmaps_by_write_same();
    if disk.unmap.is_some() {
        // LBPU.
        body[1] |= 0x80;
    }
    if by_write_same {
        // LBPWS and LBPWS10.
        body[1] |= 0x60;
    }
    if disk.can_unmap() {
        // LBPRZ.
        body[1] |= if disk.unmapped_reads_zeroes { 0x04 } else { 0 };
        body[2] = if disk.is_thin { THIN_PROVISIONED } else { RESOURCE_PROVISIONED };
    }
    body
}
