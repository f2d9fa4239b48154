//! Repairs the reference counts and flags of an image.
//!
//! The dirty bit is cleared last. If the repair is cut off, the next one starts again. No step depends on an
//! earlier one, because each counts all references.
//!
//! Entries that cannot be true stay, as in QEMU, and requests that need them fail. What they refer to is not
//! known, so no refcount is lowered then. QEMU lowers them.

use super::compare::{Survey, block_at, blocks_of, compare_counts, survey};
use super::count::Counters;
use super::image::WriteImage;
use super::layout::Layout;
use super::report::{CheckError, Report};
use super::walk::{count, for_each_table};
use super::watched::Watched;
use crate::format::bad_image::BadImage;
use crate::format::entry::{
    RawEntry, bad_without_copied, decode, decode_l1, flagged, load_entries, store_entry, with_copied,
    without_misplaced,
};
use crate::format::geometry::{HostCluster, HostOffset};
use crate::format::header::HeaderChange;
use crate::format::numbers::be64;
use crate::format::refcount::{get, set};
use crate::read::read_table;
use std::collections::{BTreeMap, BTreeSet};

/// The bytes of the header that change at once.
const HEADER: usize = 512;

/// The number of times that each L2 table is read, if one window is enough: for counts and for flags, to find
/// and to repair their faults.
const PASSES: u64 = 4;

/// Raises, syncs, lowers, syncs, mends COPIED in the active tables, syncs, clears the dirty bit, syncs.
/// Calls `progress` with the bytes that were read, and the bytes to read. Returns the faults before the
/// repair, but not those of entries without data, which become zeroes.
///
/// # Errors
/// The refcount table is damaged, tables overlap, or the file cannot be read or written. Nothing was lowered
/// then.
pub fn repair(
    image: &impl WriteImage,
    window: u64,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Report, CheckError> {
    let image = &Watched::new(image, progress);
    let mut layout = Layout::load(image)?;
    if layout.header.is_corrupt() {
        return Err(BadImage::Corrupt.into());
    }
    image.expect(layout.tables_bytes() * PASSES);
    let mut found = survey(image, &layout, window)?;
    if found.hopeless > 0 {
        return Err(CheckError::Damaged);
    }
    if found.report.bad > 0 && zero_misplaced(image, &layout)? {
        found = survey(image, &layout, window)?;
    }
    if !found.missing.is_empty() {
        make_blocks(image, &layout, found.missing)?;
        layout = Layout::load(image)?;
    }
    if found.report != Report::default() {
        repair_windows(image, &layout, window, found.report.bad == 0)?;
    }
    clear_dirty(image)?;
    Ok(found.report)
}

/// `lowers`: all references are known, so what has none is free.
fn repair_windows(
    image: &impl WriteImage,
    layout: &Layout,
    window: u64,
    lowers: bool,
) -> Result<(), CheckError> {
    let mut counters = Counters::new(layout.clusters, window, layout.header.geometry.refcount_bits());
    while counters.next(layout.clusters) {
        count(image, layout, &mut counters)?;
        change_counts(image, layout, &counters, u64::max)?;
        image.sync()?;
        if lowers {
            change_counts(image, layout, &counters, |_, references| references)?;
            image.sync()?;
        } else {
            // COPIED has to agree with the refcounts.
            compare_counts(image, layout, &mut counters, &mut Survey::default())?;
        }
        mend_flags(image, layout, &counters)?;
        image.sync()?;
    }
    Ok(())
}

/// Replaces each refcount of the window by `change` of it and the number of references.
fn change_counts(
    image: &impl WriteImage,
    layout: &Layout,
    counters: &Counters,
    change: impl Fn(u64, u64) -> u64,
) -> Result<(), CheckError> {
    let geometry = layout.header.geometry;
    let mut bytes = vec![0; geometry.cluster() as usize];
    for (index, part) in blocks_of(geometry, counters.window()) {
        // All blocks that are needed exist.
        let Some(at) = block_at(layout, index) else { continue };
        image.read(at.0, &mut bytes)?;
        let mut is_changed = false;
        for cluster in part {
            let index = cluster % geometry.block_entries();
            let refcount = get(geometry, &bytes, index);
            let changed = change(refcount, counters.get(cluster).unwrap_or(0));
            if changed != refcount {
                set(geometry, &mut bytes, index, changed).map_err(|_| CheckError::Damaged)?;
                is_changed = true;
            }
        }
        if is_changed {
            image.write(at.0, &bytes)?;
        }
    }
    Ok(())
}

/// Replaces entries of clusters without data whose place is not aligned by zeroes, as QEMU does. Returns
/// whether there were any.
fn zero_misplaced(image: &impl WriteImage, layout: &Layout) -> Result<bool, CheckError> {
    let (geometry, mut found) = (layout.header.geometry, false);
    for_each_table(image, layout, &mut |at, _, bytes| {
        let entries = load_entries(geometry, bytes).enumerate();
        let changes: Vec<_> =
            entries.filter_map(|(index, raw)| Some((index, without_misplaced(geometry, raw)?))).collect();
        if changes.is_empty() {
            return Ok(());
        }
        found = true;
        for (index, raw) in changes {
            store_entry(geometry, bytes, index, raw);
        }
        Ok(image.write(at.0, bytes)?)
    })?;
    if found {
        image.sync()?;
    }
    Ok(found)
}

/// Sets COPIED in the active entries whose cluster is in the window and has one reference, and clears it in
/// others.
fn mend_flags(image: &impl WriteImage, layout: &Layout, counters: &Counters) -> Result<(), CheckError> {
    let geometry = layout.header.geometry;
    let mended = |word: u64, (at, copied): (HostOffset, bool)| {
        let cluster = geometry.host_cluster(at).0;
        let is_only = cluster < layout.clusters && counters.get(cluster)? == 1;
        (is_only != copied).then(|| with_copied(word, is_only))
    };
    let l1 = layout.l1s[0];
    let mut bytes = read_table(image, l1)?;
    let mut is_changed = false;
    for entry in bytes.chunks_exact_mut(8) {
        let word = be64(entry, 0);
        let table = decode_l1(geometry, word).ok().flatten();
        if let Some(word) = table.and_then(|table| mended(word, table)) {
            entry.copy_from_slice(&word.to_be_bytes());
            is_changed = true;
        }
    }
    if is_changed {
        image.write(l1.at.0, &bytes)?;
    }
    for_each_table(image, layout, &mut |at, uses, bytes| {
        if !uses.is_active {
            return Ok(());
        }
        let entries = load_entries(geometry, bytes).enumerate();
        let changes: Vec<_> = entries
            .filter_map(|(index, raw)| {
                let word = match decode(geometry, raw) {
                    Ok(mapping) => mended(raw.word, flagged(mapping)?)?,
                    Err(_) => bad_without_copied(raw)?,
                };
                Some((index, RawEntry { word, ..raw }))
            })
            .collect();
        for (index, raw) in &changes {
            store_entry(geometry, bytes, *index, *raw);
        }
        if changes.is_empty() { Ok(()) } else { Ok(image.write(at.0, bytes)?) }
    })
}

/// Makes refcount blocks at the end of the file. They count themselves, and nothing else yet.
fn make_blocks(
    image: &impl WriteImage,
    layout: &Layout,
    mut missing: BTreeSet<u64>,
) -> Result<(), CheckError> {
    let geometry = layout.header.geometry;
    let (mut blocks, mut end) = (BTreeMap::new(), layout.clusters);
    while let Some(index) = missing.pop_first() {
        if index >= layout.refcounts.len() as u64 {
            // The refcount table is too small.
            return Err(CheckError::Damaged);
        }
        blocks.insert(index, geometry.host_offset(HostCluster(end)));
        let own = end / geometry.block_entries();
        if block_at(layout, own).is_none() && !blocks.contains_key(&own) {
            missing.insert(own);
        }
        end += 1;
    }
    let mut bytes = vec![0; geometry.cluster() as usize];
    for at in blocks.values() {
        image.write(at.0, &bytes)?;
    }
    for (index, part) in blocks_of(geometry, layout.clusters..end) {
        let at = blocks.get(&index).copied().or_else(|| block_at(layout, index));
        let at = at.ok_or(CheckError::Damaged)?;
        image.read(at.0, &mut bytes)?;
        for cluster in part {
            set(geometry, &mut bytes, cluster % geometry.block_entries(), 1)
                .map_err(|_| CheckError::Damaged)?;
        }
        image.write(at.0, &bytes)?;
    }
    image.sync()?;
    for (index, at) in &blocks {
        image.write(layout.header.refcounts.at.0 + index * 8, &at.0.to_be_bytes())?;
    }
    Ok(image.sync()?)
}

fn clear_dirty(image: &impl WriteImage) -> Result<(), CheckError> {
    let mut first = [0; HEADER];
    image.read(0, &mut first)?;
    HeaderChange::ClearDirty.apply(&mut first);
    image.write(0, &first)?;
    Ok(image.sync()?)
}
