//! Clusters that lost a mapping (R5), and their way to a count of 0.

use super::Tables;
use super::blocks::{Block, Blocks};
use super::ops::Run;
use super::plan::{Stop, Ticket};
use super::refcounts::Load;
use super::retired::Extent;
use super::rule::Rule;
use kickless_io::Errno;

/// Extents to move on in one step.
const STEP: usize = 64;
/// Counts to lower in one step.
const STEP_COUNTS: u64 = 4096;

impl Tables {
    /// Retires clusters that the changes of `changes` have unmapped. If the space is wanted back, the sync
    /// for that is soon.
    pub(super) fn retire(&mut self, run: Run, changes: Ticket, is_urgent: bool) {
        let extent = Extent { run, changes, epoch: self.pins.current(), is_urgent };
        self.retired.bytes += run.len * self.geometry.cluster();
        self.retired.retry();
        match self.retired.writes.back_mut() {
            Some(last)
                if last.run.end() == run.start && last.changes == changes && last.epoch == extent.epoch =>
            {
                last.run.len += run.len;
                last.is_urgent |= is_urgent;
            }
            _ => self.retired.writes.push_back(extent),
        }
    }

    /// Returns whether more can be retired. All that has failed, and keeps clusters from being free, is tried
    /// again.
    pub(super) fn check_space(&mut self) -> Result<(), Stop> {
        if !self.retired.is_full() {
            return Ok(());
        }
        match self.retry_retired() {
            Some(errno) => Err(Stop::Fail(errno)),
            None => Err(Stop::Wait),
        }
    }

    /// Tries again to free clusters. Returns the error if an attempt has failed. Otherwise, waiting makes
    /// sense: something is running, or a request ends and wakes.
    pub(super) fn retry_retired(&mut self) -> Option<Errno> {
        let stalled = self.retired.stalled.take();
        let failed = self.blocks.retry_all();
        self.retired.hurry();
        stalled.or(failed)
    }

    /// Moves retired clusters on. Returns whether it changed something.
    pub(super) fn advance_retired(&mut self) -> bool {
        let mut is_changed = false;
        for _ in 0..self.retired.writes.len().min(STEP) {
            let Some(extent) = self.retired.writes.pop_front() else { break };
            if self.is_unmapped(extent.changes) {
                let stamp = self.syncs.completed();
                if extent.is_urgent {
                    self.retired.urgent = stamp;
                }
                self.retired.syncs.push_back((stamp, extent));
                is_changed = true;
            } else {
                self.retired.writes.push_back(extent);
            }
        }
        let without_sync = !self.rules.hold(Rule::R5Sync);
        for _ in 0..STEP {
            let is_over = |(stamp, _): &mut (u64, Extent)| self.syncs.is_durable(*stamp) || without_sync;
            let Some((_, extent)) = self.retired.syncs.pop_front_if(is_over) else { break };
            self.retired.pins.push_back(extent);
            is_changed = true;
        }
        if !self.is_closing {
            self.retired.calm_down();
        }
        if let Some(stamp) = self.retired.wanted_sync() {
            self.syncs.want(stamp);
        }
        self.advance_pins() | self.lower_counts() | is_changed
    }

    /// Moves clusters on that no request uses any more. If somebody waits for clusters, the last request that
    /// uses them wakes.
    fn advance_pins(&mut self) -> bool {
        if self.retired.pins.is_empty() {
            return false;
        }
        let mut is_changed = false;
        self.pins.advance();
        self.pins.advance();
        let without_pins = !self.rules.hold(Rule::R5Pins);
        let pins = &self.pins;
        for _ in 0..STEP {
            let is_over = |extent: &mut Extent| pins.is_over(extent.epoch) || without_pins;
            let Some(Extent { run, .. }) = self.retired.pins.pop_front_if(is_over) else { break };
            self.retired.bytes = self.retired.bytes.saturating_sub(run.len * self.geometry.cluster());
            self.retired.lowering.push_back(run);
            is_changed = true;
        }
        let is_waited_for = self.retired.is_hurried() && !self.retired.pins.is_empty();
        is_changed || is_waited_for && self.pins.await_leaving()
    }

    /// Returns whether the removal of a mapping is written, of the L2 entry and of the L1 entry above.
    fn is_unmapped(&self, changes: Ticket) -> bool {
        let is_written = |blocks: &Blocks, block, number| blocks.is_written(block, number);
        let slice = changes.slice.is_none_or(|(slice, number)| {
            is_written(&self.blocks, Block::Slice(slice), number) || !self.rules.hold(Rule::R5L2)
        });
        let l1 = changes.l1.is_none_or(|(unit, number)| {
            is_written(&self.blocks, Block::L1(unit), number) || !self.rules.hold(Rule::R5L1)
        });
        slice && l1
    }

    fn lower_counts(&mut self) -> bool {
        let mut left = STEP_COUNTS;
        while left > 0 && self.retired.stalled.is_none() && !self.retired.has_punches() {
            let Some(mut run) = self.retired.lowering.pop_front() else { break };
            let unit = self.refcounts.unit_of(run.start);
            match self.refcounts.load(unit, &mut self.ops, &self.blocks) {
                Load::Ready => {}
                Load::NoBlock => {
                    left -= 1;
                    self.found_bad();
                    continue;
                }
                Load::Wait => {
                    self.retired.lowering.push_front(run);
                    break;
                }
                Load::Failed(errno) => {
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
    fn lower_run(&mut self, run: Run, unit: u64) {
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
    pub(super) fn punched(&mut self, run: Run) {
        self.retired.punched(run);
        self.free_space.freed(self.refcounts.unit_of(run.start));
    }
}
