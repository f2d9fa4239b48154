//! Prepares clusters for the reserve (R1): finds free ones (R6), raises their counts, zeroes them, and syncs.

use super::Tables;
use super::blocks::Block;
use super::cluster_run::ClusterRun;
use super::ops::{OpPurpose, TableOpKind};
use super::plan::Written;
use super::refcounts::UnitState;
use super::reserve::{Chunk, ChunkStage};
use super::rule::Rule;
use crate::format::entry::OFFSET_LIMIT;
use crate::runtime::Runtime;
use rustix::io::Errno;

/// The runs of a chunk. Each is zeroed by an operation of its own.
const RUNS_MAX: usize = 64;
/// The units at the end of the file without a free cluster, after which its counts cannot be true. A cut
/// leaves two chunks there.
const FULL_UNITS_MAX: u32 = 64;

impl<R: Runtime> Tables<R> {
    /// Notes that a request waits for clusters. Returns the error of the last attempt.
    pub(super) fn demand(&mut self) -> Result<(), Errno> {
        if let Some(errno) = self.reserve.failed.take(&()) {
            return Err(errno);
        }
        self.reserve.demand();
        self.retry_chunk();
        Ok(())
    }

    /// Starts the chunk and the table that moves again after a failure.
    pub(super) fn retry_chunk(&mut self) {
        if std::mem::take(&mut self.reserve.is_stalled)
            && let Some(Chunk { stage: ChunkStage::Raising { unit, number, .. }, .. }) =
                &mut self.reserve.chunk
            && let Some(needed) = self.blocks.need(Block::Refcounts(*unit))
        {
            *number = needed;
        }
        self.retry_move();
    }

    /// Fails the requests that wait for clusters or for a table that moves. The stage is kept.
    pub(super) fn reserve_failed(&mut self, errno: Errno) {
        self.growing_failed(errno);
        if matches!(self.reserve.chunk, Some(Chunk { for_l1: true, stage: ChunkStage::Choosing, .. })) {
            // Other requests need chunks too, and may find clusters.
            self.reserve.chunk = None;
        } else {
            self.reserve.fail(errno);
        }
    }

    /// Prepares clusters. Returns whether it changed something.
    pub(super) fn advance_reserve(&mut self) -> bool {
        if self.is_closing {
            let runs = self.reserve.close();
            let is_changed = !runs.is_empty();
            runs.into_iter().for_each(|run| self.retired.lower(run));
            let is_being_zeroed = matches!(self.reserve.chunk, Some(Chunk { for_l1: false, .. }));
            if is_changed || is_being_zeroed {
                return is_changed;
            }
        }
        if self.reserve.is_stalled || self.moving.is_some() {
            return false;
        }
        let Some(chunk) = &mut self.reserve.chunk else { return self.begin_chunk() };
        match &mut chunk.stage {
            ChunkStage::Choosing => self.choose_runs(),
            ChunkStage::Raising { unit, number, to_zero, zeroing } => {
                let (cluster, gives_back) = (self.geometry.cluster(), !self.keeps_space);
                for run in to_zero.drain(..) {
                    let (at, len) = (run.start * cluster, run.len * cluster);
                    let kind = TableOpKind::Zero { at, len, gives_back };
                    self.ops.queue(OpPurpose::ChunkZero(run), kind);
                    *zeroing += 1;
                }
                match self.blocks.state(Block::Refcounts(*unit), *number) {
                    Written::Yes if *zeroing == 0 => {
                        chunk.stage = ChunkStage::Syncing { stamp: self.syncs.completed() };
                        true
                    }
                    Written::Failed(errno) => {
                        self.reserve_failed(errno);
                        true
                    }
                    _ => false,
                }
            }
            ChunkStage::Syncing { stamp } => {
                self.syncs.want(*stamp);
                if !self.syncs.is_durable(*stamp) && self.rules.hold(Rule::R1) {
                    return false;
                }
                let (runs, for_l1) = (std::mem::take(&mut chunk.runs), chunk.for_l1);
                self.reserve.chunk = None;
                self.bound = runs.iter().map(|run| run.end()).fold(self.bound, u64::max);
                if for_l1 {
                    self.begin_l1(&runs);
                } else {
                    self.reserve.add(runs);
                }
                true
            }
        }
    }

    fn begin_chunk(&mut self) -> bool {
        let for_l1 = self.clusters_for_l1().is_some() && self.grown.is_none();
        let reserve = &self.reserve;
        let is_wanted = reserve.is_used && reserve.ready_clusters * 2 < reserve.size;
        if self.is_closing || self.is_bad || !(for_l1 || is_wanted) {
            return false;
        }
        self.free_space.begin();
        self.reserve.chunk = Some(Chunk { runs: Vec::new(), for_l1, next: 0, stage: ChunkStage::Choosing });
        true
    }

    /// Chooses free clusters: within the file if some are found soon, otherwise at its end.
    fn choose_runs(&mut self) -> bool {
        if let Some(Chunk { for_l1: true, next, .. }) = self.reserve.chunk {
            return self.choose_for_l1(next);
        }
        let Some(unit) = self.free_space.unit() else { return self.choose_at_end(None) };
        match self.refcounts.load(unit, &mut self.ops, &self.blocks) {
            UnitState::Wait => return false,
            UnitState::Failed(errno) => self.reserve_failed(errno),
            UnitState::NoBlock => match self.place_of_block(unit) {
                Some(first) => return self.begin_block(first),
                None => self.free_space.skip(unit),
            },
            UnitState::Ready => match self.runs_worth_it(unit) {
                Some(runs) => self.raise_chunk(unit, runs, false),
                None => self.free_space.skip(unit),
            },
        }
        true
    }

    /// Returns the place of a missing block for a unit before the end of the file, if each cluster is worth
    /// it.
    fn place_of_block(&self, unit: u64) -> Option<u64> {
        let per_unit = self.refcounts.per_unit();
        let clusters = unit * per_unit..((unit + 1) * per_unit).min(self.reserve.end);
        let may_have = self.free_space.is_tight() && self.refcounts.has_room(unit * per_unit);
        clusters.filter(|_| may_have).find(|cluster| !self.known.contains(*cluster))
    }

    /// Chooses clusters for an L1 table: at the end of the file, or where enough of them follow one another.
    fn choose_for_l1(&mut self, unit: u64) -> bool {
        let exactly = self.clusters_for_l1().unwrap_or(1);
        if self.room() >= exactly {
            return self.choose_at_end(Some(exactly));
        }
        if unit > self.refcounts.unit_of(self.reserve.end) {
            self.reserve_failed(Errno::NOSPC);
            return true;
        }
        match self.refcounts.load(unit, &mut self.ops, &self.blocks) {
            UnitState::Wait => return false,
            UnitState::Failed(errno) => {
                self.reserve_failed(errno);
                return true;
            }
            UnitState::NoBlock => {}
            UnitState::Ready => {
                let runs = self.free_runs(unit, self.refcounts.per_unit());
                if let Some(run) = runs.into_iter().find(|run| run.len >= exactly) {
                    self.raise_chunk(unit, vec![ClusterRun { len: exactly, ..run }], false);
                    return true;
                }
            }
        }
        if let Some(chunk) = &mut self.reserve.chunk {
            chunk.next += 1;
        }
        true
    }

    /// Returns free clusters of a loaded unit, if they are worth a chunk.
    fn runs_worth_it(&self, unit: u64) -> Option<Vec<ClusterRun>> {
        let max = self.reserve.size;
        let runs = self.free_runs(unit, max);
        let clusters: u64 = runs.iter().map(|run| run.len).sum();
        (clusters >= self.free_space.worth(self.refcounts.per_unit()).min(max)).then_some(runs)
    }

    /// Returns at most `max` free clusters of a loaded unit.
    fn free_runs(&self, unit: u64, max: u64) -> Vec<ClusterRun> {
        let per_unit = self.refcounts.per_unit();
        let (first, is_free) = (unit * per_unit, self.is_free_in(unit));
        let (mut runs, mut clusters) = (Vec::<ClusterRun>::new(), 0);
        for cluster in (first..(first + per_unit).min(self.reserve.end)).filter(is_free) {
            let count = runs.len();
            match runs.last_mut() {
                Some(run) if run.end() == cluster => run.len += 1,
                _ if count == RUNS_MAX => break,
                _ => runs.push(ClusterRun { start: cluster, len: 1 }),
            }
            clusters += 1;
            if clusters == max {
                break;
            }
        }
        runs
    }

    /// Returns a test of whether a cluster of a loaded unit may be taken (R6).
    fn is_free_in(&self, unit: u64) -> impl Fn(&u64) -> bool {
        let first = unit * self.refcounts.per_unit();
        let punched = self.retired.punched_within(first, self.refcounts.per_unit());
        move |cluster| {
            let is_punched = punched[(cluster - first) as usize] && self.rules.hold(Rule::R6Punch);
            self.refcounts.get(*cluster) == Some(0) && !is_punched && !self.known.contains(*cluster)
        }
    }

    /// Chooses clusters at the end of the file, and makes a block for their counts if there is none.
    fn choose_at_end(&mut self, exactly: Option<u64>) -> bool {
        let first = self.reserve.end;
        if self.room() == 0 {
            return self.is_full();
        }
        let unit = self.refcounts.unit_of(first);
        match self.refcounts.load(unit, &mut self.ops, &self.blocks) {
            UnitState::Wait => return false,
            UnitState::Failed(errno) => self.reserve_failed(errno),
            UnitState::NoBlock => return self.begin_block(first),
            UnitState::Ready => {
                if let Some(run) = self.run_at_end(unit, exactly) {
                    (self.reserve.end, self.reserve.full_units) = (run.end(), 0);
                    self.raise_chunk(unit, vec![run], true);
                } else if self.reserve.full_units == FULL_UNITS_MAX {
                    self.found_bad();
                    self.reserve_failed(Errno::IO);
                }
            }
        }
        true
    }

    /// Returns the number of clusters behind the end of the file that there can be.
    pub(super) fn room(&self) -> u64 {
        let clusters = |bytes| bytes / self.geometry.cluster();
        let bytes = self.options.device_bytes.unwrap_or(OFFSET_LIMIT).min(OFFSET_LIMIT);
        clusters(bytes).saturating_sub(self.reserve.end)
    }

    /// Handles an image that cannot become longer. A request waits if clusters are about to be free.
    pub(super) fn is_full(&mut self) -> bool {
        let end = self.refcounts.unit_of(self.reserve.end) + 1;
        if self.free_space.tighten(end) {
            return true;
        }
        if self.retired.is_busy() {
            if self.retired.stalled.is_none() && !self.blocks.has_failed() {
                return self.retired.hurry();
            }
            self.retired.retry_all(&mut self.blocks);
        }
        self.reserve_failed(Errno::NOSPC);
        true
    }

    /// Returns free clusters at the end of the file, counted in `unit`, or moves the end behind the unit.
    fn run_at_end(&mut self, unit: u64, exactly: Option<u64>) -> Option<ClusterRun> {
        let end = self.reserve.end.saturating_add(self.room());
        let unit_end = ((unit + 1) * self.refcounts.per_unit()).min(end);
        let max = exactly.unwrap_or(self.reserve.size);
        let (mut start, mut skips) = (self.reserve.end, false);
        let is_free = self.is_free_in(unit);
        let found = loop {
            let Some(free) = (start..unit_end).find(&is_free) else { break None };
            let len = (free..unit_end).take(max as usize).take_while(&is_free).count() as u64;
            if exactly.is_none_or(|exactly| len == exactly) {
                break Some(ClusterRun { start: free, len });
            }
            (start, skips) = (free + len, true);
        };
        drop(is_free);
        if skips {
            self.free_space.freed(unit);
        }
        if found.is_none() {
            self.reserve.end = unit_end;
            self.reserve.full_units += 1;
        }
        found
    }

    /// Raises the counts of free clusters, which are in a loaded unit.
    fn raise_chunk(&mut self, unit: u64, runs: Vec<ClusterRun>, is_at_end: bool) {
        let Some(chunk) = &mut self.reserve.chunk else { return };
        for cluster in runs.iter().flat_map(|run| run.start..run.end()) {
            self.refcounts.set(cluster, 1);
        }
        let number = self.blocks.change(Block::Refcounts(unit));
        let is_zeroed = !chunk.for_l1 && (is_at_end || self.rules.hold(Rule::R6));
        let to_zero = if is_zeroed { runs.clone() } else { Vec::new() };
        chunk.runs = runs;
        chunk.stage = ChunkStage::Raising { unit, number, to_zero, zeroing: 0 };
    }

    /// Takes the result of zeroing a run of the chunk.
    pub(super) fn chunk_zeroed(&mut self, run: ClusterRun, result: Result<(), Errno>) {
        let Some(Chunk { stage: ChunkStage::Raising { to_zero, zeroing, .. }, .. }) = &mut self.reserve.chunk
        else {
            return;
        };
        *zeroing -= 1;
        if let Err(errno) = result {
            to_zero.push(run);
            self.reserve_failed(errno);
        }
    }
}
