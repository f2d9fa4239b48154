//! Changes of the L1 table: new L2 tables (R2), and copies of shared ones (R3).

use super::Tables;
use super::blocks::Block;
use super::cluster_run::ClusterRun;
use super::ops::{OpPurpose, TableOpKind};
use super::plan::Ticket;
use super::refcounts::UnitState;
use super::rule::Rule;
use super::state::{TableCopy, TableCopyStage, TableState};
use crate::format::entry::{self, Mapping, RawEntry, decode, decode_l1, encode, encode_l1};
use crate::format::geometry::{Geometry, GuestOffset, HostCluster, HostOffset, SliceIndex};
use crate::runtime::Runtime;
use rustix::io::Errno;

impl<R: Runtime> Tables<R> {
    /// Returns the number of the L1 entry above a slice.
    pub(super) fn table_of(&self, slice: SliceIndex) -> u64 {
        slice.0 / self.slices_per_table()
    }

    pub(super) fn slices_per_table(&self) -> u64 {
        self.geometry.cluster() / self.options.unit
    }

    pub(super) fn table_state(&self, table: u64) -> TableState {
        let Some(word) = usize::try_from(table).ok().and_then(|table| self.l1.words.get(table)) else {
            return TableState::Bad;
        };
        match decode_l1(self.geometry, *word) {
            Ok(None) => TableState::Absent,
            Ok(Some((at, _))) if !self.is_table_place(at) => TableState::Bad,
            Ok(Some((at, true))) => TableState::Own(at),
            Ok(Some((at, false))) => TableState::Shared(at),
            Err(_) => TableState::Bad,
        }
    }

    /// Returns whether an L2 table can be there.
    fn is_table_place(&self, at: HostOffset) -> bool {
        let cluster = self.geometry.host_cluster(at).0;
        cluster < self.bound && !self.known.is_fixed(cluster)
    }

    /// Returns whether writes in place through a table need not wait for its L1 entry.
    pub(super) fn is_settled(&self, table: u64) -> bool {
        matches!(self.table_state(table), TableState::Own(_)) && !self.l1.unwritten.contains_key(&table)
    }

    /// Returns the block of an L1 entry.
    fn l1_unit(&self, table: u64) -> u32 {
        (table * 8 / self.options.unit) as u32
    }

    /// Changes an L1 entry.
    fn change_l1(&mut self, table: u64, word: u64) -> u64 {
        self.l1.words[table as usize] = word;
        let number = self.blocks.change(Block::L1(self.l1_unit(table)));
        self.l1.unwritten.insert(table, number);
        number
    }

    /// Returns the ticket for what is not written of the mapping of `at`. A request that changes nothing
    /// because of this mapping is answered after it.
    pub fn ticket_at(&mut self, at: GuestOffset) -> Ticket {
        let (slice, _) = self.geometry.slice(self.options.unit, at);
        self.ticket(slice)
    }

    /// Returns the ticket for what is not written of a slice and of the L1 entry above.
    pub(super) fn ticket(&mut self, slice: SliceIndex) -> Ticket {
        let table = self.table_of(slice);
        let unit = self.l1_unit(table);
        let is_unwritten = self.l1.unwritten.contains_key(&table);
        Ticket {
            slice: self.blocks.need(Block::Slice(slice)).map(|number| (slice, number)),
            l1: if is_unwritten {
                self.blocks.need(Block::L1(unit)).map(|number| (unit, number))
            } else {
                None
            },
        }
    }

    /// Notes that a unit of the L1 table is written.
    pub(super) fn l1_written(&mut self) {
        let (blocks, unit) = (&self.blocks, self.options.unit);
        let done = self
            .l1
            .unwritten
            .extract_if(|table, number| blocks.is_written(Block::L1((*table * 8 / unit) as u32), *number));
        let done: Vec<u64> = done.map(|(table, _)| table).collect();
        for table in done {
            self.settle(table);
        }
    }

    fn settle(&mut self, table: u64) {
        let settled = self.is_settled(table);
        let count = self.slices_per_table();
        for slice in (table * count..(table + 1) * count).map(SliceIndex) {
            if let Some(way) = self.slices.find(slice) {
                self.slices.settle(way, slice, settled);
            }
        }
    }

    /// Links a new L2 table. Returns whether it did: otherwise, the request waits.
    pub(super) fn link_table(&mut self, table: u64) -> bool {
        let Some(run) = self.reserve.take(1) else { return false };
        self.known.add(run.start);
        self.change_l1(table, encode_l1(self.geometry.host_offset(HostCluster(run.start))));
        self.settle(table);
        true
    }

    /// Returns the reference count of the cluster at `at`. `None`: it is being read.
    pub(super) fn count_of(&mut self, at: HostOffset) -> Result<Option<u64>, Errno> {
        let cluster = self.geometry.host_cluster(at).0;
        match self.refcounts.load(self.refcounts.unit_of(cluster), &mut self.ops, &self.blocks) {
            UnitState::Ready => Ok(self.refcounts.get(cluster)),
            UnitState::NoBlock => Ok(Some(0)),
            UnitState::Wait => Ok(None),
            UnitState::Failed(errno) => Err(errno),
        }
    }

    /// Marks a table as used by the active L1 table only.
    pub(super) fn own_table(&mut self, table: u64, at: HostOffset) {
        self.change_l1(table, encode_l1(at));
        self.settle(table);
    }

    /// Begins to copy a shared table.
    pub(super) fn copy_table(&mut self, table: u64, old: HostOffset) -> bool {
        let Some(run) = self.reserve.take(1) else { return false };
        let copy = TableCopy { old, new: HostCluster(run.start), stage: TableCopyStage::Unit { offset: 0 } };
        self.l1.copies.insert(table, copy);
        self.read_table_unit(table);
        true
    }

    /// Reads the next unit of a table that is copied.
    fn read_table_unit(&mut self, table: u64) {
        let unit = self.options.unit;
        let Some(TableCopy { old, stage: TableCopyStage::Unit { offset }, .. }) = self.l1.copies.get(&table)
        else {
            return;
        };
        let at = old.0 + offset;
        match self.ops.buffer(unit, unit) {
            Ok(buffer) => self.ops.queue(OpPurpose::TableRead(table), TableOpKind::Read { at, buffer }),
            Err(errno) => self.table_failed(table, errno),
        }
    }

    /// Takes a unit that was read, and writes it.
    pub(super) fn table_read(&mut self, table: u64, buffer: Option<R::Buffer>, result: Result<(), Errno>) {
        let Some(TableCopy { new, stage: TableCopyStage::Unit { offset }, .. }) = self.l1.copies.get(&table)
        else {
            return;
        };
        let at = self.geometry.host_offset(*new).0 + offset;
        match (result, buffer) {
            (Ok(()), Some(mut buffer)) => {
                let entries: Vec<_> = entry::load_entries(self.geometry, &buffer).collect();
                for (index, raw) in entries.into_iter().enumerate() {
                    entry::store_entry(self.geometry, &mut buffer, index, without_copied(self.geometry, raw));
                }
                self.ops.queue(OpPurpose::TableWrite(table), TableOpKind::Write { at, buffer });
            }
            (result, _) => self.table_failed(table, result.err().unwrap_or(Errno::IO)),
        }
    }

    /// Takes the result of writing a unit.
    pub(super) fn table_written(&mut self, table: u64, result: Result<(), Errno>) {
        if let Err(errno) = result {
            return self.table_failed(table, errno);
        }
        let cluster = self.geometry.cluster();
        let Some(TableCopy { stage, .. }) = self.l1.copies.get_mut(&table) else { return };
        let TableCopyStage::Unit { offset } = stage else { return };
        *offset += self.options.unit;
        if *offset < cluster {
            self.read_table_unit(table);
        } else {
            *stage = TableCopyStage::Syncing { stamp: self.syncs.completed() };
        }
    }

    /// Gives a copy up. Its cluster is not zero any more.
    fn table_failed(&mut self, table: u64, errno: Errno) {
        let Some(copy) = self.l1.copies.remove(&table) else { return };
        self.l1.failed.put(table, errno);
        self.retire(ClusterRun { start: copy.new.0, len: 1 }, Ticket::default(), false);
    }

    /// Fails the copies that wait for a sync.
    pub(super) fn table_syncs_failed(&mut self, errno: Errno) {
        let waiting = |(table, copy): (&u64, &TableCopy)| {
            matches!(copy.stage, TableCopyStage::Syncing { .. }).then_some(*table)
        };
        let tables: Vec<u64> = self.l1.copies.iter().filter_map(waiting).collect();
        for table in tables {
            self.table_failed(table, errno);
        }
    }

    /// Refers to copies that are durable. Returns whether it changed something.
    pub(super) fn advance_table_copies(&mut self) -> bool {
        if self.l1_moves() {
            return false;
        }
        let mut done = Vec::new();
        for (table, copy) in &self.l1.copies {
            if let TableCopyStage::Syncing { stamp } = copy.stage {
                self.syncs.want(stamp);
                if self.syncs.is_durable(stamp) || !self.rules.hold(Rule::R3) {
                    done.push(*table);
                }
            }
        }
        for table in &done {
            let Some(copy) = self.l1.copies.remove(table) else { continue };
            let number = self.change_l1(*table, encode_l1(self.geometry.host_offset(copy.new)));
            let count = self.slices_per_table();
            for slice in (table * count..(table + 1) * count).map(SliceIndex) {
                if let Some(way) = self.slices.find(slice) {
                    self.slices.empty(way);
                }
            }
            let changes = Ticket { slice: None, l1: Some((self.l1_unit(*table), number)) };
            let old = self.geometry.host_cluster(copy.old).0;
            self.known.add(copy.new.0);
            self.known.remove(old);
            self.retire(ClusterRun { start: old, len: 1 }, changes, false);
        }
        !done.is_empty()
    }
}

/// Returns an entry that says that its cluster may be shared.
fn without_copied(geometry: Geometry, raw: RawEntry) -> RawEntry {
    match decode(geometry, raw) {
        Ok(Mapping::Data { host, .. }) => encode(geometry, Mapping::Data { host, copied: false }),
        Ok(Mapping::Zero { kept, .. }) => encode(geometry, Mapping::Zero { kept, copied: false }),
        Ok(Mapping::Parts { host, allocated, zero, .. }) => {
            encode(geometry, Mapping::Parts { host, copied: false, allocated, zero })
        }
        _ => raw,
    }
}
