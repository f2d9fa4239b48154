//! The tables of an image that is written: the only code that changes them.
//!
//! It does no I/O. It emits operations ([`Tables::next_op`]) and takes their completions. Any queue can carry
//! out any operation. The rules R1 to R9 are argued in
//! `docs/adr/0011-a-table-holds-only-what-may-be-on-disk.md`.

mod blocks;
mod clear;
pub(crate) mod cluster_copies;
mod cluster_run;
mod entries;
mod free_space;
pub(crate) mod grow;
mod kept_errors;
mod known;
mod l1;
mod load;
mod lower;
mod moves;
pub(crate) mod ops;
pub(crate) mod plan;
mod prepare;
mod refcounts;
mod reserve;
mod retired;
pub(crate) mod rule;
pub(crate) mod state;
mod syncs;
mod write;

use super::format::entry::{UNWRITTEN, WRITING, store_entry};
use super::format::geometry::{HostOffset, SliceIndex, Version};
use super::format::header::HeaderChange;
use super::runtime::Runtime;
use super::slices::{WayIndex, memory_bits, on_disk, with_bits};
use blocks::Block;
use ops::{OpId, OpPurpose, TableOp, TableOpKind};
use plan::{SyncMark, Ticket, Written};
use refcounts::store_words;
use rule::Rule;
use rustix::io::Errno;
use state::TableState;
#[cfg(test)]
use state::TableStats;
use state::Tables;

/// The steps of work in one call. Each is bounded.
const STEPS_MAX: u32 = 8;

impl<R: Runtime> Tables<R> {
    /// Returns the next operation that is due. `None` does not say that there is none: work may be left.
    pub fn next_op(&mut self) -> Option<TableOp<R>> {
        if std::mem::take(&mut self.has_work) {
            self.progress();
        }
        if let Some(op) = self.ops.next() {
            return Some(op);
        }
        while let Some((block, number)) = self.blocks.take_due() {
            let buffer = self.place_of(block).ok_or(Errno::IO).and_then(|at| {
                let buffer = self.ops.buffer(self.options.unit, self.options.unit)?;
                Ok((at, buffer))
            });
            match buffer {
                Ok((at, mut buffer)) => {
                    self.store_block(block, &mut buffer);
                    let kind = TableOpKind::Write { at, buffer };
                    return Some(self.ops.start(OpPurpose::Block(block, number), kind));
                }
                Err(errno) => self.write_failed(block, number, errno),
            }
        }
        if self.syncs.is_due() {
            let mark = self.syncs.begin();
            return Some(self.ops.start(OpPurpose::Sync(mark), TableOpKind::Sync));
        }
        // The last of all: no request waits for these.
        let run = self.retired.next_punch()?;
        let (cluster, gives_back) = (self.geometry.cluster(), !self.keeps_space);
        let kind = TableOpKind::Zero { at: run.start * cluster, len: run.len * cluster, gives_back };
        Some(self.ops.start(OpPurpose::Punch(run), kind))
    }

    /// Takes back an operation that was not carried out, for another executor.
    pub fn take_back(&mut self, op: TableOp<R>) {
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
    pub fn has_due(&self) -> bool {
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
                for index in 0..self.entries() {
                    let raw = self.slices.entry(way, index);
                    store_entry(self.geometry, into, index, on_disk(raw));
                }
                self.edit_flagged(way, UNWRITTEN, |flags| flags & !UNWRITTEN | WRITING);
            }
            Block::L1(part) => store_words(&self.l1.words, part, into),
            Block::Refcounts(part) => self.refcounts.store(part, into),
            Block::Table(part) => self.refcounts.store_table(part, into),
            Block::Header => into.copy_from_slice(&self.first[..into.len()]),
        }
    }

    /// Changes the memory bits of the entries that have `flag`. Requests may look at the slice meanwhile, so
    /// the entries are found before.
    fn edit_flagged(&self, way: WayIndex, flag: u64, edit: impl Fn(u64) -> u64) {
        let has_flag = |index: &usize| memory_bits(self.slices.entry(way, *index)) & flag != 0;
        let indexes: Vec<usize> = (0..self.entries()).filter(has_flag).collect();
        if !indexes.is_empty() {
            self.slices.edit(way, indexes, |_, raw| with_bits(on_disk(raw), edit(memory_bits(raw))));
        }
    }

    /// Takes the completion of an operation. A transfer is whole, or has failed.
    pub fn complete(&mut self, id: OpId, buffer: Option<R::Buffer>, result: Result<u32, Errno>) {
        let Some(purpose) = self.ops.end(id) else { return };
        let result = result.map(|_| ());
        if let Err(errno) = result {
            self.last_error = Some(errno);
        }
        let is_change = !matches!(
            purpose,
            OpPurpose::Load(_) | OpPurpose::Refcounts(_) | OpPurpose::Sync(_) | OpPurpose::TableRead(_)
        );
        if is_change {
            self.syncs.count();
        }
        match purpose {
            OpPurpose::Block(block, number) => self.block_written(block, number, result),
            OpPurpose::Load(load) => self.loaded(load, buffer, result),
            OpPurpose::Refcounts(unit) => {
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
            OpPurpose::Sync(mark) => {
                self.syncs.end(mark, result.is_ok());
                if let Err(errno) = result {
                    self.reserve_failed(errno);
                    self.retired.stall(errno);
                    self.table_syncs_failed(errno);
                }
            }
            OpPurpose::ChunkZero(run) => self.chunk_zeroed(run, result),
            OpPurpose::Punch(run) => self.punched(run),
            OpPurpose::TableRead(table) => self.table_read(table, buffer, result),
            OpPurpose::TableWrite(table) => self.table_written(table, result),
            OpPurpose::Move(number) => self.moved(number, result),
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
                self.edit_flagged(way, WRITING, |flags| flags & !WRITING | back);
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
    pub fn written(&mut self, ticket: Ticket, waker: &R::Waker) -> Written {
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
    pub fn sync_begins(&self) -> SyncMark {
        SyncMark(self.syncs.completed())
    }

    /// Takes the result of a sync.
    pub fn synced(&mut self, mark: SyncMark, result: Result<(), Errno>) {
        if result.is_ok() {
            self.syncs.succeed(mark.0);
            self.progress();
        }
    }

    /// Returns whether no table write has completed since the last sync began (R8).
    pub fn is_synced(&self) -> bool {
        self.syncs.is_durable(self.syncs.completed()) || !self.rules.hold(Rule::R8)
    }

    /// Changes the header. The change is written when all blocks are.
    fn change_header(&mut self, change: HeaderChange) {
        change.apply(&mut self.first);
        self.blocks.change(Block::Header);
    }

    /// Returns the reserve and ends the retirements. It is done when [`closed`](Self::closed) says so. No
    /// request is left.
    pub fn close(&mut self) {
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
    pub fn closed(&self) -> Option<Result<(), Errno>> {
        if !self.ops.is_idle() || self.has_due() {
            return None;
        }
        let is_clean = self.blocks.dirty() == 0
            && self.retired.extents() == 0
            && self.copies.is_empty()
            && self.reserve.chunk.is_none();
        Some(if is_clean { Ok(()) } else { Err(self.last_error.unwrap_or(Errno::IO)) })
    }

    /// Marks the image as corrupt if it is written, and fails all later changes.
    pub fn found_bad(&mut self) {
        let can_mark = self.options.writable && self.geometry.version == Version::V3;
        if !std::mem::replace(&mut self.is_bad, true) {
            self.growing_failed(Errno::IO);
            if can_mark {
                self.change_header(HeaderChange::SetCorrupt);
            }
        }
    }

    /// Makes the next allocations of buffers fail.
    #[cfg(test)]
    pub(crate) fn fail_buffers(&mut self, count: u32) {
        self.ops.failing_buffers = count;
    }

    /// Returns figures.
    #[cfg(test)]
    pub(crate) fn stats(&self) -> TableStats {
        TableStats {
            reserve: self.reserve.ready_clusters,
            retired: self.retired.extents() as u64,
            dirty: self.blocks.dirty() as u64,
        }
    }
}
