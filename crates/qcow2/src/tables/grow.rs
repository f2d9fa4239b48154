//! Growing the virtual disk: by the header alone, or with an L1 table that moves (R7).

use super::Tables;
use super::blocks::Block;
use super::cluster_run::ClusterRun;
use super::plan::Written;
use super::state::{Growth, GrowthStage};
use crate::format::geometry::Version;
use crate::format::header::{HeaderChange, L1_MAX};
use crate::runtime::Runtime;
use rustix::io::Errno;

/// The reason why a disk cannot grow. Each is the end of "{disk} cannot grow: ...".
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrowError {
    /// Version 2 has no place for the sizes of snapshots.
    #[error("it has snapshots, and version 2 of the format cannot record their sizes")]
    Snapshots,
    /// The L1 table would be too large, or would not fit into the counts of one unit.
    #[error("its clusters are too small for {0} bytes")]
    TooLarge(u64),
}

impl<R: Runtime> Tables<R> {
    /// Begins to grow the virtual disk to `size` bytes. It is done when [`grown`](Self::grown) says so. One
    /// that has failed before goes on first.
    ///
    /// # Errors
    /// The reason why the disk cannot have this size. Nothing has changed.
    pub fn grow(&mut self, size: u64) -> Result<(), GrowError> {
        self.grown = None;
        if self.is_bad {
            self.grown = Some(Err(Errno::IO));
            return Ok(());
        }
        if self.growing.is_none() {
            if size <= self.size {
                self.grown = Some(Ok(self.size));
                return Ok(());
            }
            self.growing = Some(self.begin_growing(size)?);
        }
        if let Some(Growth { stage: GrowthStage::Header { number }, .. }) = &mut self.growing
            && let Some(needed) = self.blocks.need(Block::Header)
        {
            *number = needed;
        }
        // The error of an earlier attempt is not this one's.
        self.reserve.retry();
        self.retry_chunk();
        self.progress();
        Ok(())
    }

    fn begin_growing(&mut self, size: u64) -> Result<Growth, GrowError> {
        if self.geometry.version == Version::V2 && self.has_snapshots {
            return Err(GrowError::Snapshots);
        }
        let entries = self.geometry.l1_entries_for(size);
        if entries <= self.l1.words.len() as u64 {
            let entries = self.l1.words.len() as u32;
            HeaderChange::L1AndSize { l1: self.l1.at, entries, size }.apply(&mut self.first);
            let number = self.blocks.change(Block::Header);
            return Ok(Growth { size, entries: 0, stage: GrowthStage::Header { number } });
        }
        // A new block may be in the same unit.
        let is_too_large = self.l1_clusters(entries) >= self.refcounts.per_unit();
        if is_too_large || entries * 8 > L1_MAX {
            return Err(GrowError::TooLarge(size));
        }
        Ok(Growth { size, entries, stage: GrowthStage::Moving })
    }

    /// Notes that the block device under the image has so many bytes. Requests that found no room try again.
    pub fn device_has(&mut self, bytes: u64) {
        if self.options.device_bytes.is_none_or(|before| before >= bytes) {
            return;
        }
        self.options.device_bytes = Some(bytes);
        self.bound = self.bound.max(bytes.div_ceil(self.geometry.cluster()));
        self.free_space.loosen();
        self.reserve.retry();
        self.retry_chunk();
        self.progress();
    }

    /// Returns the result of growing, after [`grow`](Self::grow).
    pub fn grown(&self) -> Option<Result<u64, Errno>> {
        self.grown
    }

    /// Returns the clusters of an L1 table.
    pub(super) fn l1_clusters(&self, entries: u64) -> u64 {
        (entries * 8).div_ceil(self.geometry.cluster())
    }

    /// Returns the clusters that the larger L1 table needs, until it moves.
    pub(super) fn clusters_for_l1(&self) -> Option<u64> {
        let growing = self.growing.filter(|growing| growing.entries > 0)?;
        Some(self.l1_clusters(growing.entries))
    }

    /// Fails the growth. It goes on with the next attempt.
    pub(super) fn growing_failed(&mut self, errno: Errno) {
        if self.growing.is_some() {
            self.grown = Some(Err(errno));
        }
    }

    /// Ends growing when the header is durable. Returns whether it changed something.
    pub(super) fn advance_growing(&mut self) -> bool {
        let Some(growing) = &mut self.growing else { return false };
        match growing.stage {
            GrowthStage::Moving => false,
            GrowthStage::Header { number } => match self.blocks.state(Block::Header, number) {
                Written::Yes => {
                    growing.stage = GrowthStage::Syncing { stamp: self.syncs.completed() };
                    true
                }
                Written::NotYet => false,
                Written::Failed(errno) => {
                    let is_new = self.grown.is_none();
                    self.grown = Some(Err(errno));
                    is_new
                }
            },
            GrowthStage::Syncing { stamp } => {
                if self.grown.is_none() {
                    self.syncs.want(stamp);
                }
                let is_durable = self.syncs.is_durable(stamp);
                if is_durable {
                    self.growth_ends();
                }
                is_durable
            }
        }
    }

    pub(super) fn growth_ends(&mut self) {
        if let Some(Growth { size, .. }) = self.growing.take() {
            self.size = size;
            self.grown = Some(Ok(size));
        }
    }

    /// Returns the run of the old L1 table.
    pub(super) fn l1_run(&self) -> ClusterRun {
        let len = self.l1_clusters(self.l1.words.len() as u64);
        ClusterRun { start: self.geometry.host_cluster(self.l1.at).0, len }
    }
}
