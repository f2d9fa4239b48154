//! The tables of an image, and the parts of their state.

use super::blocks::{Block, Blocks};
use super::cluster_copies::ClusterCopies;
use super::cluster_run::ClusterRun;
use super::free_space::FreeSpace;
use super::kept_errors::KeptErrors;
use super::known::Known;
use super::ops::TableOps;
use super::refcounts::Refcounts;
use super::reserve::{CHUNK_MAX, Reserve};
use super::retired::{EXTENTS_MAX, Retired};
use super::rule::Rules;
use super::syncs::Syncs;
use crate::format::entry::decode_l1;
use crate::format::geometry::{Geometry, HostCluster, HostOffset, SliceIndex};
use crate::format::header::Header;
use crate::pins::Pins;
use crate::runtime::Runtime;
use crate::slices::Slices;
use crate::wakers::Wakers;
use rustix::io::Errno;
use std::collections::HashMap;
use std::sync::Arc;

/// The choices of an image's owner.
#[derive(Clone, Copy, Debug)]
pub struct TablesOptions {
    /// The unit of table I/O, and the size of a slice, in bytes: a power of two, a cluster at most.
    pub unit: u64,
    /// The image may change.
    pub writable: bool,
    /// Free clusters are punched, unless the space is kept.
    pub discard: bool,
    /// The size of a block device in bytes, beyond which nothing can be allocated. `None`: a file.
    pub device_bytes: Option<u64>,
    /// The largest number of bytes that the reserve prepares at a time.
    pub reserve_max: u64,
    /// The largest number of runs that wait to be free, if it is not the default.
    pub retired_max: Option<usize>,
}

/// Figures for tests.
#[cfg(test)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TableStats {
    /// Clusters in the reserve.
    pub(crate) reserve: u64,
    /// Extents that wait to be freed.
    pub(crate) retired: u64,
    /// Blocks that differ from the disk.
    pub(crate) dirty: u64,
}

/// The parts of an image that [`Tables::new`] needs. Of an image that is only read, `first`, `refcount_table`
/// and `others` may be empty.
#[derive(Debug)]
pub struct TableParts<'a> {
    /// The header.
    pub header: &'a Header,
    /// The bytes of the first cluster.
    pub first: Vec<u8>,
    /// The bytes of the L1 table, as they are in the file.
    pub l1: Vec<u8>,
    /// The bytes of the refcount table, as they are in the file.
    pub refcount_table: Vec<u8>,
    /// The length of the file in bytes. Of a block device: the end of what is used ([`used_bytes`]).
    ///
    /// [`used_bytes`]: crate::used_bytes
    pub file_bytes: u64,
    /// Other tables that are known, such as those of snapshots: offsets, and lengths in bytes.
    pub others: Vec<(HostOffset, u64)>,
}

/// The tables of one image. The documentation of the crate says who carries out their operations.
#[derive(Debug)]
pub struct Tables<R: Runtime> {
    pub(super) geometry: Geometry,
    pub(super) options: TablesOptions,
    pub(super) rules: Rules,
    pub(super) has_backing: bool,
    pub(super) has_snapshots: bool,
    /// The size of the virtual disk in bytes.
    pub(super) size: u64,
    pub(super) slices: Arc<Slices>,
    pub(super) pins: Arc<Pins<R>>,
    pub(super) first: Vec<u8>,
    pub(super) l1: L1Table,
    pub(super) refcounts: Refcounts,
    pub(super) blocks: Blocks,
    pub(super) ops: TableOps<R>,
    pub(super) syncs: Syncs,
    pub(super) reserve: Reserve,
    pub(super) free_space: FreeSpace,
    pub(super) known: Known,
    /// The number of clusters of the file. What an entry refers to is before it.
    pub(super) bound: u64,
    pub(super) moving: Option<TableMove>,
    pub(super) growing: Option<Growth>,
    pub(super) grown: Option<Result<u64, Errno>>,
    pub(super) retired: Retired,
    pub(super) copies: ClusterCopies<R>,
    /// The slices that are read, and their places.
    pub(super) loading: HashMap<SliceIndex, u64>,
    pub(super) failed_loads: KeptErrors<SliceIndex>,
    pub(super) wakers: Wakers<R>,
    pub(super) is_bad: bool,
    pub(super) is_closing: bool,
    /// No space of the file is given back to the host.
    pub(super) keeps_space: bool,
    /// There is work that waits for no operation.
    pub(super) has_work: bool,
    pub(super) last_error: Option<Errno>,
}

impl<R: Runtime> Tables<R> {
    /// Makes the tables. It reads nothing. `slices` is empty, and of the same geometry and unit.
    pub fn new(
        parts: TableParts<'_>,
        slices: Arc<Slices>,
        pins: Arc<Pins<R>>,
        options: TablesOptions,
    ) -> Self {
        Self::with_rules(parts, slices, pins, options, Rules::default())
    }

    /// Makes the tables, which follow these rules.
    pub(crate) fn with_rules(
        parts: TableParts<'_>,
        slices: Arc<Slices>,
        pins: Arc<Pins<R>>,
        options: TablesOptions,
        rules: Rules,
    ) -> Self {
        let TableParts { header, first, l1, refcount_table, file_bytes, others } = parts;
        let geometry = header.geometry;
        let end = file_bytes.div_ceil(geometry.cluster());
        let bound = options.device_bytes.unwrap_or(file_bytes).div_ceil(geometry.cluster());
        let l1 = L1Table::new(&l1, header.l1.at);
        let mut refcounts =
            Refcounts::new(geometry, options.unit, &refcount_table, header.refcounts.at, file_bytes);
        let known = known(header, &l1, &mut refcounts, &others);
        let wakers = pins.wakers().clone();
        let lately = refcounts.unit_of(end.saturating_sub(3 * CHUNK_MAX));
        let free_space = FreeSpace::new(lately, end.div_ceil(refcounts.per_unit()));
        Self {
            geometry,
            options,
            rules,
            has_backing: header.backing.is_some(),
            has_snapshots: header.snapshots.1 > 0,
            size: header.size,
            slices,
            pins,
            first,
            l1,
            refcounts,
            blocks: Blocks::new(rules),
            ops: TableOps::new(),
            syncs: Syncs::default(),
            reserve: Reserve::new(end, geometry.cluster(), options.reserve_max),
            free_space,
            known,
            bound,
            moving: None,
            growing: None,
            grown: None,
            retired: Retired::new(options.retired_max.unwrap_or(EXTENTS_MAX)),
            copies: ClusterCopies::new(wakers.clone()),
            loading: HashMap::new(),
            failed_loads: KeptErrors::default(),
            wakers,
            is_bad: false,
            is_closing: false,
            keeps_space: false,
            has_work: false,
            last_error: None,
        }
    }

    /// Sets whether all space of the file stays allocated, also of clusters that become free.
    pub fn set_keeps_space(&mut self, keeps: bool) {
        self.keeps_space = keeps;
    }
}

/// The active L1 table.
#[derive(Debug)]
pub(super) struct L1Table {
    pub(super) words: Vec<u64>,
    pub(super) at: HostOffset,
    /// Entries that are not written, with the numbers of their changes.
    pub(super) unwritten: HashMap<u64, u64>,
    /// Shared L2 tables that are copied, by the number of their L1 entry.
    pub(super) copies: HashMap<u64, TableCopy>,
    /// Errors of such copies for the requests that wait.
    pub(super) failed: KeptErrors<u64>,
}

/// A shared L2 table that is copied.
#[derive(Debug)]
pub(super) struct TableCopy {
    pub(super) old: HostOffset,
    pub(super) new: HostCluster,
    pub(super) stage: TableCopyStage,
}

/// The stages of a copy.
#[derive(Debug)]
pub(super) enum TableCopyStage {
    /// A unit is read or written.
    Unit { offset: u64 },
    /// The sync is running.
    Syncing { stamp: u64 },
}

/// The state of the L2 table for a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TableState {
    /// Only the active L1 table refers to it.
    Own(HostOffset),
    /// There is none.
    Absent,
    /// It is shared.
    Shared(HostOffset),
    Bad,
}

impl L1Table {
    pub(super) fn new(bytes: &[u8], at: HostOffset) -> Self {
        let words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_be_bytes(*word)).collect();
        Self { words, at, unwritten: HashMap::new(), copies: HashMap::new(), failed: KeptErrors::default() }
    }
}

/// A table that is written at a new place.
#[derive(Debug)]
pub(super) struct TableMove {
    pub(super) what: MovedTable,
    /// The clusters to write, each with its number.
    pub(super) to_write: Vec<(u64, Vec<u8>)>,
    pub(super) writing: usize,
    /// The clusters whose write is running.
    pub(super) running: Vec<(u64, Vec<u8>)>,
    pub(super) stage: MoveStage,
}

/// The table.
#[derive(Debug)]
pub(super) enum MovedTable {
    /// A refcount block, by its number and place.
    Block { index: u64, at: HostOffset },
    /// The refcount table.
    Table { words: Vec<u64>, at: HostOffset, clusters: u32 },
    /// The active L1 table. It does not change meanwhile.
    L1 { words: Vec<u64>, at: HostOffset, size: u64 },
}

/// The stages of a move.
#[derive(Clone, Copy, Debug)]
pub(super) enum MoveStage {
    Writing,
    Syncing { stamp: u64 },
    Pointing { block: Block, number: u64 },
    SyncingPointer { stamp: u64 },
}

/// The disk is about to have this size.
#[derive(Clone, Copy, Debug)]
pub(super) struct Growth {
    pub(super) size: u64,
    /// The entries of the larger L1 table. 0: it is large enough.
    pub(super) entries: u64,
    pub(super) stage: GrowthStage,
}

/// The stages of growing.
#[derive(Clone, Copy, Debug)]
pub(super) enum GrowthStage {
    /// The L1 table needs clusters, or moves.
    Moving,
    /// The header is written.
    Header { number: u64 },
    /// The sync is running.
    Syncing { stamp: u64 },
}

/// Returns the clusters that have tables, and finds the refcount blocks at places of others.
fn known(header: &Header, l1: &L1Table, refcounts: &mut Refcounts, others: &[(HostOffset, u64)]) -> Known {
    let geometry = header.geometry;
    let run = |at: HostOffset, bytes: u64| ClusterRun {
        start: geometry.host_cluster(at).0,
        len: bytes.div_ceil(geometry.cluster()),
    };
    let tables = [header.l1, header.refcounts].map(|table| run(table.at, table.entries * 8));
    let fixed: Vec<ClusterRun> = std::iter::once(ClusterRun { start: 0, len: 1 }).chain(tables).collect();
    let others = others.iter().map(|(at, bytes)| run(*at, *bytes)).collect();
    refcounts.check_places(|cluster| fixed.iter().any(|run| run.contains(cluster)));
    if refcounts.table.is_empty() {
        // The image is only read.
        return Known::new(fixed, Vec::new(), Vec::new(), 0);
    }
    let l2 = l1.words.iter().filter_map(|word| decode_l1(geometry, *word).ok().flatten());
    let l2 = l2.map(|(at, _)| geometry.host_cluster(at).0);
    let first = l2.chain(refcounts.blocks()).collect();
    Known::new(fixed, others, first, l1.words.len() + refcounts.table.len())
}
