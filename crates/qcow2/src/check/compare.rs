//! Compares an image's refcounts and flags with its references.

use super::count::Counters;
use super::image::ReadImage;
use super::layout::{Layout, for_each_word};
use super::report::{CheckError, Report};
use super::walk::{count, for_each_table};
use crate::format::entry::{decode, decode_l1, flagged, load_entries};
use crate::format::geometry::{Geometry, HostOffset};
use crate::format::refcount::{decode_block, get};
use std::collections::BTreeSet;
use std::ops::Range;

/// The largest number of bytes of L2 tables to read for a comparison: about ten minutes. Sound images need
/// less: 128 TiB of data in clusters of 64 KiB have 16 GiB of L2 tables, which 128 windows read.
const READ_MAX: u64 = 4 << 40;

/// The result of a comparison.
#[derive(Debug, Default)]
pub(super) struct Survey {
    pub(super) report: Report,
    /// The numbers of refcount blocks that references need and that do not exist.
    pub(super) missing: BTreeSet<u64>,
    /// Faults of the refcount table, tables that overlap, and references that no refcount can say. A repair
    /// needs what they damage.
    pub(super) hopeless: u64,
}

/// Compares everything.
pub(super) fn survey(image: &impl ReadImage, layout: &Layout, window: u64) -> Result<Survey, CheckError> {
    let mut survey = Survey::default();
    let mut counters = Counters::new(layout.clusters, window, layout.header.geometry.refcount_bits());
    if layout.tables_bytes().saturating_mul(counters.windows(layout.clusters)) > READ_MAX {
        return Err(CheckError::TooLarge);
    }
    while counters.next(layout.clusters) {
        let bad = count(image, layout, &mut counters)?;
        survey.report.bad = bad.blocks + bad.others;
        survey.hopeless = bad.blocks;
        compare_counts(image, layout, &mut counters, &mut survey)?;
        survey.report.copied += count_wrong_flags(image, layout, &counters)?;
    }
    survey.report.bad += counters.excess;
    survey.report.overlaps = counters.overlaps;
    survey.hopeless += counters.excess + counters.table_overlaps;
    Ok(survey)
}

/// Compares the counters with the refcounts, and replaces them by the refcounts.
pub(super) fn compare_counts(
    image: &impl ReadImage,
    layout: &Layout,
    counters: &mut Counters,
    survey: &mut Survey,
) -> Result<(), CheckError> {
    let geometry = layout.header.geometry;
    let mut bytes = vec![0; geometry.cluster() as usize];
    for (index, part) in blocks_of(geometry, counters.window()) {
        let block = block_at(layout, index);
        if let Some(at) = block {
            image.read(at.0, &mut bytes)?;
        }
        for cluster in part {
            let references = counters.get(cluster).unwrap_or(0);
            let refcount = block.map_or(0, |_| get(geometry, &bytes, cluster % geometry.block_entries()));
            survey.report.leaks += u64::from(refcount > references);
            survey.report.low += u64::from(refcount < references);
            if refcount < references && block.is_none() {
                survey.missing.insert(index);
            }
            counters.put(cluster, refcount);
        }
    }
    Ok(())
}

/// Returns the numbers of the refcount blocks for a window, and the clusters of each that are in it.
pub(super) fn blocks_of(geometry: Geometry, window: Range<u64>) -> impl Iterator<Item = (u64, Range<u64>)> {
    let entries = geometry.block_entries();
    (window.start / entries..window.end.div_ceil(entries)).map(move |index| {
        let block = index * entries..(index + 1) * entries;
        (index, block.start.max(window.start)..block.end.min(window.end))
    })
}

/// Returns the place of a refcount block in the file.
pub(super) fn block_at(layout: &Layout, index: u64) -> Option<HostOffset> {
    let (geometry, word) = (layout.header.geometry, *layout.refcounts.get(index as usize)?);
    let at = decode_block(geometry, word).ok().flatten();
    at.filter(|at| geometry.host_cluster(*at).0 < layout.clusters)
}

/// Returns the number of active entries whose flag COPIED contradicts the refcount of their cluster. The
/// counters are the refcounts.
fn count_wrong_flags(
    image: &impl ReadImage,
    layout: &Layout,
    counters: &Counters,
) -> Result<u64, CheckError> {
    let geometry = layout.header.geometry;
    let is_wrong = |(at, copied): (HostOffset, bool)| {
        counters.get(geometry.host_cluster(at).0).is_some_and(|refcount| (refcount == 1) != copied)
    };
    let mut wrong = 0;
    for_each_word(image, layout.l1s[0], &mut |_, word| {
        let entry = decode_l1(geometry, word).ok().flatten();
        wrong += u64::from(entry.is_some_and(is_wrong));
        Ok(())
    })?;
    for_each_table(image, layout, &mut |_, uses, bytes| {
        if uses.is_active {
            let entries = load_entries(geometry, bytes).filter_map(|raw| decode(geometry, raw).ok());
            wrong += entries.filter_map(flagged).filter(|flagged| is_wrong(*flagged)).count() as u64;
        }
        Ok(())
    })?;
    Ok(wrong)
}
