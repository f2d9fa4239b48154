//! The places of persistent bitmaps. Their clusters are counted, and their contents are never used.

use super::image::ReadImage;
use super::report::CheckError;
use crate::format::bad_image::BadImage;
use crate::format::geometry::HostOffset;
use crate::format::header::{Header, TableAt};
use crate::format::numbers::{be16, be32, be64};

/// The bytes of a directory's entry without extra data and name.
const ENTRY: usize = 24;
/// Entries begin at multiples of it.
const ALIGNMENT: usize = 8;
/// The reserved bits of an entry of a bitmap's table.
const RESERVED: u64 = 0xff00_0000_0000_01fe;
/// The cluster's bits are all 1. Only without a cluster.
const ALL_ONES: u64 = 1;

/// Returns the tables of all persistent bitmaps.
pub(super) fn tables(image: &impl ReadImage, header: &Header) -> Result<Vec<TableAt>, CheckError> {
    let Some(bitmaps) = header.bitmaps else { return Ok(Vec::new()) };
    let damaged = BadImage::Extension("for persistent bitmaps");
    // At most 64 MiB.
    let mut bytes = vec![0; bitmaps.bytes as usize];
    image.read(bitmaps.at.0, &mut bytes)?;
    let (mut tables, mut at) = (Vec::new(), 0);
    for _ in 0..bitmaps.count {
        let Some(entry) = bytes.get(at..).filter(|entry| entry.len() >= ENTRY) else {
            return Err(damaged.into());
        };
        let table = TableAt { at: HostOffset(be64(entry, 0)), entries: u64::from(be32(entry, 8)) };
        let end = table.at.0.checked_add(table.entries * 8);
        if !header.geometry.is_aligned(table.at) || end.is_none_or(|end| end > image.bytes()) {
            return Err(damaged.into());
        }
        tables.push(table);
        // Lengths below 2^32 each.
        let len = ENTRY + usize::from(be16(entry, 18)) + be32(entry, 20) as usize;
        at += len.next_multiple_of(ALIGNMENT);
    }
    Ok(tables)
}

/// Returns the place that an entry of a bitmap's table names, or `Err` if the entry cannot be true.
pub(super) fn decode(header: &Header, word: u64) -> Result<Option<HostOffset>, ()> {
    let at = HostOffset(word & !ALL_ONES);
    match () {
        () if word & RESERVED != 0 || !header.geometry.is_aligned(at) => Err(()),
        () if at.0 == 0 => Ok(None),
        () if word & ALL_ONES != 0 => Err(()),
        () => Ok(Some(at)),
    }
}
