//! The list of logical units (SPC-4, section 6.33).

use crate::address::report_luns_entry;
use crate::command::LunSelect;
use crate::cut::cut;
use crate::number::at_most_u32;
use kickless_spec::scsi::LUN_LEN;

/// Length of the head of the list.
const HEAD: usize = 8;

/// Returns the answer to REPORT LUNS. `ordinary` has an [`entry`](crate::entry) for each logical unit of the
/// target, or an address for each one of the controller.
pub fn report_luns(select: LunSelect, ordinary: &[[u8; LUN_LEN]], allocation: u32) -> Vec<u8> {
    let well_known = report_luns_entry();
    let (ordinary, well_known): (&[_], &[_]) = match select {
        LunSelect::Ordinary => (ordinary, &[]),
        LunSelect::WellKnown => (&[], &[well_known]),
        LunSelect::All => (ordinary, &[well_known]),
    };
    let len = (ordinary.len() + well_known.len()) * LUN_LEN;
    let mut bytes = Vec::with_capacity((HEAD + len).min(allocation as usize + LUN_LEN));
    bytes.extend(at_most_u32(len as u64).to_be_bytes());
    bytes.extend([0; 4]);
    for entry in ordinary.iter().chain(well_known) {
        if bytes.len() >= allocation as usize {
            break;
        }
        bytes.extend(entry);
    }
    cut(bytes, allocation)
}
