//! The places of an image's tables.

use super::bitmaps;
use super::image::ReadImage;
use super::report::CheckError;
use crate::format::entry::{claimed_table, decode_l1};
use crate::format::geometry::HostOffset;
use crate::format::header::{Header, TableAt};
use crate::format::numbers::be64;
use crate::read::{read_snapshots, read_table};
use std::collections::BTreeMap;
use std::ops::Range;

/// The largest number of clusters in a file, as in QEMU's check. With clusters of 64 KiB, it is 128 TiB.
const CLUSTERS_MAX: u64 = 1 << 31;
/// The largest number of different L2 tables: about 128 MiB of memory. With clusters of 64 KiB, they map
/// 4 PiB.
const TABLES_MAX: usize = 8 << 20;
/// The number of bytes of a table to read at a time.
const PIECE: usize = 64 << 10;

/// The places of an image's tables, and the L2 tables that L1 tables refer to.
#[derive(Debug)]
pub(super) struct Layout {
    pub(super) header: Header,
    /// The number of clusters of the file. The last one may be incomplete.
    pub(super) clusters: u64,
    /// The entries of the refcount table.
    pub(super) refcounts: Vec<u64>,
    /// All L1 tables, the active one first.
    pub(super) l1s: Vec<TableAt>,
    /// The number of bytes of the snapshot table.
    pub(super) snapshots_bytes: u64,
    /// The tables of persistent bitmaps.
    pub(super) bitmaps: Vec<TableAt>,
    /// The L2 tables in the file, by the number of their cluster.
    pub(super) tables: BTreeMap<u32, TableUses>,
    /// The number of L1 entries that cannot be true.
    pub(super) bad: u64,
}

/// The references to an L2 table.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TableUses {
    /// The number of L1 entries.
    pub(super) count: u32,
    /// The active L1 table is among them.
    pub(super) is_active: bool,
}

impl Layout {
    pub(super) fn load(image: &impl ReadImage) -> Result<Self, CheckError> {
        let mut start = [0; 512];
        image.read(0, &mut start)?;
        let mut first = vec![0; Header::first_cluster(&start)?.min(image.bytes()) as usize];
        image.read(0, &mut first)?;
        let header = Header::parse(&first, image.bytes())?;
        let geometry = header.geometry;
        let clusters = image.bytes().div_ceil(geometry.cluster());
        if clusters > CLUSTERS_MAX {
            return Err(CheckError::TooLarge);
        }
        let (snapshots_bytes, snapshots) = read_snapshots(image, &header)?;
        let l1s: Vec<_> = std::iter::once(header.l1).chain(snapshots).collect();
        let refcounts = read_table(image, header.refcounts)?;
        let refcounts = refcounts.chunks_exact(8).map(|word| be64(word, 0)).collect();
        let bitmaps = bitmaps::tables(image, &header)?;
        // Tables that do not overlap have less bytes than the file. This bounds the work.
        if l1s.iter().chain(&bitmaps).map(|table| table.entries * 8).sum::<u64>() > image.bytes() {
            return Err(CheckError::Damaged);
        }
        let tables = BTreeMap::new();
        let mut layout = Self { header, clusters, refcounts, l1s, snapshots_bytes, bitmaps, tables, bad: 0 };
        layout.find_tables(image)?;
        Ok(layout)
    }

    /// Lists the L2 tables.
    fn find_tables(&mut self, image: &impl ReadImage) -> Result<(), CheckError> {
        let Self { header, clusters, l1s, tables, bad, .. } = self;
        for (number, l1) in l1s.iter().enumerate() {
            for_each_word(image, *l1, &mut |_, word| {
                if word == 0 {
                    return Ok(());
                }
                let in_file = |at| Some(header.geometry.host_cluster(at).0).filter(|at| at < clusters);
                let place = match decode_l1(header.geometry, word) {
                    Ok(place) => place.and_then(|(at, _)| in_file(at)),
                    Err(_) => None,
                };
                // QEMU's check counts an entry with a flag and no table as an error.
                *bad += u64::from(place.is_none());
                let place = place.or_else(|| claimed_table(header.geometry, word).and_then(in_file));
                // CLUSTERS_MAX fits into 32 bits.
                let Some(cluster) = place.and_then(|cluster| u32::try_from(cluster).ok()) else {
                    return Ok(());
                };
                let uses = tables.entry(cluster).or_default();
                uses.count = uses.count.saturating_add(1);
                uses.is_active |= number == 0;
                if tables.len() > TABLES_MAX { Err(CheckError::TooLarge) } else { Ok(()) }
            })?;
        }
        Ok(())
    }

    /// Returns the number of bytes of all L2 tables.
    pub(super) fn tables_bytes(&self) -> u64 {
        self.tables.len() as u64 * self.header.geometry.cluster()
    }

    /// Returns the clusters that bytes of the file touch.
    pub(super) fn clusters_of(&self, at: HostOffset, bytes: u64) -> Range<u64> {
        let cluster = self.header.geometry.cluster();
        // An empty table may claim any place.
        if bytes == 0 { 0..0 } else { at.0 / cluster..(at.0 + bytes).div_ceil(cluster) }
    }
}

/// Visits each entry of a table with its number.
pub(super) fn for_each_word(
    image: &impl ReadImage,
    table: TableAt,
    visit: &mut impl FnMut(u64, u64) -> Result<(), CheckError>,
) -> Result<(), CheckError> {
    let mut piece = vec![0; PIECE.min(table.entries as usize * 8)];
    let mut index = 0;
    while index < table.entries {
        let len = piece.len().min((table.entries - index) as usize * 8);
        image.read(table.at.0 + index * 8, &mut piece[..len])?;
        for word in piece[..len].chunks_exact(8) {
            visit(index, be64(word, 0))?;
            index += 1;
        }
    }
    Ok(())
}
