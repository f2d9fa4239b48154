//! The reference counts in memory, in units of table I/O.

use super::blocks::{Block, Blocks};
use super::ops::{OpPurpose, TableOpKind, TableOps};
use crate::format::geometry::{Geometry, HostOffset};
use crate::format::refcount;
use crate::runtime::Runtime;
use rustix::io::Errno;
use std::collections::{HashMap, HashSet};

/// The units to keep that need no write.
const CACHED_MAX: usize = 64;
/// The bits of an entry of the refcount table that are a place.
const PLACE: u64 = !0x1ff;

/// The refcount table, and the cached units of its blocks.
#[derive(Debug)]
pub(super) struct Refcounts {
    geometry: Geometry,
    unit: u64,
    /// The entries, as places of blocks.
    pub(super) table: Vec<u64>,
    pub(super) table_at: HostOffset,
    /// The end of the file when it was opened, or of a newer block. No block is beyond it.
    end: u64,
    /// The blocks whose places have other tables, in order.
    misplaced: Vec<u64>,
    units: HashMap<u64, Vec<u8>>,
    loading: HashSet<u64>,
}

/// The state of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UnitState {
    Ready,
    /// It is being read.
    Wait,
    /// There is no block, so all counts are 0.
    NoBlock,
    /// There is no memory to read it.
    Failed(Errno),
}

impl Refcounts {
    pub(super) fn new(geometry: Geometry, unit: u64, table: &[u8], table_at: HostOffset, end: u64) -> Self {
        let words = table.as_chunks::<8>().0.iter();
        let table = words.map(|word| u64::from_be_bytes(*word) & PLACE).collect();
        let (units, loading) = (HashMap::new(), HashSet::new());
        Self { geometry, unit, table, table_at, end, misplaced: Vec::new(), units, loading }
    }

    /// Returns the clusters of all blocks.
    pub(super) fn blocks(&self) -> impl Iterator<Item = u64> {
        self.table.iter().filter(|at| **at != 0).map(|at| at / self.geometry.cluster())
    }

    /// Notes the blocks at places of other tables.
    pub(super) fn check_places(&mut self, is_taken: impl Fn(u64) -> bool) {
        let cluster = self.geometry.cluster();
        let places = self.table.iter().zip(0..).filter(|(at, _)| **at != 0);
        self.misplaced = places.filter(|(at, _)| is_taken(**at / cluster)).map(|(_, index)| index).collect();
    }

    /// Returns the number of counts in a unit.
    pub(super) fn per_unit(&self) -> u64 {
        self.unit * 8 / u64::from(self.geometry.refcount_bits())
    }

    /// Returns the unit that counts a cluster.
    pub(super) fn unit_of(&self, cluster: u64) -> u64 {
        cluster / self.per_unit()
    }

    /// Returns the number of the block that counts a cluster.
    pub(super) fn block_of(&self, cluster: u64) -> u64 {
        cluster / self.geometry.block_entries()
    }

    /// Returns the place of a unit in the file.
    pub(super) fn place(&self, unit: u64) -> Option<u64> {
        let per_block = self.geometry.cluster() / self.unit;
        let block = self.block(unit / per_block).filter(|_| !self.is_bad(unit / per_block))?;
        Some(block + unit % per_block * self.unit)
    }

    /// Returns the place of a block, which may be anywhere.
    fn block(&self, index: u64) -> Option<u64> {
        let block = self.table.get(usize::try_from(index).ok()?);
        block.copied().filter(|block| *block != 0)
    }

    /// Returns whether the entry of a block cannot be true: it is not aligned, beyond the end,
    /// or the place of another table.
    pub(super) fn is_bad(&self, index: u64) -> bool {
        let is_good = |at: u64| self.geometry.is_aligned(HostOffset(at)) && at < self.end;
        self.block(index).is_some_and(|at| !is_good(at)) || self.misplaced.binary_search(&index).is_ok()
    }

    /// Returns whether the table has room for the block of a cluster, and no block that is bad.
    pub(super) fn has_room(&self, cluster: u64) -> bool {
        let index = self.block_of(cluster);
        index < self.table.len() as u64 && !self.is_bad(index)
    }

    /// Enters a block into the table.
    pub(super) fn refer(&mut self, index: u64, at: HostOffset) {
        self.table[index as usize] = at.0;
        self.end = self.end.max(at.0 + self.geometry.cluster());
    }

    /// Uses a larger table.
    pub(super) fn move_to(&mut self, table: Vec<u64>, at: HostOffset) {
        let last = table.iter().enumerate().filter(|(index, _)| *index >= self.table.len());
        let last = last.map(|(_, at)| *at).max().unwrap_or(0);
        self.end = self.end.max(last + self.geometry.cluster());
        (self.table, self.table_at) = (table, at);
    }

    /// Starts to load a unit if needed.
    pub(super) fn load<R: Runtime>(
        &mut self,
        unit: u64,
        ops: &mut TableOps<R>,
        blocks: &Blocks,
    ) -> UnitState {
        if self.units.contains_key(&unit) {
            return UnitState::Ready;
        }
        let Some(at) = self.place(unit) else { return UnitState::NoBlock };
        if self.loading.contains(&unit) {
            return UnitState::Wait;
        }
        self.shrink(blocks);
        match ops.buffer(self.unit, self.unit) {
            Ok(buffer) => {
                self.loading.insert(unit);
                ops.queue(OpPurpose::Refcounts(unit), TableOpKind::Read { at, buffer });
                UnitState::Wait
            }
            Err(errno) => UnitState::Failed(errno),
        }
    }

    pub(super) fn loaded(&mut self, unit: u64, bytes: Option<&[u8]>) {
        self.loading.remove(&unit);
        if let Some(bytes) = bytes {
            self.units.insert(unit, bytes.to_vec());
        }
    }

    /// Forgets units that need no write.
    fn shrink(&mut self, blocks: &Blocks) {
        if self.units.len() >= CACHED_MAX {
            self.units.retain(|unit, _| blocks.is_dirty(Block::Refcounts(*unit)));
        }
    }

    /// Returns a count of a loaded unit.
    pub(super) fn get(&self, cluster: u64) -> Option<u64> {
        let bytes = self.units.get(&self.unit_of(cluster))?;
        Some(refcount::get(self.geometry, bytes, cluster % self.per_unit()))
    }

    /// Changes a count of a loaded unit. Returns whether it did.
    pub(super) fn set(&mut self, cluster: u64, count: u64) -> bool {
        let (unit, index) = (self.unit_of(cluster), cluster % self.per_unit());
        let Some(bytes) = self.units.get_mut(&unit) else { return false };
        refcount::set(self.geometry, bytes, index, count).is_ok()
    }

    /// Copies a unit into a buffer.
    pub(super) fn store(&self, unit: u64, into: &mut [u8]) {
        if let Some(bytes) = self.units.get(&unit) {
            into.copy_from_slice(bytes);
        }
    }

    /// Copies a unit of the refcount table into a buffer.
    pub(super) fn store_table(&self, unit: u32, into: &mut [u8]) {
        store_words(&self.table, unit, into);
    }

    /// Returns the unit of the refcount table with the entry of a block.
    pub(super) fn table_unit(&self, block: u64) -> u32 {
        (block * 8 / self.unit) as u32
    }
}

/// Copies a unit of a table of words into a buffer. Beyond the end are zeroes.
pub(super) fn store_words(words: &[u64], unit: u32, into: &mut [u8]) {
    let first = unit as usize * (into.len() / 8);
    let words = words.iter().skip(first).copied().chain(std::iter::repeat(0));
    for (bytes, word) in into.as_chunks_mut::<8>().0.iter_mut().zip(words) {
        *bytes = word.to_be_bytes();
    }
}
