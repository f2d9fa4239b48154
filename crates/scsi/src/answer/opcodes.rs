//! The list of supported commands (SPC-4, section 6.35).

use crate::command::{OpcodeSelect, ReportOpcodes};
use crate::cut::cut;
use crate::table::{self, Entry};
use crate::unit::Properties;

/// Length of the descriptor of a command in the list of all.
const DESCRIPTOR: usize = 8;
/// A descriptor of timeouts that names none.
const TIMEOUTS: [u8; 12] = [0, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
/// The bits CTDP and SERVACTV of a descriptor.
const CTDP: u8 = 0x02;
const SERVACTV: u8 = 0x01;
/// The bit CTDP of the answer about one command, and the values of its field SUPPORT.
const ONE_CTDP: u8 = 0x80;
const NOT_SUPPORTED: u8 = 1;
const SUPPORTED: u8 = 3;

/// Returns the answer to REPORT SUPPORTED OPERATION CODES.
pub fn report_opcodes(request: &ReportOpcodes, disk: &Properties) -> Vec<u8> {
    let bytes = match request.select {
        OpcodeSelect::All => all(request.timeouts, disk),
        OpcodeSelect::One { opcode, service_action } => {
            let is_asked = |entry: &&Entry| {
                entry.opcode == opcode && entry.service_action.map(u16::from) == service_action
            };
            one(table::of(disk).find(is_asked), request.timeouts)
        }
    };
    cut(bytes, request.allocation)
}

fn all(timeouts: bool, disk: &Properties) -> Vec<u8> {
    let mut bytes = vec![0; 4];
    for entry in table::of(disk) {
        let flags = entry.service_action.map_or(0, |_| SERVACTV) | if timeouts { CTDP } else { 0 };
        let descriptor: [u8; DESCRIPTOR] =
            [entry.opcode, 0, 0, entry.service_action.unwrap_or(0), 0, flags, 0, entry.len() as u8];
        bytes.extend(descriptor);
        if timeouts {
            bytes.extend(TIMEOUTS);
        }
    }
    let len = bytes.len() as u32 - 4;
    bytes[..4].copy_from_slice(&len.to_be_bytes());
    bytes
}

fn one(entry: Option<&Entry>, timeouts: bool) -> Vec<u8> {
    let Some(entry) = entry else { return vec![0, NOT_SUPPORTED, 0, 0] };
    let flags = SUPPORTED | if timeouts { ONE_CTDP } else { 0 };
    let mut bytes = vec![0, flags, 0, entry.len() as u8];
    bytes.extend(entry.usage());
    if timeouts {
        bytes.extend(TIMEOUTS);
    }
    bytes
}
