//! Tables that move (R7): a new refcount block, a larger refcount table, a larger L1 table.

use super::Tables;
use super::blocks::Block;
use super::cluster_run::ClusterRun;
use super::ops::{OpPurpose, TableOpKind};
use super::plan::Written;
use super::refcounts::store_words;
use super::rule::Rule;
use super::state::{MoveStage, MovedTable, TableMove};
use crate::format::geometry::{HostCluster, HostOffset};
use crate::format::header::{HeaderChange, REFCOUNTS_MAX};
use crate::format::refcount;
use crate::runtime::Runtime;
use rustix::io::Errno;

impl<R: Runtime> Tables<R> {
    /// Begins a refcount block for the cluster `first`, and at its place. The cluster is free.
    pub(super) fn begin_block(&mut self, first: u64) -> bool {
        let index = self.refcounts.block_of(first);
        if self.refcounts.is_bad(index) {
            self.found_bad();
            self.reserve_failed(Errno::IO);
            return true;
        }
        if index >= self.refcounts.table.len() as u64 {
            return self.begin_table(first);
        }
        let mut bytes = vec![0; self.geometry.cluster() as usize];
        let is_set = refcount::set(self.geometry, &mut bytes, first % self.geometry.block_entries(), 1);
        debug_assert!(is_set.is_ok(), "1 fits each width");
        let at = self.geometry.host_offset(HostCluster(first));
        self.reserve.end = self.reserve.end.max(first + 1);
        let mut stage = MoveStage::Writing;
        if !self.rules.hold(Rule::R7) {
            let block = self.refer_to_block(index, at);
            stage = MoveStage::Pointing { block, number: self.blocks.change(block) };
        }
        self.begin_move(MovedTable::Block { index, at }, vec![(first, bytes)], stage)
    }

    /// Begins a larger refcount table at the cluster `first`, with the blocks that count it behind it.
    fn begin_table(&mut self, first: u64) -> bool {
        let (cluster, per_block) = (self.geometry.cluster(), self.geometry.block_entries());
        let old = self.refcounts.table.len() as u64;
        let (first_block, mut blocks) = (self.refcounts.block_of(first), 1);
        let (clusters, entries) = loop {
            let entries = (old + old / 2).max(first_block + blocks);
            let clusters = (entries * 8).div_ceil(cluster);
            let needed = self.refcounts.block_of(first + clusters + blocks - 1) - first_block + 1;
            if needed <= blocks {
                break (clusters, clusters * cluster / 8);
            }
            blocks = needed;
        };
        if clusters * cluster > REFCOUNTS_MAX {
            self.reserve_failed(Errno::FBIG);
            return true;
        }
        if self.room() < clusters + blocks {
            return self.is_full();
        }
        let end = first + clusters + blocks;
        let mut words = self.refcounts.table.clone();
        words.resize(entries as usize, 0);
        let mut to_write = Vec::new();
        for block in 0..blocks {
            let at = first + clusters + block;
            words[(first_block + block) as usize] = at * cluster;
            let mut bytes = vec![0; cluster as usize];
            let from = (first_block + block) * per_block;
            for counted in first.max(from)..end.min(from + per_block) {
                let is_set = refcount::set(self.geometry, &mut bytes, counted - from, 1);
                debug_assert!(is_set.is_ok(), "1 fits each width");
            }
            to_write.push((at, bytes));
        }
        for part in 0..clusters {
            let mut bytes = vec![0; cluster as usize];
            store_words(&words, part as u32, &mut bytes);
            to_write.push((first + part, bytes));
        }
        self.reserve.end = end;
        let at = self.geometry.host_offset(HostCluster(first));
        self.begin_move(
            MovedTable::Table { words, at, clusters: clusters as u32 },
            to_write,
            MoveStage::Writing,
        )
    }

    fn begin_move(&mut self, what: MovedTable, to_write: Vec<(u64, Vec<u8>)>, stage: MoveStage) -> bool {
        self.moving = Some(TableMove { what, to_write, writing: 0, running: Vec::new(), stage });
        true
    }

    /// Enters a block into the refcount table. Returns the table's block.
    fn refer_to_block(&mut self, index: u64, at: HostOffset) -> Block {
        self.refcounts.refer(index, at);
        Block::Table(self.refcounts.table_unit(index))
    }

    /// Moves a table on. Returns whether it changed something.
    pub(super) fn advance_move(&mut self) -> bool {
        if self.reserve.is_stalled {
            return false;
        }
        let Some(moving) = &mut self.moving else { return false };
        let cluster = self.geometry.cluster();
        let mut failed = None;
        for (number, bytes) in std::mem::take(&mut moving.to_write) {
            let Ok(mut buffer) = self.ops.buffer(cluster, self.options.unit) else {
                moving.to_write.push((number, bytes));
                failed = Some(Errno::NOMEM);
                continue;
            };
            buffer.copy_from_slice(&bytes);
            self.ops.queue(OpPurpose::Move(number), TableOpKind::Write { at: number * cluster, buffer });
            moving.running.push((number, bytes));
        }
        moving.writing = moving.running.len();
        if let Some(errno) = failed {
            self.reserve_failed(errno);
            return true;
        }
        match moving.stage {
            MoveStage::Writing if moving.writing == 0 => {
                moving.stage = MoveStage::Syncing { stamp: self.syncs.completed() };
                true
            }
            MoveStage::Writing => false,
            MoveStage::Syncing { stamp } | MoveStage::SyncingPointer { stamp }
                if !self.syncs.is_durable(stamp) =>
            {
                self.syncs.want(stamp);
                false
            }
            MoveStage::Syncing { .. } => {
                self.point();
                true
            }
            MoveStage::Pointing { block, number } => match self.blocks.state(block, number) {
                Written::Yes if moving.writing == 0 => {
                    moving.stage = MoveStage::SyncingPointer { stamp: self.syncs.completed() };
                    true
                }
                Written::Failed(errno) => {
                    self.reserve_failed(errno);
                    true
                }
                _ => false,
            },
            // A write to the old place must not land later.
            MoveStage::SyncingPointer { .. }
                if matches!(moving.what, MovedTable::L1 { .. }) && self.blocks.writes_l1() =>
            {
                false
            }
            MoveStage::SyncingPointer { .. } => {
                self.end_move();
                true
            }
        }
    }

    /// Refers to the table at its new place, which is durable.
    fn point(&mut self) {
        let Some(moving) = &self.moving else { return };
        let block = match moving.what {
            MovedTable::Block { index, at } => self.refer_to_block(index, at),
            MovedTable::Table { at, clusters, .. } => {
                HeaderChange::Refcounts { at, clusters }.apply(&mut self.first);
                Block::Header
            }
            MovedTable::L1 { ref words, at, size } => {
                let entries = words.len() as u32;
                HeaderChange::L1AndSize { l1: at, entries, size }.apply(&mut self.first);
                Block::Header
            }
        };
        let number = self.blocks.change(block);
        if let Some(moving) = &mut self.moving {
            moving.stage = MoveStage::Pointing { block, number };
        }
    }

    /// Uses the table at its new place. Its old place is not used on the disk any more.
    fn end_move(&mut self) {
        let Some(TableMove { what, .. }) = self.moving.take() else { return };
        let old = match what {
            MovedTable::Block { at, .. } => {
                self.known.add(self.geometry.host_cluster(at).0);
                return;
            }
            MovedTable::Table { words, at, .. } => {
                let cluster = self.geometry.cluster();
                let len = (self.refcounts.table.len() as u64 * 8).div_ceil(cluster);
                let start = self.geometry.host_cluster(self.refcounts.table_at).0;
                let new = (words.len() as u64 * 8).div_ceil(cluster);
                let first = self.geometry.host_cluster(at).0;
                let blocks = words.iter().skip(self.refcounts.table.len()).filter(|at| **at != 0);
                blocks.for_each(|at| self.known.add(at / cluster));
                self.known.moved(ClusterRun { start, len }, ClusterRun { start: first, len: new });
                self.refcounts.move_to(words, at);
                ClusterRun { start, len }
            }
            MovedTable::L1 { words, at, .. } => {
                let old = self.l1_run();
                (self.l1.words, self.l1.at) = (words, at);
                self.known.moved(old, self.l1_run());
                self.growth_ends();
                old
            }
        };
        if old.len > 0 {
            self.retired.lower(old);
        }
    }

    /// Begins to move the L1 table to the clusters of a chunk.
    pub(super) fn begin_l1(&mut self, runs: &[ClusterRun]) {
        let (Some(run), Some(growing)) = (runs.first(), self.growing) else { return };
        let mut words = self.l1.words.clone();
        words.resize(growing.entries as usize, 0);
        let parts = (0..run.len).map(|part| {
            let mut bytes = vec![0; self.geometry.cluster() as usize];
            store_words(&words, part as u32, &mut bytes);
            (run.start + part, bytes)
        });
        let to_write = parts.collect();
        let at = self.geometry.host_offset(HostCluster(run.start));
        self.begin_move(MovedTable::L1 { words, at, size: growing.size }, to_write, MoveStage::Writing);
    }

    /// Returns whether the L1 table moves, so that it must not change.
    pub(super) fn l1_moves(&self) -> bool {
        matches!(self.moving, Some(TableMove { what: MovedTable::L1 { .. }, .. }))
    }

    /// Starts the stage again after a failure.
    pub(super) fn retry_move(&mut self) {
        if let Some(TableMove { stage: MoveStage::Pointing { block, number }, .. }) = &mut self.moving
            && let Some(needed) = self.blocks.need(*block)
        {
            *number = needed;
        }
    }

    /// Takes the result of writing a part.
    pub(super) fn moved(&mut self, number: u64, result: Result<(), Errno>) {
        let Some(moving) = &mut self.moving else { return };
        let Some(index) = moving.running.iter().position(|(cluster, _)| *cluster == number) else { return };
        let part = moving.running.swap_remove(index);
        if let Err(errno) = result {
            moving.to_write.push(part);
            self.reserve_failed(errno);
        }
    }
}
