//! The table of the supported commands. The parser, the bits that it evaluates, and the answer to REPORT
//! SUPPORTED OPERATION CODES all follow it.

use crate::unit::Properties;
use kickless_spec::scsi::opcode::*;

/// The mask of the service action in the second byte of a command.
pub(crate) const SERVICE_ACTION: u8 = 0x1f;
/// The bit NACA of the control byte, the last one of a command (SAM-5, section 5.2).
pub(crate) const NACA: u8 = 0x04;
/// Length of the longest command in the table.
pub(crate) const CDB_LEN_MAX: usize = 16;

/// A supported command.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) opcode: u8,
    pub(crate) service_action: Option<u8>,
    pub(crate) form: Form,
    /// The bits that the parser evaluates, of all bytes behind the first one, without the service action. DPO
    /// is always among them, because it is a hint, and a command with it is valid.
    usage: &'static [u8],
}

/// The layout of a command, which says how it is parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    TestUnitReady,
    RequestSense,
    Read,
    Write,
    Inquiry,
    ModeSelect,
    Reserve,
    Release,
    ModeSense,
    StartStopUnit,
    PreventAllow,
    ReadCapacity10,
    WriteAndVerify,
    Verify,
    SynchronizeCache,
    WriteSame,
    Unmap,
    PersistentIn,
    PersistentOut,
    CompareAndWrite,
    ReadCapacity16,
    GetLbaStatus,
    ReportLuns,
    ReportOpcodes,
}

/// All supported commands, by operation code and service action.
#[rustfmt::skip]
const TABLE: &[Entry] = &[
    entry(TEST_UNIT_READY, Form::TestUnitReady, &[0, 0, 0, 0, NACA]),
    entry(REQUEST_SENSE, Form::RequestSense, &[0x01, 0, 0, 0xff, NACA]),
    entry(READ_6, Form::Read, &[0x1f, 0xff, 0xff, 0xff, NACA]),
    entry(WRITE_6, Form::Write, &[0x1f, 0xff, 0xff, 0xff, NACA]),
    entry(INQUIRY, Form::Inquiry, &[0x03, 0xff, 0xff, 0xff, NACA]),
    entry(MODE_SELECT_6, Form::ModeSelect, &[0x11, 0, 0, 0xff, NACA]),
    entry(RESERVE_6, Form::Reserve, &[0x11, 0, 0, 0, NACA]),
    entry(RELEASE_6, Form::Release, &[0x11, 0, 0, 0, NACA]),
    entry(MODE_SENSE_6, Form::ModeSense, &[0x08, 0xff, 0xff, 0xff, NACA]),
    entry(START_STOP_UNIT, Form::StartStopUnit, &[0x01, 0, 0, 0xf7, NACA]),
    entry(PREVENT_ALLOW_MEDIUM_REMOVAL, Form::PreventAllow, &[0, 0, 0, 0x03, NACA]),
    entry(READ_CAPACITY_10, Form::ReadCapacity10, &[0, 0, 0, 0, 0, 0, 0, 0, NACA]),
    entry(READ_10, Form::Read, &[0xf8, 0xff, 0xff, 0xff, 0xff, 0, 0xff, 0xff, NACA]),
    entry(WRITE_10, Form::Write, &[0xf8, 0xff, 0xff, 0xff, 0xff, 0, 0xff, 0xff, NACA]),
    entry(WRITE_AND_VERIFY_10, Form::WriteAndVerify, &[0xf6, 0xff, 0xff, 0xff, 0xff, 0, 0xff, 0xff, NACA]),
    entry(VERIFY_10, Form::Verify, &[0xf6, 0xff, 0xff, 0xff, 0xff, 0, 0xff, 0xff, NACA]),
    entry(SYNCHRONIZE_CACHE_10, Form::SynchronizeCache, &[0x02, 0xff, 0xff, 0xff, 0xff, 0, 0xff, 0xff, NACA]),
    entry(WRITE_SAME_10, Form::WriteSame, &[0xfe, 0xff, 0xff, 0xff, 0xff, 0, 0xff, 0xff, NACA]),
    entry(UNMAP, Form::Unmap, &[0x01, 0, 0, 0, 0, 0, 0xff, 0xff, NACA]),
    entry(MODE_SELECT_10, Form::ModeSelect, &[0x11, 0, 0, 0, 0, 0, 0xff, 0xff, NACA]),
    entry(RESERVE_10, Form::Reserve, &[0x11, 0, 0, 0, 0, 0, 0, 0, NACA]),
    entry(RELEASE_10, Form::Release, &[0x11, 0, 0, 0, 0, 0, 0, 0, NACA]),
    entry(MODE_SENSE_10, Form::ModeSense, &[0x18, 0xff, 0xff, 0, 0, 0, 0xff, 0xff, NACA]),
    action(PERSISTENT_RESERVE_IN, PRIN_READ_KEYS, Form::PersistentIn, PERSISTENT_IN),
    action(PERSISTENT_RESERVE_IN, PRIN_READ_RESERVATION, Form::PersistentIn, PERSISTENT_IN),
    action(PERSISTENT_RESERVE_IN, PRIN_REPORT_CAPABILITIES, Form::PersistentIn, PERSISTENT_IN),
    action(PERSISTENT_RESERVE_IN, PRIN_READ_FULL_STATUS, Form::PersistentIn, PERSISTENT_IN),
    action(PERSISTENT_RESERVE_OUT, PROUT_REGISTER, Form::PersistentOut, PERSISTENT_OUT),
    action(PERSISTENT_RESERVE_OUT, PROUT_RESERVE, Form::PersistentOut, PERSISTENT_OUT_TYPED),
    action(PERSISTENT_RESERVE_OUT, PROUT_RELEASE, Form::PersistentOut, PERSISTENT_OUT_TYPED),
    action(PERSISTENT_RESERVE_OUT, PROUT_CLEAR, Form::PersistentOut, PERSISTENT_OUT),
    action(PERSISTENT_RESERVE_OUT, PROUT_PREEMPT, Form::PersistentOut, PERSISTENT_OUT_TYPED),
    action(PERSISTENT_RESERVE_OUT, PROUT_PREEMPT_AND_ABORT, Form::PersistentOut, PERSISTENT_OUT_TYPED),
    action(PERSISTENT_RESERVE_OUT, PROUT_REGISTER_AND_IGNORE, Form::PersistentOut, PERSISTENT_OUT),
    entry(READ_16, Form::Read, &long(0xf8, [0xff; 4])),
    entry(COMPARE_AND_WRITE, Form::CompareAndWrite, &long(0xf8, [0, 0, 0, 0xff])),
    entry(WRITE_16, Form::Write, &long(0xf8, [0xff; 4])),
    entry(WRITE_AND_VERIFY_16, Form::WriteAndVerify, &long(0xf6, [0xff; 4])),
    entry(VERIFY_16, Form::Verify, &long(0xf6, [0xff; 4])),
    entry(SYNCHRONIZE_CACHE_16, Form::SynchronizeCache, &long(0x02, [0xff; 4])),
    entry(WRITE_SAME_16, Form::WriteSame, &long(0xff, [0xff; 4])),
    action(SERVICE_ACTION_IN_16, SAI_READ_CAPACITY_16, Form::ReadCapacity16,
        &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, NACA]),
    action(SERVICE_ACTION_IN_16, SAI_GET_LBA_STATUS, Form::GetLbaStatus, &long(0, [0xff; 4])),
    entry(REPORT_LUNS, Form::ReportLuns, &[0, 0xff, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, NACA]),
    action(MAINTENANCE_IN, MI_REPORT_SUPPORTED_OPERATION_CODES, Form::ReportOpcodes,
        &[0, 0x87, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, NACA]),
    entry(READ_12, Form::Read, &[0xf8, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, NACA]),
    entry(WRITE_12, Form::Write, &[0xf8, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, NACA]),
    entry(WRITE_AND_VERIFY_12, Form::WriteAndVerify,
        &[0xf6, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, NACA]),
    entry(VERIFY_12, Form::Verify, &[0xf6, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, NACA]),
];

const PERSISTENT_IN: &[u8] = &[0, 0, 0, 0, 0, 0, 0xff, 0xff, NACA];
const PERSISTENT_OUT: &[u8] = &[0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, NACA];
/// The mask of service actions with a scope and a type.
const PERSISTENT_OUT_TYPED: &[u8] = &[0, 0xff, 0, 0, 0xff, 0xff, 0xff, 0xff, NACA];

const fn entry(opcode: u8, form: Form, usage: &'static [u8]) -> Entry {
    Entry { opcode, service_action: None, form, usage }
}

const fn action(opcode: u8, service_action: u8, form: Form, usage: &'static [u8]) -> Entry {
    Entry { opcode, service_action: Some(service_action), form, usage }
}

/// Returns the mask of a command of 16 bytes with the address of a block. The group number is not evaluated.
const fn long(flags: u8, [a, b, c, d]: [u8; 4]) -> [u8; CDB_LEN_MAX - 1] {
    let f = 0xff;
    [flags, f, f, f, f, f, f, f, f, a, b, c, d, 0, NACA]
}

/// The position in the table of the first command with each operation code. There is none if the command at
/// the position has another operation code.
const FIRST: [u8; 256] = {
    let mut first = [0; 256];
    let mut at = TABLE.len();
    while at > 0 {
        at -= 1;
        first[TABLE[at].opcode as usize] = at as u8;
    }
    first
};

/// Returns the commands with this operation code that a logical unit has. There are several if it has service
/// actions.
#[inline]
pub(crate) fn with_opcode(opcode: u8) -> &'static [Entry] {
    let from = &TABLE[usize::from(FIRST[usize::from(opcode)])..];
    let count = from.iter().take_while(|entry| entry.opcode == opcode).count();
    &from[..count]
}

/// Returns all commands that a disk has.
pub(crate) fn of(properties: &Properties) -> impl Iterator<Item = &'static Entry> {
    TABLE.iter().filter(|entry| entry.is_supported(properties))
}

impl Entry {
    /// Returns the length of the command.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        1 + self.usage.len()
    }

    /// Returns whether the disk has this command.
    #[inline]
    pub(crate) fn is_supported(&self, properties: &Properties) -> bool {
        match self.form {
            Form::Unmap => properties.unmap.is_some(),
            Form::WriteSame => properties.write_same_blocks_max != 0,
            Form::CompareAndWrite => properties.compare_blocks_max != 0,
            _ => true,
        }
    }

    /// Returns the usage data of the command: its operation code and service action, and masks of the bits
    /// that are evaluated (SPC-4, section 6.35.3).
    pub(crate) fn usage(&self) -> impl Iterator<Item = u8> {
        let action = self.service_action.unwrap_or(0);
        let rest =
            self.usage.iter().enumerate().map(move |(at, mask)| if at == 0 { mask | action } else { *mask });
        std::iter::once(self.opcode).chain(rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_order() {
        assert!(TABLE.iter().map(|entry| (entry.opcode, entry.service_action)).is_sorted_by(|a, b| a < b));
        assert!(TABLE.len() < 256);
    }

    /// The upper three bits of an operation code are the length of the command (SPC-4, section 4.2.5.1).
    #[test]
    fn lengths_are_those_of_the_groups() {
        for entry in TABLE {
            let len = match entry.opcode >> 5 {
                0 => 6,
                1 | 2 => 10,
                4 => 16,
                _ => 12,
            };
            assert_eq!(entry.len(), len, "{entry:?}");
            assert_eq!(entry.usage.last(), Some(&NACA));
            assert!(entry.service_action.is_none() || entry.usage[0] & SERVICE_ACTION == 0, "{entry:?}");
        }
    }

    #[test]
    fn commands_are_found_by_operation_code() {
        for opcode in 0..=255 {
            let expected = TABLE.iter().filter(|entry| entry.opcode == opcode).count();
            let found = with_opcode(opcode);
            assert!(found.len() == expected && found.iter().all(|entry| entry.opcode == opcode));
        }
    }
}
