//! The reserve of new clusters (R1). Each has a refcount of 1, is within the file, and is zero, all durably.

use super::Tables;
use super::blocks::Block;
use super::op::TableOpKind;
use super::ops::{Purpose, Run};
use super::plan::Written;
use super::refcounts::Load;
use super::retire::Free;
use super::rule::Rule;
use kickless_io::Errno;
use std::collections::VecDeque;

/// The clusters of the first chunk.
const CHUNK_MIN: u64 = 16;
/// The largest number of clusters of a chunk.
const CHUNK_MAX: u64 = 1024;

/// The clusters that are ready, and the chunk that is prepared.
#[derive(Debug)]
pub(super) struct Reserve {
    ready: VecDeque<Run>,
    ready_clusters: u64,
    chunk: Option<Chunk>,
    /// The number of clusters of the next chunk.
    size: u64,
    size_max: u64,
    /// The first cluster that was never used, at the end of the file.
    pub(super) end: u64,
    /// Requests need clusters.
    is_used: bool,
    /// A request waits for the chunk.
    has_waiters: bool,
    /// The chunk, or the table that moves for it, failed. The next request starts it again.
    pub(super) is_stalled: bool,
    /// The error for a waiting request.
    failed: Option<Errno>,
}

/// Clusters that are prepared, all counted in one unit.
#[derive(Debug)]
struct Chunk {
    runs: Vec<Free>,
    /// It is for an L1 table that grows, and becomes its place.
    for_l1: bool,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// The counts are loaded, or a block for them is made.
    Loading,
    /// The counts are written, and the clusters zeroed.
    Raising { unit: u64, number: u64, to_zero: Vec<Run>, zeroing: usize },
    /// The sync is running.
    Syncing { stamp: u64 },
}

impl Reserve {
    pub(super) fn new(end: u64, cluster: u64, bytes_max: u64) -> Self {
        let size_max = (bytes_max / cluster).clamp(1, CHUNK_MAX);
        Self {
            ready: VecDeque::new(),
            ready_clusters: 0,
            chunk: None,
            size: CHUNK_MIN.min(size_max),
            size_max,
            end,
            is_used: false,
            has_waiters: false,
            is_stalled: false,
            failed: None,
        }
    }

    /// Takes at most `len` contiguous clusters.
    pub(super) fn take(&mut self, len: u64) -> Option<Run> {
        self.is_used = true;
        let front = self.ready.front_mut()?;
        let run = front.split(len);
        if front.len == 0 {
            self.ready.pop_front();
        }
        self.ready_clusters -= run.len;
        Some(run)
    }

    pub(super) fn clusters(&self) -> u64 {
        self.ready_clusters
    }

    /// Fails the waiting requests. The stage is kept.
    fn fail(&mut self, errno: Errno) {
        self.is_stalled = true;
        if std::mem::take(&mut self.has_waiters) {
            self.failed = Some(errno);
        }
    }

    /// Forgets the error of an earlier attempt.
    pub(super) fn retry(&mut self) {
        self.failed = None;
    }

    /// Takes all clusters, and forgets the chunk whose counts are not raised.
    fn close(&mut self) -> Vec<Run> {
        self.ready_clusters = 0;
        if matches!(self.chunk, Some(Chunk { stage: Stage::Loading, .. })) {
            self.chunk = None;
        }
        self.ready.drain(..).collect()
    }
}

impl Tables {
    /// Notes that a request waits for clusters. Returns the error of the last attempt.
    pub(super) fn demand(&mut self) -> Result<(), Errno> {
        if let Some(errno) = self.reserve.failed.take() {
            return Err(errno);
        }
        if !std::mem::replace(&mut self.reserve.has_waiters, true) && self.reserve.is_used {
            self.reserve.size = (self.reserve.size * 2).min(self.reserve.size_max);
        }
        self.reserve.is_used = true;
        self.retry_chunk();
        Ok(())
    }

    /// Starts the chunk and the table that moves again after a failure.
    pub(super) fn retry_chunk(&mut self) {
        if std::mem::take(&mut self.reserve.is_stalled)
            && let Some(Chunk { stage: Stage::Raising { unit, number, .. }, .. }) = &mut self.reserve.chunk
            && let Some(needed) = self.blocks.need(Block::Refcounts(*unit))
        {
            *number = needed;
        }
        self.retry_move();
    }

    /// Fails the requests that wait for clusters or for a table that moves. The stage is kept.
    pub(super) fn reserve_failed(&mut self, errno: Errno) {
        self.reserve.fail(errno);
        self.growing_failed(errno);
    }

    /// Prepares clusters. Returns whether it changed something.
    pub(super) fn advance_reserve(&mut self) -> bool {
        if self.is_closing {
            let runs = self.reserve.close();
            let is_changed = !runs.is_empty();
            runs.into_iter().for_each(|run| self.retired.lower(run));
            if is_changed {
                return true;
            }
        }
        if self.reserve.is_stalled || self.moving.is_some() {
            return false;
        }
        let Some(chunk) = &mut self.reserve.chunk else { return self.begin_chunk() };
        match &mut chunk.stage {
            Stage::Loading => self.raise_chunk(),
            Stage::Raising { unit, number, to_zero, zeroing } => {
                let cluster = self.geometry.cluster();
                for run in to_zero.drain(..) {
                    let kind = TableOpKind::Zero { at: run.start * cluster, len: run.len * cluster };
                    self.ops.queue(Purpose::ChunkZero(run), kind);
                    *zeroing += 1;
                }
                match self.blocks.state(Block::Refcounts(*unit), *number) {
                    Written::Yes if *zeroing == 0 => {
                        chunk.stage = Stage::Syncing { stamp: self.syncs.completed() };
                        true
                    }
                    Written::Failed(errno) => {
                        self.reserve_failed(errno);
                        true
                    }
                    _ => false,
                }
            }
            Stage::Syncing { stamp } => {
                self.syncs.want(*stamp);
                if !self.syncs.is_durable(*stamp) && self.rules.hold(Rule::R1) {
                    return false;
                }
                let (runs, for_l1) = (std::mem::take(&mut chunk.runs), chunk.for_l1);
                self.reserve.chunk = None;
                if for_l1 {
                    self.begin_l1(&runs);
                    return true;
                }
                for free in runs {
                    self.reserve.ready_clusters += free.run.len;
                    self.reserve.ready.push_back(free.run);
                }
                self.reserve.has_waiters = false;
                true
            }
        }
    }

    fn begin_chunk(&mut self) -> bool {
        if self.clusters_for_l1().is_some() && !self.is_closing {
            self.reserve.chunk = Some(Chunk { runs: Vec::new(), for_l1: true, stage: Stage::Loading });
            return true;
        }
        let reserve = &self.reserve;
        let is_wanted = reserve.is_used && reserve.ready_clusters * 2 < reserve.size;
        if !is_wanted || self.is_closing || self.is_bad {
            return false;
        }
        let runs = self.retired.take_free(self.refcounts.per_unit(), self.reserve.size);
        self.reserve.chunk = Some(Chunk { runs, for_l1: false, stage: Stage::Loading });
        true
    }

    /// Raises the counts of the chunk when they are loaded. A chunk without runs takes the end of the file.
    fn raise_chunk(&mut self) -> bool {
        let Some(chunk) = &mut self.reserve.chunk else { return false };
        let first = chunk.runs.first().map_or(self.reserve.end, |free| free.run.start);
        let unit = self.refcounts.unit_of(first);
        match self.refcounts.load(unit, &mut self.ops, &self.blocks) {
            Load::Wait => return false,
            Load::NoBlock => return self.begin_block(first),
            Load::Ready => {}
        }
        if chunk.runs.is_empty() {
            let exactly = if chunk.for_l1 { self.clusters_for_l1() } else { None };
            let Some(run) = self.run_at_end(unit, exactly) else { return true };
            if self.options.device_bytes.is_some_and(|bytes| run.end() * self.geometry.cluster() > bytes) {
                self.reserve_failed(Errno::NOSPC);
                return true;
            }
            self.reserve.end = run.end();
            let Some(chunk) = &mut self.reserve.chunk else { return false };
            chunk.runs.push(Free { run, is_zero: false, is_tried: false });
        }
        let Some(chunk) = &mut self.reserve.chunk else { return false };
        for cluster in chunk.runs.iter().flat_map(|free| free.run.start..free.run.end()) {
            self.refcounts.set(cluster, 1);
        }
        let number = self.blocks.change(Block::Refcounts(unit));
        let to_zero = chunk
            .runs
            .iter()
            .filter(|_| !chunk.for_l1)
            .filter(|free| !free.is_zero)
            .map(|free| free.run)
            .collect();
        chunk.stage = Stage::Raising { unit, number, to_zero, zeroing: 0 };
        true
    }

    /// Returns free clusters at the end of the file, counted in `unit`, or moves the end behind the unit.
    fn run_at_end(&mut self, unit: u64, exactly: Option<u64>) -> Option<Run> {
        let unit_end = (unit + 1) * self.refcounts.per_unit();
        let is_free = |cluster: &u64| self.refcounts.get(*cluster) == Some(0);
        let max = exactly.unwrap_or(self.reserve.size);
        let mut start = self.reserve.end;
        loop {
            let Some(free) = (start..unit_end).find(is_free) else {
                self.reserve.end = unit_end;
                return None;
            };
            let len = (free..unit_end).take(max as usize).take_while(is_free).count() as u64;
            if exactly.is_none_or(|exactly| len == exactly) {
                return Some(Run { start: free, len });
            }
            start = free + len;
        }
    }

    /// Takes the result of zeroing a run of the chunk.
    pub(super) fn chunk_zeroed(&mut self, run: Run, result: Result<(), Errno>) {
        let Some(Chunk { stage: Stage::Raising { to_zero, zeroing, .. }, .. }) = &mut self.reserve.chunk
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
