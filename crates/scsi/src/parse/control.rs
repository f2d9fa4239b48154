//! Commands that concern no blocks (SPC-4, section 6).

use crate::command::{
    BlockDescriptor, Command, Inquiry, LunSelect, ModeSelect, ModeSense, OpcodeSelect, PageControl, Pages,
    PersistentAction, PersistentIn, PersistentReserveOut, ReportOpcodes, ReservationType,
};
use crate::parse::fields::{number_16, number_32};
use crate::sense::Sense;
use crate::table::{self, CDB_LEN_MAX, Entry};
use crate::vpd;
use kickless_spec::scsi::opcode as codes;
use kickless_spec::scsi::sense::{ILLEGAL_REQUEST, SAVING_PARAMETERS_NOT_SUPPORTED};

type Cdb = [u8; CDB_LEN_MAX];

/// The bit DESC of REQUEST SENSE.
const DESC: u8 = 0x01;
/// The bits EVPD and CMDDT of INQUIRY.
const EVPD: u8 = 0x01;
const CMDDT: u8 = 0x02;
/// The bits of MODE SENSE, and the position of the page control.
const DBD: u8 = 0x08;
const LLBAA: u8 = 0x10;
const PAGE_CONTROL_SHIFT: u8 = 6;
/// The bits of MODE SELECT.
const PAGE_FORMAT: u8 = 0x10;
const SAVE_PAGES: u8 = 0x01;
/// The bits of RESERVE and RELEASE.
const THIRD_PARTY: u8 = 0x10;
const EXTENT: u8 = 0x01;
/// The bits of START STOP UNIT.
const START: u8 = 0x01;
const LOEJ: u8 = 0x02;
const NO_FLUSH: u8 = 0x04;
const POWER_CONDITION: u8 = 0xf0;
/// The bit RCTD of REPORT SUPPORTED OPERATION CODES.
const RCTD: u8 = 0x80;

pub(super) fn request_sense(cdb: &Cdb) -> Command {
    Command::RequestSense { descriptors: cdb[1] & DESC != 0, allocation: cdb[4].into() }
}

/// Parses INQUIRY. Only disks have other pages than the list of pages.
pub(super) fn inquiry(cdb: &Cdb, is_disk: bool) -> Result<Command, Sense> {
    let page = cdb[2];
    if cdb[1] & CMDDT != 0 {
        return Err(Sense::invalid_field(1, 1));
    }
    let has_page = match cdb[1] & EVPD {
        0 => page == 0,
        _ => page == codes::VPD_SUPPORTED_PAGES || is_disk && vpd::PAGES.contains(&page),
    };
    if !has_page {
        return Err(Sense::invalid_field(2, 7));
    }
    let page = (cdb[1] & EVPD != 0).then_some(page);
    Ok(Command::Inquiry(Inquiry { page, allocation: number_16(cdb, 3).into() }))
}

pub(super) fn mode_sense(cdb: &Cdb) -> Result<Command, Sense> {
    let is_long = cdb[0] == codes::MODE_SENSE_10;
    let (page, subpage) = (cdb[2] & 0x3f, cdb[3]);
    let control = match cdb[2] >> PAGE_CONTROL_SHIFT {
        0 => PageControl::Current,
        1 => PageControl::Changeable,
        2 => PageControl::Default,
        _ => return Err(Sense::new(ILLEGAL_REQUEST, SAVING_PARAMETERS_NOT_SUPPORTED)),
    };
    let pages = match page {
        codes::MODE_CACHING => Pages::Caching,
        codes::MODE_CONTROL => Pages::Control,
        codes::MODE_ALL_PAGES => Pages::All,
        _ => return Err(Sense::invalid_field(2, 5)),
    };
    // No page has subpages.
    if !matches!(subpage, 0 | codes::MODE_ALL_SUBPAGES) {
        return Err(Sense::invalid_field(3, 7));
    }
    let descriptor = match cdb[1] {
        flags if flags & DBD != 0 => BlockDescriptor::None,
        flags if is_long && flags & LLBAA != 0 => BlockDescriptor::Long,
        _ => BlockDescriptor::Short,
    };
    let allocation = if is_long { number_16(cdb, 7).into() } else { cdb[4].into() };
    Ok(Command::ModeSense(ModeSense { is_long, descriptor, control, pages, allocation }))
}

pub(super) fn mode_select(cdb: &Cdb) -> Result<Command, Sense> {
    let is_long = cdb[0] == codes::MODE_SELECT_10;
    if cdb[1] & PAGE_FORMAT == 0 {
        return Err(Sense::invalid_field(1, 4));
    }
    if cdb[1] & SAVE_PAGES != 0 {
        return Err(Sense::invalid_field(1, 0));
    }
    let list_len = if is_long { number_16(cdb, 7) } else { cdb[4].into() };
    if list_len > ModeSelect::LIST_LEN_MAX {
        return Err(Sense::LIST_LENGTH);
    }
    Ok(Command::ModeSelect(ModeSelect { is_long, list_len }))
}

/// Parses RESERVE and RELEASE: only of the whole logical unit, and only for the nexus itself.
pub(super) fn reservation(cdb: &Cdb, command: Command) -> Result<Command, Sense> {
    if cdb[1] & THIRD_PARTY != 0 {
        return Err(Sense::invalid_field(1, 4));
    }
    if cdb[1] & EXTENT != 0 {
        return Err(Sense::invalid_field(1, 0));
    }
    Ok(command)
}

pub(super) fn start_stop_unit(cdb: &Cdb) -> Result<Command, Sense> {
    let flags = cdb[4];
    if flags & POWER_CONDITION != 0 {
        return Err(Sense::invalid_field(4, 7));
    }
    if flags & LOEJ != 0 {
        return Err(Sense::invalid_field(4, 1));
    }
    Ok(Command::StartStopUnit {
        start: flags & START != 0,
        flush: flags & NO_FLUSH == 0,
        immediate: cdb[1] & 1 != 0,
    })
}

pub(super) fn read_capacity_16(cdb: &Cdb) -> Command {
    Command::ReadCapacity16 { allocation: number_32(cdb, 10) }
}

pub(super) fn report_luns(cdb: &Cdb) -> Result<Command, Sense> {
    let select = match cdb[2] {
        0 => LunSelect::Ordinary,
        1 => LunSelect::WellKnown,
        2 => LunSelect::All,
        _ => return Err(Sense::invalid_field(2, 7)),
    };
    Ok(Command::ReportLuns { select, allocation: number_32(cdb, 6) })
}

/// Parses REPORT SUPPORTED OPERATION CODES (SPC-4, section 6.35).
pub(super) fn report_opcodes(cdb: &Cdb) -> Result<Command, Sense> {
    let (opcode, action) = (cdb[3], number_16(cdb, 4));
    let has_actions = table::with_opcode(opcode).iter().any(|entry| entry.service_action.is_some());
    let is_known = !table::with_opcode(opcode).is_empty();
    let one = |service_action| OpcodeSelect::One { opcode, service_action };
    let select = match cdb[2] & 7 {
        0 => OpcodeSelect::All,
        1 if has_actions => return Err(Sense::invalid_field(2, 2)),
        1 => one(None),
        2 if is_known && !has_actions => return Err(Sense::invalid_field(2, 2)),
        2 => one(Some(action)),
        // The command is one with this service action, or one without any if the field is 0.
        3 if action == 0 && !has_actions => one(None),
        3 => one(Some(action)),
        _ => return Err(Sense::invalid_field(2, 2)),
    };
    let timeouts = cdb[2] & RCTD != 0;
    Ok(Command::ReportOpcodes(ReportOpcodes { select, timeouts, allocation: number_32(cdb, 6) }))
}

pub(super) fn persistent_in(cdb: &Cdb, entry: &Entry) -> Result<Command, Sense> {
    let action = match entry.service_action {
        Some(codes::PRIN_READ_KEYS) => PersistentIn::Keys,
        Some(codes::PRIN_READ_RESERVATION) => PersistentIn::Reservation,
        Some(codes::PRIN_REPORT_CAPABILITIES) => PersistentIn::Capabilities,
        Some(codes::PRIN_READ_FULL_STATUS) => PersistentIn::FullStatus,
        _ => return Err(Sense::invalid_field(1, 4)),
    };
    Ok(Command::PersistentReserveIn { action, allocation: number_16(cdb, 7).into() })
}

pub(super) fn persistent_out(cdb: &Cdb, entry: &Entry) -> Result<Command, Sense> {
    let action = match entry.service_action {
        Some(codes::PROUT_REGISTER) => PersistentAction::Register,
        Some(codes::PROUT_RESERVE) => PersistentAction::Reserve,
        Some(codes::PROUT_RELEASE) => PersistentAction::Release,
        Some(codes::PROUT_CLEAR) => PersistentAction::Clear,
        Some(codes::PROUT_PREEMPT) => PersistentAction::Preempt,
        Some(codes::PROUT_PREEMPT_AND_ABORT) => PersistentAction::PreemptAndAbort,
        Some(codes::PROUT_REGISTER_AND_IGNORE) => PersistentAction::RegisterAndIgnore,
        _ => return Err(Sense::invalid_field(1, 4)),
    };
    // The other service actions ignore the scope and the type.
    let kind = match action {
        PersistentAction::Reserve => Some(reservation_type(cdb[2])?),
        PersistentAction::Release | PersistentAction::Preempt | PersistentAction::PreemptAndAbort => {
            reservation_type(cdb[2]).ok()
        }
        _ => None,
    };
    let list_len = number_32(cdb, 5);
    if list_len < PersistentReserveOut::LIST_LEN {
        return Err(Sense::LIST_LENGTH);
    }
    Ok(Command::PersistentReserveOut(PersistentReserveOut { action, kind, list_len }))
}

/// Returns the type of a reservation whose scope is the logical unit.
fn reservation_type(byte: u8) -> Result<ReservationType, Sense> {
    if byte >> 4 != 0 {
        return Err(Sense::invalid_field(2, 7));
    }
    ReservationType::from_raw(byte & 0x0f).ok_or(Sense::invalid_field(2, 3))
}
