//! Lowers the counts of clusters that lost a mapping, the last step before they are free (R5).

use super::Tables;
use super::blocks::Block;
use super::cluster_run::ClusterRun;
use super::plan::{Stop, Ticket};
use super::refcounts::UnitState;
use super::retired::RetiredExtent;
use crate::format::entry::{Mapping, counted};
use crate::runtime::Runtime;

/// Counts to lower in one step.
const STEP_COUNTS: u64 = 4096;

impl<R: Runtime> Tables<R> {
    /// Retires clusters that the changes of `changes` have unmapped. If the space is wanted back, the sync
    /// for that is soon.
    pub(super) fn retire(&mut self, run: ClusterRun, changes: Ticket, is_urgent: bool) {
        let extent = RetiredExtent { run, changes, epoch: self.pins.current(), is_urgent };
        self.retired.retire(extent, run.len * self.geometry.cluster());
    }

    /// Retires the clusters of a mapping that is gone.
    pub(super) fn retire_mapping(&mut self, old: Mapping, changes: Ticket, is_urgent: bool) {
        let mut clusters = counted(self.geometry, old).map(|cluster| cluster.0);
        if let Some(start) = clusters.next() {
            let len = 1 + clusters.count() as u64;
            self.retire(ClusterRun { start, len }, changes, is_urgent);
        }
    }

    /// Returns whether more can be retired. All that has failed, and keeps clusters from being free, is tried
    /// again.
    pub(super) fn check_space(&mut self) -> Result<(), Stop> {
        if !self.retired.is_full() {
            return Ok(());
        }
        match self.retired.retry_all(&mut self.blocks) {
            Some(errno) => Err(Stop::Fail(errno)),
            None => Err(Stop::Wait),
        }
    }

    /// Moves retired clusters on. Returns whether it changed something.
    pub(super) fn advance_retired(&mut self) -> bool {
        let (rules, cluster) = (self.rules, self.geometry.cluster());
        let is_changed = self.retired.advance_changes(&self.blocks, &mut self.syncs, rules, self.is_closing);
        self.retired.advance_pins(&self.pins, rules, cluster) | self.lower_counts() | is_changed
    }

    fn lower_counts(&mut self) -> bool {
        let mut left = STEP_COUNTS;
        while left > 0 && self.retired.stalled.is_none() && !self.retired.has_punches() {
            let Some(mut run) = self.retired.lowering.pop_front() else { break };
            let unit = self.refcounts.unit_of(run.start);
            match self.refcounts.load(unit, &mut self.ops, &self.blocks) {
                UnitState::Ready => {}
                UnitState::NoBlock => {
                    left -= 1;
                    self.found_bad();
                    continue;
                }
                UnitState::Wait => {
                    self.retired.lowering.push_front(run);
                    break;
                }
                UnitState::Failed(errno) => {
                    self.retired.lowering.push_front(run);
                    self.retired.stall(errno);
                    break;
                }
            }
            let part = run.split(left.min((unit + 1) * self.refcounts.per_unit() - run.start));
            if run.len > 0 {
                self.retired.lowering.push_front(run);
            }
            left -= part.len;
            self.lower_run(part, unit);
        }
        left < STEP_COUNTS
    }

    /// Lowers the counts of a run in one loaded unit.
    fn lower_run(&mut self, run: ClusterRun, unit: u64) {
        let cluster_bytes = self.geometry.cluster();
        let mut last = None;
        for cluster in run.start..run.end() {
            let bytes = cluster * cluster_bytes..(cluster + 1) * cluster_bytes;
            match self.refcounts.get(cluster) {
                _ if self.pins.is_lost(&bytes) => {}
                // Only an entry that cannot be true refers to a table as well.
                Some(1) if self.known.contains(cluster) => self.found_bad(),
                Some(count @ 1..) => {
                    self.refcounts.set(cluster, count - 1);
                    if count > 1 {
                        continue;
                    }
                    if self.options.discard && !self.keeps_space {
                        let may_join = last.replace(cluster).is_some_and(|last| last + 1 == cluster);
                        self.retired.punch(cluster, may_join);
                    } else {
                        self.free_space.freed(unit);
                    }
                }
                _ => self.found_bad(),
            }
        }
        self.blocks.change(Block::Refcounts(unit));
    }

    /// Takes the end of returning the space of a run. Where it failed, the space stays taken.
    pub(super) fn punched(&mut self, run: ClusterRun) {
        self.retired.punched(run);
        self.free_space.freed(self.refcounts.unit_of(run.start));
    }
}
