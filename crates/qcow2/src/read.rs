//! Reads the tables that an image has at its beginning.

use crate::check::image::ReadImage;
use crate::format::geometry::HostOffset;
use crate::format::header::{Header, TableAt};
use crate::format::refcount::get;
use crate::format::snapshots::{snapshots, snapshots_bytes};
use std::io;

/// The largest number of refcount blocks without a count to read. What is before them counts as used.
const EMPTY_BLOCKS_MAX: u32 = 1024;

/// Reads a table of a parsed header, in the order of the file: big-endian entries of 8 bytes.
///
/// # Errors
/// The image cannot be read.
pub fn read_table(image: &impl ReadImage, table: TableAt) -> io::Result<Vec<u8>> {
    // Header and snapshot table were checked, so this is bounded.
    let mut bytes = vec![0; table.entries as usize * 8];
    image.read(table.at.0, &mut bytes)?;
    Ok(bytes)
}

/// Returns the end of the last cluster with a reference, in bytes. A block device is longer than its image.
///
/// # Errors
/// A refcount block cannot be read.
pub fn used_bytes(image: &impl ReadImage, header: &Header, refcount_table: &[u8]) -> io::Result<u64> {
    let (geometry, mut empty) = (header.geometry, 0);
    let (cluster, entries) = (geometry.cluster(), geometry.block_entries());
    let mut block = vec![0; cluster as usize];
    for (number, word) in refcount_table.as_chunks::<8>().0.iter().enumerate().rev() {
        let (number, at) = (number as u64, u64::from_be_bytes(*word));
        if at == 0 || !at.is_multiple_of(cluster) {
            continue;
        }
        image.read(at, &mut block)?;
        if let Some(last) = (0..entries).rev().find(|&index| get(geometry, &block, index) != 0) {
            return Ok((number * entries + last + 1) * cluster);
        }
        empty += 1;
        if empty == EMPTY_BLOCKS_MAX {
            return Ok((number + 1) * entries * cluster);
        }
    }
    Ok(0)
}

/// Reads and checks the snapshot table, whose length is not stored. Returns the places and lengths of it and
/// of the tables that it names, in bytes.
///
/// # Errors
/// The image cannot be read, or the snapshot table is damaged: a [`BadImage`](crate::BadImage).
pub fn snapshot_tables(
    image: &impl ReadImage,
    header: &Header,
    file_bytes: u64,
) -> io::Result<Vec<(HostOffset, u64)>> {
    let (at, count) = header.snapshots;
    let (mut bytes, mut len) = (Vec::new(), 64 << 10);
    loop {
        let found = snapshots_bytes(&bytes, count).map_err(io::Error::other)?;
        let ends = at.0.saturating_add(bytes.len() as u64) >= file_bytes;
        if found.is_some() || ends {
            let tables = snapshots(&bytes, count, header.geometry, file_bytes).map_err(io::Error::other)?;
            let tables = tables.into_iter().map(|table| (table.at, table.entries * 8));
            return Ok(tables.chain([(at, found.unwrap_or(0) as u64)]).collect());
        }
        bytes.resize(len, 0);
        image.read(at.0, &mut bytes)?;
        len *= 2;
    }
}
