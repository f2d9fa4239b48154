//! The snapshot table.

use super::bad_image::BadImage;
use super::geometry::{Geometry, HostOffset};
use super::header::{TableAt, place_of_l1};
use super::numbers::{be16, be32, be64};

/// The bytes of an entry without extra data, identifier and name.
const ENTRY: usize = 40;
/// Entries begin at multiples of it.
const ALIGNMENT: usize = 8;
/// The largest extra data of an entry, in bytes, as in QEMU.
const EXTRA_MAX: u32 = 1024;
/// The largest table, in bytes, as in QEMU.
const TABLE_MAX: usize = 64 << 20;

/// Returns the L1 tables of all snapshots. `bytes` begins with the snapshot table, and contains all of it.
pub(crate) fn snapshots(
    bytes: &[u8],
    count: u32,
    geometry: Geometry,
    file_bytes: u64,
) -> Result<Vec<TableAt>, BadImage> {
    let mut tables = Vec::new();
    let mut at = 0_usize;
    for number in 0..count {
        at = at.next_multiple_of(ALIGNMENT);
        let end = entry_end(bytes, at, number)?.ok_or(BadImage::Snapshot(number))?;
        let (l1, entries) = (HostOffset(be64(bytes, at)), u64::from(be32(bytes, at + 8)));
        tables.push(place_of_l1(l1, entries, geometry, file_bytes)?);
        at = end;
    }
    Ok(tables)
}

/// Returns the length of the snapshot table that `bytes` begins with. `None` if more bytes are needed to find
/// it.
pub(crate) fn snapshots_bytes(bytes: &[u8], count: u32) -> Result<Option<usize>, BadImage> {
    let mut at = 0_usize;
    for number in 0..count {
        match entry_end(bytes, at.next_multiple_of(ALIGNMENT), number)? {
            Some(end) => at = end,
            None => return Ok(None),
        }
    }
    Ok(Some(at))
}

/// Returns the end of the entry at `at`, `None` if it is not in `bytes`.
fn entry_end(bytes: &[u8], at: usize, number: u32) -> Result<Option<usize>, BadImage> {
    let Some(entry) = bytes.get(at..).and_then(|rest| rest.get(..ENTRY)) else {
        return if at + ENTRY > TABLE_MAX { Err(too_large(at + ENTRY)) } else { Ok(None) };
    };
    let extra = be32(entry, 36);
    if extra > EXTRA_MAX {
        return Err(BadImage::Snapshot(number));
    }
    let (id, name) = (usize::from(be16(entry, 12)), usize::from(be16(entry, 14)));
    let end = at + ENTRY + extra as usize + id + name;
    match () {
        () if end > TABLE_MAX => Err(too_large(end)),
        () if end > bytes.len() => Ok(None),
        () => Ok(Some(end)),
    }
}

fn too_large(bytes: usize) -> BadImage {
    BadImage::TableSize { table: "snapshot table", bytes: bytes as u64, max: TABLE_MAX as u64 }
}
