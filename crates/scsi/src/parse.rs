//! Parses commands. This is pure: it takes bytes and the properties of the disk, and returns a command.

mod control;
mod fields;
mod medium;

use crate::command::Command;
use crate::sense::{FieldPointer, Sense};
use crate::table::{self, CDB_LEN_MAX, Entry, Form, NACA, SERVICE_ACTION};
use crate::unit::{Properties, Unit};

/// Parses a command.
///
/// `cdb` is the field of the request, which may be longer than the command. Bits that SPC-4 reserves are
/// ignored.
///
/// # Errors
/// The command does not exist, has an invalid field, or does not fit the disk. The fields of the command are
/// checked first, then whether the disk may be written, and then whether the blocks are on it.
#[inline]
pub fn parse(cdb: &[u8], unit: Unit<'_>) -> Result<Command, Sense> {
    let opcode = *cdb.first().ok_or(missing(0))?;
    match unit {
        Unit::Disk(properties) => {
            let entry = find(table::with_opcode(opcode), cdb, properties)?;
            on_disk(entry, &checked(entry, cdb)?, properties)
        }
        _ => elsewhere(opcode, cdb, unit),
    }
}

/// Returns the command of the table that `cdb` is.
#[inline]
fn find(entries: &'static [Entry], cdb: &[u8], properties: &Properties) -> Result<&'static Entry, Sense> {
    match entries {
        [entry] if entry.service_action.is_none() => match entry.is_supported(properties) {
            true => Ok(entry),
            false => Err(Sense::INVALID_OPCODE),
        },
        [] => Err(Sense::INVALID_OPCODE),
        entries => {
            let action = cdb.get(1).ok_or(missing(1))? & SERVICE_ACTION;
            let of_action = entries.iter().find(|entry| entry.service_action == Some(action));
            of_action.ok_or(Sense::invalid_field(1, 4))
        }
    }
}

/// Returns the bytes of the command, filled up with zeroes.
#[inline]
fn checked(entry: &Entry, cdb: &[u8]) -> Result<[u8; CDB_LEN_MAX], Sense> {
    let len = entry.len();
    let bytes = cdb.get(..len).ok_or(missing(cdb.len()))?;
    let mut command = [0; CDB_LEN_MAX];
    command[..len].copy_from_slice(bytes);
    match bytes[len - 1] & NACA {
        0 => Ok(command),
        _ => Err(Sense::invalid_field(len as u16 - 1, 2)),
    }
}

/// Makes the sense of a command that the field of the request has no room for.
fn missing(byte: usize) -> Sense {
    let byte = u16::try_from(byte).unwrap_or(u16::MAX);
    let pointer = Some(FieldPointer { is_in_cdb: true, byte, bit: None });
    Sense { pointer, ..Sense::invalid_field(0, 0) }
}

/// Parses the fields of a command for a disk.
#[inline]
fn on_disk(entry: &Entry, cdb: &[u8; CDB_LEN_MAX], disk: &Properties) -> Result<Command, Sense> {
    match entry.form {
        Form::Read => medium::read(cdb, disk),
        Form::Write => medium::write(cdb, disk),
        Form::WriteAndVerify => medium::write_and_verify(cdb, disk),
        Form::Verify => medium::verify(cdb, disk),
        Form::SynchronizeCache => medium::synchronize_cache(cdb, disk),
        Form::WriteSame => medium::write_same(cdb, disk),
        Form::Unmap => medium::unmap(cdb, disk),
        Form::CompareAndWrite => medium::compare_and_write(cdb, disk),
        Form::GetLbaStatus => medium::get_lba_status(cdb, disk),
        Form::TestUnitReady => Ok(Command::TestUnitReady),
        Form::ReadCapacity10 => Ok(Command::ReadCapacity10),
        Form::RequestSense => Ok(control::request_sense(cdb)),
        Form::Inquiry => control::inquiry(cdb, true),
        Form::ModeSelect => control::mode_select(cdb),
        Form::ModeSense => control::mode_sense(cdb),
        Form::Reserve => control::reservation(cdb, Command::Reserve),
        Form::Release => control::reservation(cdb, Command::Release),
        Form::StartStopUnit => control::start_stop_unit(cdb),
        Form::PreventAllow => Ok(Command::PreventAllowMediumRemoval { prevent: cdb[4] & 3 != 0 }),
        Form::ReadCapacity16 => Ok(control::read_capacity_16(cdb)),
        Form::ReportLuns => control::report_luns(cdb),
        Form::ReportOpcodes => control::report_opcodes(cdb),
        Form::PersistentIn => control::persistent_in(cdb, entry),
        Form::PersistentOut => control::persistent_out(cdb, entry),
    }
}

/// Parses a command for a logical unit that is not a disk.
#[cold]
fn elsewhere(opcode: u8, cdb: &[u8], unit: Unit<'_>) -> Result<Command, Sense> {
    let is_absent = matches!(unit, Unit::Absent);
    let entry = table::with_opcode(opcode).first().filter(|entry| match entry.form {
        Form::Inquiry | Form::ReportLuns | Form::RequestSense => true,
        Form::TestUnitReady => !is_absent,
        _ => false,
    });
    let entry = entry.ok_or(if is_absent { Sense::NO_SUCH_UNIT } else { Sense::INVALID_OPCODE })?;
    let cdb = checked(entry, cdb)?;
    match entry.form {
        Form::Inquiry => control::inquiry(&cdb, false),
        Form::ReportLuns => control::report_luns(&cdb),
        Form::RequestSense => Ok(control::request_sense(&cdb)),
        _ => Ok(Command::TestUnitReady),
    }
}
