//! Commands on blocks (SBC-3, section 5).

use crate::command::{ByteCheck, Command, Transfer};
use crate::parse::fields::{BlockFields, number_16, number_32};
use crate::sense::Sense;
use crate::table::CDB_LEN_MAX;
use crate::unit::{Blocks, Properties};

/// The field RDPROTECT, WRPROTECT or VRPROTECT. There is no protection information.
const PROTECT: u8 = 0xe0;
const DPO: u8 = 0x10;
const FUA: u8 = 0x08;
const BYTCHK: u8 = 0x06;
/// SYNCHRONIZE CACHE.
const IMMED: u8 = 0x02;
/// WRITE SAME.
const ANCHOR: u8 = 0x10;
const UNMAP: u8 = 0x08;
const PBDATA: u8 = 0x04;
const LBDATA: u8 = 0x02;
const NDOB: u8 = 0x01;
/// UNMAP has this bit elsewhere.
const UNMAP_ANCHOR: u8 = 0x01;

type Cdb = [u8; CDB_LEN_MAX];

#[inline]
pub(super) fn read(cdb: &Cdb, disk: &Properties) -> Result<Command, Sense> {
    Ok(Command::Read(transfer(cdb, disk, false)?))
}

#[inline]
pub(super) fn write(cdb: &Cdb, disk: &Properties) -> Result<Command, Sense> {
    Ok(Command::Write(transfer(cdb, disk, true)?))
}

/// Parses the fields of a read or a write. The command of 6 bytes has neither protection nor flags.
#[inline]
fn transfer(cdb: &Cdb, disk: &Properties, is_write: bool) -> Result<Transfer, Sense> {
    let is_short = cdb[0] >> 5 == 0;
    let (fields, flags) = match is_short {
        true => (BlockFields::read_6(cdb), 0),
        false => (BlockFields::read(cdb), cdb[1]),
    };
    check_protection(flags)?;
    Ok(Transfer {
        blocks: limited(fields, disk, is_write)?,
        force_unit_access: flags & FUA != 0,
        disable_page_out: flags & DPO != 0,
    })
}

fn check_protection(flags: u8) -> Result<(), Sense> {
    if flags & PROTECT == 0 { Ok(()) } else { Err(Sense::invalid_field(1, 7)) }
}

fn check_writable(disk: &Properties) -> Result<(), Sense> {
    if disk.read_only { Err(Sense::WRITE_PROTECTED) } else { Ok(()) }
}

/// Returns the blocks of a transfer, which has the limit of transfers.
fn limited(fields: BlockFields, disk: &Properties, is_write: bool) -> Result<Blocks, Sense> {
    let BlockFields { first, count, count_at } = fields;
    if is_write {
        check_writable(disk)?;
    }
    let blocks = disk.range(first, count.into())?;
    if count > disk.transfer_blocks_max {
        return Err(Sense::invalid_field(count_at, 7));
    }
    Ok(blocks)
}

pub(super) fn write_and_verify(cdb: &Cdb, disk: &Properties) -> Result<Command, Sense> {
    check_protection(cdb[1])?;
    let compare = match byte_check(cdb)? {
        ByteCheck::Medium => false,
        ByteCheck::Each => true,
        ByteCheck::Same => return Err(Sense::invalid_field(1, 2)),
    };
    Ok(Command::WriteAndVerify { blocks: limited(BlockFields::read(cdb), disk, true)?, compare })
}

pub(super) fn verify(cdb: &Cdb, disk: &Properties) -> Result<Command, Sense> {
    check_protection(cdb[1])?;
    let check = byte_check(cdb)?;
    Ok(Command::Verify { blocks: limited(BlockFields::read(cdb), disk, false)?, check })
}

fn byte_check(cdb: &Cdb) -> Result<ByteCheck, Sense> {
    match cdb[1] & BYTCHK {
        0x00 => Ok(ByteCheck::Medium),
        0x02 => Ok(ByteCheck::Each),
        0x06 => Ok(ByteCheck::Same),
        _ => Err(Sense::invalid_field(1, 2)),
    }
}

/// Parses SYNCHRONIZE CACHE. No number of blocks is all blocks from the first one on.
pub(super) fn synchronize_cache(cdb: &Cdb, disk: &Properties) -> Result<Command, Sense> {
    let fields = BlockFields::read(cdb);
    let blocks = disk.range(fields.first, fields.count.into())?;
    let blocks = if blocks.is_empty() { to_end(blocks.first, disk) } else { blocks };
    Ok(Command::SynchronizeCache { blocks, immediate: cdb[1] & IMMED != 0 })
}

/// Returns the blocks from `first` on, which is at most the number of blocks.
fn to_end(first: u64, disk: &Properties) -> Blocks {
    Blocks { first, count: disk.blocks.saturating_sub(first) }
}

/// Parses WRITE SAME(10) and (16). No number of blocks is all blocks from the first one on (WSNZ is 0).
pub(super) fn write_same(cdb: &Cdb, disk: &Properties) -> Result<Command, Sense> {
    let flags = cdb[1];
    let has_no_data_bit = cdb[0] >> 5 == 4;
    check_protection(flags)?;
    let unmap = flags & UNMAP != 0;
    if flags & ANCHOR != 0 {
        return Err(Sense::invalid_field(1, 4));
    }
    if unmap && !disk.unmaps_by_write_same() {
        return Err(Sense::invalid_field(1, 3));
    }
    // Obsolete: the device would write addresses into the blocks.
    if flags & PBDATA != 0 {
        return Err(Sense::invalid_field(1, 2));
    }
    if flags & LBDATA != 0 {
        return Err(Sense::invalid_field(1, 1));
    }
    check_writable(disk)?;
    let fields = BlockFields::read(cdb);
    let blocks = disk.range(fields.first, fields.count.into())?;
    let blocks = if blocks.is_empty() { to_end(blocks.first, disk) } else { blocks };
    if blocks.count > disk.write_same_blocks_max.into() {
        return Err(Sense::invalid_field(fields.count_at, 7));
    }
    Ok(Command::WriteSame { blocks, unmap, no_data: has_no_data_bit && flags & NDOB != 0 })
}

pub(super) fn unmap(cdb: &Cdb, disk: &Properties) -> Result<Command, Sense> {
    if cdb[1] & UNMAP_ANCHOR != 0 {
        return Err(Sense::invalid_field(1, 0));
    }
    check_writable(disk)?;
    Ok(Command::Unmap { list_len: number_16(cdb, 7) })
}

pub(super) fn compare_and_write(cdb: &Cdb, disk: &Properties) -> Result<Command, Sense> {
    let (flags, count) = (cdb[1], cdb[13]);
    check_protection(flags)?;
    check_writable(disk)?;
    let blocks = disk.range(BlockFields::read(cdb).first, count.into())?;
    if count > disk.compare_blocks_max {
        return Err(Sense::invalid_field(13, 7));
    }
    Ok(Command::CompareAndWrite(Transfer {
        blocks,
        force_unit_access: flags & FUA != 0,
        disable_page_out: flags & DPO != 0,
    }))
}

pub(super) fn get_lba_status(cdb: &Cdb, disk: &Properties) -> Result<Command, Sense> {
    let first = BlockFields::read(cdb).first;
    disk.range(first, 1)?;
    Ok(Command::GetLbaStatus { first, allocation: number_32(cdb, 10) })
}
