//! Reads the tables that an image has at its beginning.

use crate::check::image::ReadImage;
use crate::check::report::CheckError;
use crate::format::bad_image::BadImage;
use crate::format::geometry::HostOffset;
use crate::format::header::{Header, TableAt};
use crate::format::refcount::get;
use crate::format::snapshots::{snapshots, snapshots_bytes};
use std::io;

/// The largest number of refcount blocks without a count to read. What is before them counts as used.
const EMPTY_BLOCKS_MAX: u32 = 1024;
/// The number of bytes of the snapshot table to read first.
const SNAPSHOTS_FIRST: usize = 64 << 10;

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

/// Reads and checks the snapshot table. Returns the places and lengths of it and of the tables that it names,
/// in bytes.
///
/// # Errors
/// The image cannot be read, or the snapshot table is damaged.
pub fn snapshot_tables(image: &impl ReadImage, header: &Header) -> io::Result<Vec<(HostOffset, u64)>> {
    let (bytes, l1s) = read_snapshots(image, header).map_err(|error| match error {
        CheckError::Io(error) => error,
        bad => io::Error::other(bad),
    })?;
    let l1s = l1s.into_iter().map(|l1| (l1.at, l1.entries * 8));
    Ok(l1s.chain([(header.snapshots.0, bytes)]).collect())
}

/// Reads the snapshot table, whose length is not stored. Returns its length in bytes, and the L1 tables in
/// it.
pub(crate) fn read_snapshots(
    image: &impl ReadImage,
    header: &Header,
) -> Result<(u64, Vec<TableAt>), CheckError> {
    let (at, count) = header.snapshots;
    let (mut bytes, mut len) = (Vec::new(), SNAPSHOTS_FIRST);
    // Ends because the table has a limit.
    let used = loop {
        if let Some(used) = snapshots_bytes(&bytes, count)? {
            break used as u64;
        }
        bytes.resize(len, 0);
        image.read(at.0, &mut bytes)?;
        len *= 2;
    };
    // Without snapshots, the place has no meaning.
    if count > 0 && at.0 + used > image.bytes() {
        return Err(BadImage::TablePlace { table: "snapshot table", at: at.0 }.into());
    }
    Ok((used, snapshots(&bytes, count, header.geometry, image.bytes())?))
}
