//! The tables of an image that is written: the only code that changes them.
//!
//! It does no I/O. It emits operations ([`Tables::next_op`]) and takes their completions. Any queue can carry
//! out any operation. The rules R1 to R9 are argued in
//! `docs/adr/0011-a-table-holds-only-what-may-be-on-disk.md`.

mod blocks;
mod copies;
mod free_space;
mod grow;
mod known;
mod l1;
mod l2;
mod load;
mod moves;
pub(crate) mod op;
mod ops;
pub(crate) mod plan;
mod prepare;
mod refcounts;
mod reserve;
mod retire;
mod retired;
pub(crate) mod rule;

use super::format::bad_image::BadImage;
use super::format::entry::{RawEntry, UNWRITTEN, WRITING, decode_l1, store_entry};
use super::format::geometry::{Geometry, HostOffset, SliceIndex, Version};
use super::format::header::{Header, HeaderChange, apply};
use super::pins::Pins;
use super::slices::{Slices, WayIndex, memory_bits, on_disk, with_bits};
use super::wakers::Wakers;
use blocks::{Block, Blocks};
use copies::Copies;
use free_space::FreeSpace;
use grow::Growing;
use kickless_io::{AlignedBuf, Errno, Waker};
use known::Known;
use l1::{L1, TableState};
use moves::Move;
use op::{OpId, TableOp, TableOpKind};
use ops::{Ops, Purpose, Run, Syncs};
use plan::{SyncMark, Ticket, Written};
use refcounts::{Refcounts, store_words};
use reserve::{CHUNK_MAX, Reserve};
use retired::{EXTENTS_MAX, Retired};
use rule::{Rule, Rules};
use std::collections::HashMap;
use std::sync::Arc;

/// The steps of work in one call. Each is bounded.
const STEPS_MAX: u32 = 8;

/// The choices of an image's owner.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TablesOptions {
    /// The unit of table I/O, and the size of a slice: at most a cluster.
    pub(crate) unit: u64,
    /// Free clusters are punched.
    pub(crate) discard: bool,
    /// The size of a block device, beyond which nothing can be allocated.
    pub(crate) device_bytes: Option<u64>,
    /// The largest number of bytes that the reserve prepares at a time.
    pub(crate) reserve_max: u64,
    /// The largest number of runs that wait to be free, if it is not the default.
    pub(crate) retired_max: Option<usize>,
    /// The rules to follow.
    pub(crate) rules: Rules,
}

/// Figures for tests and metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TableStats {
    /// Clusters in the reserve.
    pub(crate) reserve: u64,
    /// Extents that wait to be freed.
    pub(crate) retired: u64,
    /// Blocks that differ from the disk.
    pub(crate) dirty: u64,
}

/// The parts of an image that `Tables::new` needs.
#[derive(Debug)]
pub(crate) struct Parts<'a> {
    /// The header.
    pub(crate) header: &'a Header,
    /// The first cluster.
    pub(crate) first: Vec<u8>,
    /// The bytes of the L1 table.
    pub(crate) l1: Vec<u8>,
    /// The bytes of the refcount table.
    pub(crate) refcount_table: Vec<u8>,
    /// The length of the file.
    pub(crate) file_bytes: u64,
    /// Other tables that are known: offsets and lengths.
    pub(crate) others: Vec<(HostOffset, u64)>,
}

/// The tables of one image.
#[derive(Debug)]
pub(crate) struct Tables {
    geometry: Geometry,
    options: TablesOptions,
    rules: Rules,
    has_backing: bool,
    has_snapshots: bool,
    /// The size of the virtual disk in bytes.
    size: u64,
    slices: Arc<Slices>,
    pins: Arc<Pins>,
    first: Vec<u8>,
    l1: L1,
    refcounts: Refcounts,
    blocks: Blocks,
    ops: Ops,
    syncs: Syncs,
    reserve: Reserve,
    free_space: FreeSpace,
    known: Known,
    /// The number of clusters of the file. What an entry refers to is before it.
    bound: u64,
    moving: Option<Move>,
    growing: Option<Growing>,
    grown: Option<Result<u64, Errno>>,
    retired: Retired,
    copies: Copies,
    /// The slices that are read, and their places.
    loading: HashMap<SliceIndex, u64>,
    failed_loads: HashMap<SliceIndex, Errno>,
    wakers: Wakers,
    is_bad: bool,
    is_closing: bool,
    /// There is work that waits for no operation.
    has_work: bool,
    last_error: Option<Errno>,
}

impl Tables {
    /// Makes the tables. It reads nothing. `slices` is empty.
    pub(crate) fn new(
        parts: Parts<'_>,
        slices: Arc<Slices>,
        pins: Arc<Pins>,
        options: TablesOptions,
    ) -> Result<Self, BadImage> {
        let Parts { header, first, l1, refcount_table, file_bytes, others } = parts;
        let (geometry, rules) = (header.geometry, options.rules);
        let end = file_bytes.div_ceil(geometry.cluster());
        let bound = options.device_bytes.unwrap_or(file_bytes).div_ceil(geometry.cluster());
        let l1 = L1::new(&l1, header.l1.at);
        let mut refcounts =
            Refcounts::new(geometry, options.unit, &refcount_table, header.refcounts.at, file_bytes);
        let known = known(header, &l1, &mut refcounts, &others);
        let wakers = pins.wakers().clone();
        let lately = refcounts.unit_of(end.saturating_sub(3 * CHUNK_MAX));
        let free_space = FreeSpace::new(lately, end.div_ceil(refcounts.per_unit()));
        Ok(Self {
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
            ops: Ops::default(),
            syncs: Syncs::default(),
            reserve: Reserve::new(end, geometry.cluster(), options.reserve_max),
            free_space,
            known,
            bound,
            moving: None,
            growing: None,
            grown: None,
            retired: Retired::new(options.retired_max.unwrap_or(EXTENTS_MAX)),
            copies: Copies::default(),
            loading: HashMap::new(),
            failed_loads: HashMap::new(),
            wakers,
            is_bad: false,
            is_closing: false,
            has_work: false,
            last_error: None,
        })
    }

    /// Returns the next operation that is due. `None` does not say that there is none: work may be left.
    pub(crate) fn next_op(&mut self) -> Option<TableOp> {
        if std::mem::take(&mut self.has_work) {
            self.progress();
        }
        if let Some(op) = self.ops.next() {
            return Some(op);
        }
        while let Some((block, number)) = self.blocks.take_due() {
            let buffer = self.place_of(block).ok_or(Errno::IO).and_then(|at| {
                let buffer = self.ops.buffer(self.options.unit)?;
                Ok((at, buffer))
            });
            match buffer {
                Ok((at, mut buffer)) => {
                    self.store_block(block, &mut buffer);
                    let kind = TableOpKind::Write { at, buffer };
                    return Some(self.ops.start(Purpose::Block(block, number), kind));
                }
                Err(errno) => self.write_failed(block, number, errno),
            }
        }
        if self.syncs.is_due() {
            let mark = self.syncs.begin();
            return Some(self.ops.start(Purpose::Sync(mark), TableOpKind::Sync));
        }
        // The last of all: no request waits for these.
        let run = self.retired.next_punch()?;
        let cluster = self.geometry.cluster();
        let kind = TableOpKind::Zero { at: run.start * cluster, len: run.len * cluster };
        Some(self.ops.start(Purpose::Punch(run), kind))
    }

    /// Takes back an operation that was not carried out, for another executor.
    pub(crate) fn take_back(&mut self, op: TableOp) {
        self.ops.put_back(op);
        self.wakers.wake();
    }

    /// Ends the write of a block that does not begin.
    fn write_failed(&mut self, block: Block, number: u64, errno: Errno) {
        self.last_error = Some(errno);
        self.block_written(block, number, Err(errno));
        self.progress();
        self.wakers.wake();
    }

    /// Returns whether `next_op` has something, or work is left.
    pub(crate) fn has_due(&self) -> bool {
        self.has_work
            || self.ops.has_due()
            || self.blocks.has_due()
            || self.syncs.is_due()
            || self.retired.may_punch()
    }

    /// Returns the place of a block in the file.
    fn place_of(&self, block: Block) -> Option<u64> {
        let unit = self.options.unit;
        match block {
            Block::Slice(slice) => match self.table_state(self.table_of(slice)) {
                TableState::Own(at) => Some(self.place_in(at, slice)),
                _ => None,
            },
            Block::L1(part) => Some(self.l1.at.0 + u64::from(part) * unit),
            Block::Refcounts(part) => self.refcounts.place(part),
            Block::Table(part) => Some(self.refcounts.table_at.0 + u64::from(part) * unit),
            Block::Header => Some(0),
        }
    }

    /// Returns the place of a slice of a table.
    fn place_in(&self, table: HostOffset, slice: SliceIndex) -> u64 {
        table.0 + slice.0 % self.slices_per_table() * self.options.unit
    }

    /// Copies a block into a buffer, as it is to be on disk.
    fn store_block(&mut self, block: Block, into: &mut [u8]) {
        match block {
            Block::Slice(slice) => {
                let Some(way) = self.slices.find(slice) else { return };
                let geometry = self.geometry;
                self.edit_slice(way, |index, raw| {
                    store_entry(geometry, into, index, on_disk(raw));
                    let flags = memory_bits(raw);
                    let writing = if flags & UNWRITTEN != 0 { WRITING } else { 0 };
                    with_bits(on_disk(raw), flags & !UNWRITTEN | writing)
                });
            }
            Block::L1(part) => store_words(&self.l1.words, part, into),
            Block::Refcounts(part) => self.refcounts.store(part, into),
            Block::Table(part) => self.refcounts.store_table(part, into),
            Block::Header => into.copy_from_slice(&self.first[..into.len()]),
        }
    }

    fn edit_slice(&self, way: WayIndex, edit: impl FnMut(usize, RawEntry) -> RawEntry) {
        let entries = (self.options.unit / self.geometry.entry_bytes()) as usize;
        self.slices.edit(way, 0..entries, edit);
    }

    /// Takes the completion of an operation. A transfer is whole, or has failed.
    pub(crate) fn complete(&mut self, id: OpId, buffer: Option<AlignedBuf>, result: Result<u32, Errno>) {
        let Some(purpose) = self.ops.end(id) else { return };
        let result = result.map(|_| ());
        if let Err(errno) = result {
            self.last_error = Some(errno);
        }
        let is_change = !matches!(
            purpose,
            Purpose::Slice(_) | Purpose::Refcounts(_) | Purpose::Sync(_) | Purpose::TableRead(_)
        );
        if is_change {
            self.syncs.count();
        }
        match purpose {
            Purpose::Block(block, number) => self.block_written(block, number, result),
            Purpose::Slice(slice) => self.slice_loaded(slice, buffer, result),
            Purpose::Refcounts(unit) => {
                self.refcounts.loaded(unit, buffer.as_deref().filter(|_| result.is_ok()));
                if let Err(errno) = result {
                    self.retired.stall(errno);
                    // Other units may have free clusters too.
                    if self.free_space.unit() == Some(unit) {
                        self.free_space.skip(unit);
                    } else {
                        self.reserve_failed(errno);
                    }
                }
            }
            Purpose::Sync(mark) => {
                self.syncs.end(mark, result.is_ok());
                if let Err(errno) = result {
                    self.reserve_failed(errno);
                    self.retired.stall(errno);
                    self.table_syncs_failed(errno);
                }
            }
            Purpose::ChunkZero(run) => self.chunk_zeroed(run, result),
            Purpose::Punch(run) => self.punched(run),
            Purpose::TableRead(table) => self.table_read(table, buffer, result),
            Purpose::TableWrite(table) => self.table_written(table, result),
            Purpose::Move(number) => self.moved(number, result),
        }
        self.end_given_up();
        self.progress();
        self.wakers.wake();
    }

    fn block_written(&mut self, block: Block, number: u64, result: Result<(), Errno>) {
        self.blocks.done(block, number, result);
        match block {
            Block::Slice(slice) => {
                let Some(way) = self.slices.find(slice) else { return };
                let back = if result.is_ok() { 0 } else { UNWRITTEN };
                self.edit_slice(way, |_, raw| {
                    let flags = memory_bits(raw);
                    let flags = if flags & WRITING != 0 { flags & !WRITING | back } else { flags };
                    with_bits(on_disk(raw), flags)
                });
            }
            Block::L1(_) if result.is_ok() => self.l1_written(),
            _ => {}
        }
    }

    /// Moves everything on that does not wait for an operation, for some steps. The rest is for `next_op`.
    fn progress(&mut self) {
        let mut steps = 0;
        while steps < STEPS_MAX
            && self.advance_retired()
                | self.advance_move()
                | self.advance_growing()
                | self.advance_reserve()
                | self.advance_table_copies()
        {
            steps += 1;
        }
        self.has_work = steps == STEPS_MAX;
        if steps > 0 {
            self.wakers.wake();
        }
    }

    /// Returns whether the changes of a ticket are written.
    pub(crate) fn written(&mut self, ticket: Ticket, waker: &Waker) -> Written {
        if !self.rules.hold(Rule::R4) {
            return Written::Yes;
        }
        let slice = ticket.slice.map(|(slice, number)| self.blocks.state(Block::Slice(slice), number));
        let l1 = ticket.l1.map(|(unit, number)| self.blocks.state(Block::L1(unit), number));
        let states = [slice.unwrap_or(Written::Yes), l1.unwrap_or(Written::Yes)];
        if let Some(failed) = states.into_iter().find(|state| matches!(state, Written::Failed(_))) {
            return failed;
        }
        if states.contains(&Written::NotYet) {
            self.wakers.add(waker);
            return Written::NotYet;
        }
        Written::Yes
    }

    /// Notes the beginning of a sync, before it is queued.
    pub(crate) fn sync_begins(&self) -> SyncMark {
        SyncMark(self.syncs.completed())
    }

    /// Takes the result of a sync.
    pub(crate) fn synced(&mut self, mark: SyncMark, result: Result<(), Errno>) {
        if result.is_ok() {
            self.syncs.succeed(mark.0);
            self.progress();
        }
    }

    /// Returns whether no table write has completed since the last sync began (R8).
    pub(crate) fn is_synced(&self) -> bool {
        self.syncs.is_durable(self.syncs.completed()) || !self.rules.hold(Rule::R8)
    }

    /// Changes the header. The change is written when all blocks are.
    pub(crate) fn change_header(&mut self, change: HeaderChange) {
        apply(&mut self.first, change);
        self.blocks.change(Block::Header);
    }

    /// Returns the reserve and ends the retirements. It is done when [`closed`](Self::closed) says so. No
    /// request is left.
    pub(crate) fn close(&mut self) {
        self.is_closing = true;
        self.last_error = None;
        self.end_given_up();
        self.retired.hurry();
        self.retired.retry();
        self.blocks.retry_all();
        self.retry_chunk();
        self.progress();
    }

    /// Returns the result of closing. It is an error if something remains in memory: a leak, or a change of a
    /// request that has failed.
    pub(crate) fn closed(&self) -> Option<Result<(), Errno>> {
        if !self.ops.is_idle() || self.has_due() {
            return None;
        }
        let is_clean = self.blocks.dirty() == 0 && self.retired.extents() == 0 && self.copies.is_empty();
        Some(if is_clean { Ok(()) } else { Err(self.last_error.unwrap_or(Errno::IO)) })
    }

    /// Marks the image as corrupt, and fails all later changes.
    pub(crate) fn found_bad(&mut self) {
        if !std::mem::replace(&mut self.is_bad, true) && self.geometry.version == Version::V3 {
            self.change_header(HeaderChange::SetCorrupt);
        }
    }

    /// Makes the next allocations of buffers fail.
    #[cfg(test)]
    pub(crate) fn fail_buffers(&mut self, count: u32) {
        self.ops.failing_buffers = count;
    }

    /// Returns figures.
    pub(crate) fn stats(&self) -> TableStats {
        TableStats {
            reserve: self.reserve.ready_clusters,
            retired: self.retired.extents() as u64,
            dirty: self.blocks.dirty() as u64,
        }
    }
}

/// Returns the clusters that have tables, and finds the refcount blocks at places of others.
fn known(header: &Header, l1: &L1, refcounts: &mut Refcounts, others: &[(HostOffset, u64)]) -> Known {
    let geometry = header.geometry;
    let run = |at: HostOffset, bytes: u64| Run {
        start: geometry.host_cluster(at).0,
        len: bytes.div_ceil(geometry.cluster()),
    };
    let tables = [header.l1, header.refcounts].map(|table| run(table.at, table.entries * 8));
    let fixed: Vec<Run> = std::iter::once(Run { start: 0, len: 1 }).chain(tables).collect();
    let others = others.iter().map(|(at, bytes)| run(*at, *bytes)).flat_map(|run| run.start..run.end());
    refcounts.check_places(|cluster| fixed.iter().any(|run| run.contains(cluster)));
    let l2 = l1.words.iter().filter_map(|word| decode_l1(geometry, *word).ok().flatten());
    let l2 = l2.map(|(at, _)| geometry.host_cluster(at).0);
    let first = l2.chain(refcounts.blocks()).chain(others).collect();
    Known::new(fixed, first)
}
