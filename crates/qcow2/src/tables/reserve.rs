//! The reserve of new clusters (R1). Each has a refcount of 1, is within the file, and is zero, all durably.

use super::cluster_run::ClusterRun;
use super::kept_errors::KeptErrors;
use rustix::io::Errno;
use std::collections::VecDeque;

/// The clusters of the first chunk.
const CHUNK_MIN: u64 = 16;
/// The largest number of clusters of a chunk.
pub(super) const CHUNK_MAX: u64 = 1024;

/// The clusters that are ready, and the chunk that is prepared.
#[derive(Debug)]
pub(super) struct Reserve {
    pub(super) ready: VecDeque<ClusterRun>,
    pub(super) ready_clusters: u64,
    pub(super) chunk: Option<Chunk>,
    /// The number of clusters of the next chunk.
    pub(super) size: u64,
    size_max: u64,
    /// The first cluster that was never used, at the end of the file.
    pub(super) end: u64,
    /// The units at the end that had no free cluster, one after the other.
    pub(super) full_units: u32,
    /// Requests need clusters.
    pub(super) is_used: bool,
    /// A request waits for the chunk.
    pub(super) has_waiters: bool,
    /// The chunk, or the table that moves for it, failed. The next request starts it again.
    pub(super) is_stalled: bool,
    /// The error for a waiting request.
    pub(super) failed: KeptErrors<()>,
}

/// Clusters that are prepared, all counted in one unit.
#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) runs: Vec<ClusterRun>,
    /// It is for an L1 table that grows, and becomes its place.
    pub(super) for_l1: bool,
    /// The next unit to search for an L1 table.
    pub(super) next: u64,
    pub(super) stage: ChunkStage,
}

/// The stages of a chunk.
#[derive(Debug)]
pub(super) enum ChunkStage {
    /// The runs are not known: counts are loaded, or a block for them is made.
    Choosing,
    /// The counts are written, and the clusters zeroed.
    Raising { unit: u64, number: u64, to_zero: Vec<ClusterRun>, zeroing: usize },
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
            full_units: 0,
            is_used: false,
            has_waiters: false,
            is_stalled: false,
            failed: KeptErrors::default(),
        }
    }

    /// Takes at most `len` contiguous clusters.
    pub(super) fn take(&mut self, len: u64) -> Option<ClusterRun> {
        self.is_used = true;
        let front = self.ready.front_mut()?;
        let run = front.split(len);
        if front.len == 0 {
            self.ready.pop_front();
        }
        self.ready_clusters -= run.len;
        Some(run)
    }

    /// Puts the clusters of a chunk into the reserve.
    pub(super) fn add(&mut self, runs: Vec<ClusterRun>) {
        self.ready_clusters += runs.iter().map(|run| run.len).sum::<u64>();
        self.ready.extend(runs);
        self.has_waiters = false;
    }

    /// Notes that a request waits. The next chunk is larger.
    pub(super) fn demand(&mut self) {
        if !std::mem::replace(&mut self.has_waiters, true) && self.is_used {
            self.size = (self.size * 2).min(self.size_max);
        }
        self.is_used = true;
    }

    /// Fails the waiting requests. The stage is kept.
    pub(super) fn fail(&mut self, errno: Errno) {
        self.is_stalled = true;
        if std::mem::take(&mut self.has_waiters) {
            self.failed.put((), errno);
        }
    }

    /// Forgets the error of an earlier attempt.
    pub(super) fn retry(&mut self) {
        self.failed = KeptErrors::default();
    }

    /// Takes all clusters whose counts are raised, those of the chunk too unless they are being zeroed. A
    /// chunk for an L1 table stays, because growing goes on.
    pub(super) fn close(&mut self) -> Vec<ClusterRun> {
        self.ready_clusters = 0;
        let mut runs: Vec<ClusterRun> = self.ready.drain(..).collect();
        let is_over = |chunk: &mut Chunk| match chunk.stage {
            ChunkStage::Choosing => true,
            ChunkStage::Raising { zeroing, .. } => zeroing == 0 && !chunk.for_l1,
            ChunkStage::Syncing { .. } => !chunk.for_l1,
        };
        if let Some(mut chunk) = self.chunk.take_if(is_over) {
            runs.append(&mut chunk.runs);
        }
        runs
    }
}
