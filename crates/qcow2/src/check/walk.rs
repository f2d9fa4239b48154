//! Visits all references of an image.

use super::bitmaps;
use super::count::Counters;
use super::image::ReadImage;
use super::layout::{Layout, TableUses, for_each_word};
use super::report::CheckError;
use crate::format::entry::{claimed, counted, decode, load_entries};
use crate::format::geometry::{HostCluster, HostOffset};
use crate::format::refcount::decode_block;

/// The numbers of entries of the whole image that cannot be true.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BadEntries {
    /// Entries of the refcount table.
    pub(super) blocks: u64,
    /// All other entries.
    pub(super) others: u64,
}

/// Adds all references to the clusters of the window. Returns the entries that cannot be true.
pub(super) fn count(
    image: &impl ReadImage,
    layout: &Layout,
    counters: &mut Counters,
) -> Result<BadEntries, CheckError> {
    // Overlaps are found only if all tables come first.
    let blocks = count_tables(layout, counters);
    let others = layout.bad + count_bitmaps(image, layout, counters)?;
    let others = others + count_data(image, layout, counters)?;
    Ok(BadEntries { blocks, others })
}

/// Returns the number of entries of the refcount table that cannot be true.
fn count_tables(layout: &Layout, counters: &mut Counters) -> u64 {
    let Layout { header, clusters, refcounts, l1s, snapshots_bytes, bitmaps, tables, .. } = layout;
    let mut bad = 0;
    counters.add_table(0..1, 1);
    for table in l1s.iter().chain(bitmaps).chain([&header.refcounts]) {
        counters.add_table(layout.clusters_of(table.at, table.entries * 8), 1);
    }
    counters.add_table(layout.clusters_of(header.snapshots.0, *snapshots_bytes), 1);
    if let Some(directory) = header.bitmaps {
        counters.add_table(layout.clusters_of(directory.at, directory.bytes), 1);
    }
    for word in refcounts {
        match decode_block(header.geometry, *word) {
            Ok(None) => {}
            Ok(Some(at)) if header.geometry.host_cluster(at).0 < *clusters => {
                let cluster = header.geometry.host_cluster(at).0;
                counters.add_table(cluster..cluster + 1, 1);
            }
            Ok(Some(_)) | Err(_) => bad += 1,
        }
    }
    for (cluster, uses) in tables {
        let cluster = u64::from(*cluster);
        counters.add_table(cluster..cluster + 1, uses.count);
    }
    bad
}

fn count_bitmaps(
    image: &impl ReadImage,
    layout: &Layout,
    counters: &mut Counters,
) -> Result<u64, CheckError> {
    let mut bad = 0;
    for table in &layout.bitmaps {
        for_each_word(image, *table, &mut |_, word| {
            match bitmaps::decode(&layout.header, word) {
                Ok(None) => {}
                Ok(Some(at)) if layout.header.geometry.host_cluster(at).0 < layout.clusters => {
                    counters.add_data(layout.header.geometry.host_cluster(at).0, 1);
                }
                Ok(Some(_)) | Err(()) => bad += 1,
            }
            Ok(())
        })?;
    }
    Ok(bad)
}

fn count_data(image: &impl ReadImage, layout: &Layout, counters: &mut Counters) -> Result<u64, CheckError> {
    let geometry = layout.header.geometry;
    let mut bad = 0;
    for_each_table(image, layout, &mut |_, uses, bytes| {
        for raw in load_entries(geometry, bytes) {
            let Ok(mapping) = decode(geometry, raw) else {
                bad += 1;
                for HostCluster(cluster) in claimed(geometry, raw).filter(|at| at.0 < layout.clusters) {
                    counters.add_data(cluster, uses.count);
                }
                continue;
            };
            for HostCluster(cluster) in counted(geometry, mapping) {
                if cluster < layout.clusters {
                    counters.add_data(cluster, uses.count);
                } else {
                    bad += 1;
                }
            }
        }
        Ok(())
    })?;
    Ok(bad)
}

/// Visits each L2 table once, with its place and its bytes.
pub(super) fn for_each_table(
    image: &impl ReadImage,
    layout: &Layout,
    visit: &mut impl FnMut(HostOffset, TableUses, &mut [u8]) -> Result<(), CheckError>,
) -> Result<(), CheckError> {
    let geometry = layout.header.geometry;
    let mut bytes = vec![0; geometry.cluster() as usize];
    for (cluster, uses) in &layout.tables {
        let at = geometry.host_offset(HostCluster(u64::from(*cluster)));
        image.read(at.0, &mut bytes)?;
        visit(at, *uses, &mut bytes)?;
    }
    Ok(())
}
