//! The clusters that lost a mapping, in the order in which they become free (R5).

use super::blocks::{Block, Blocks};
use super::cluster_run::ClusterRun;
use super::plan::Ticket;
use super::rule::{Rule, Rules};
use super::syncs::Syncs;
use crate::pins::{Epoch, Pins};
use crate::runtime::Runtime;
use rustix::io::Errno;
use std::collections::VecDeque;

/// The default of the largest number of extents: beyond it, requests wait that would retire more.
pub(super) const EXTENTS_MAX: usize = 65536;
/// Extents from which on a sync of our own begins.
const SYNC_EXTENTS: usize = 1024;
/// Bytes from which on a sync of our own begins.
const SYNC_BYTES: u64 = 64 << 20;
/// Free runs whose space is not returned yet. With more, no further cluster becomes free.
const PUNCHES_MAX: usize = 64;
/// The operations at a time that return space. They leave room for others.
const PUNCHING_MAX: usize = 4;
/// Extents to move on in one step.
const STEP: usize = 64;

/// A run of clusters whose counts are to be lowered by one.
#[derive(Clone, Copy, Debug)]
pub(super) struct RetiredExtent {
    pub(super) run: ClusterRun,
    /// The changes that removed the mapping.
    pub(super) changes: Ticket,
    pub(super) epoch: Epoch,
    /// A sync for it begins soon.
    pub(super) is_urgent: bool,
}

/// The clusters between their last mapping and their next use.
#[derive(Debug)]
pub(super) struct Retired {
    /// Wait for the writes of their changes.
    writes: VecDeque<RetiredExtent>,
    /// Wait for a sync that begins after the operation with the number.
    syncs: VecDeque<(u64, RetiredExtent)>,
    /// Wait for requests that may still use them.
    pins: VecDeque<RetiredExtent>,
    /// Their counts are to be lowered.
    pub(super) lowering: VecDeque<ClusterRun>,
    /// Free. Their space is to be returned to the host.
    to_punch: VecDeque<ClusterRun>,
    punching: Vec<ClusterRun>,
    /// The bytes of the extents in the first three lists.
    bytes: u64,
    extents_max: usize,
    /// The operations up to this one must become durable soon.
    urgent: u64,
    /// All that is retired is asked for.
    is_hurried: bool,
    /// A sync or a read failed. The next request starts it again.
    pub(super) stalled: Option<Errno>,
}

impl Retired {
    pub(super) fn new(extents_max: usize) -> Self {
        Self {
            writes: VecDeque::new(),
            syncs: VecDeque::new(),
            pins: VecDeque::new(),
            lowering: VecDeque::new(),
            to_punch: VecDeque::new(),
            punching: Vec::new(),
            bytes: 0,
            extents_max,
            urgent: 0,
            is_hurried: false,
            stalled: None,
        }
    }

    /// Retires an extent of this many bytes.
    pub(super) fn retire(&mut self, extent: RetiredExtent, bytes: u64) {
        self.bytes += bytes;
        self.retry();
        match self.writes.back_mut() {
            Some(last)
                if last.run.end() == extent.run.start
                    && last.changes == extent.changes
                    && last.epoch == extent.epoch =>
            {
                last.run.len += extent.run.len;
                last.is_urgent |= extent.is_urgent;
            }
            _ => self.writes.push_back(extent),
        }
    }

    /// Tries again to free clusters. Returns the error if an attempt has failed. Otherwise, waiting makes
    /// sense: something is running, or a request ends and wakes.
    pub(super) fn retry_all(&mut self, blocks: &mut Blocks) -> Option<Errno> {
        let stalled = self.stalled.take();
        let failed = blocks.retry_all();
        self.hurry();
        stalled.or(failed)
    }

    /// Moves extents on whose changes are written, or durable. Returns whether it changed something. While
    /// the image is closed, the hurry stays.
    pub(super) fn advance_changes(
        &mut self,
        blocks: &Blocks,
        syncs: &mut Syncs,
        rules: Rules,
        is_closing: bool,
    ) -> bool {
        let mut is_changed = false;
        for _ in 0..self.writes.len().min(STEP) {
            let Some(extent) = self.writes.pop_front() else { break };
            if is_unmapped(extent.changes, blocks, rules) {
                let stamp = syncs.completed();
                if extent.is_urgent {
                    self.urgent = stamp;
                }
                self.syncs.push_back((stamp, extent));
                is_changed = true;
            } else {
                self.writes.push_back(extent);
            }
        }
        let without_sync = !rules.hold(Rule::R5Sync);
        for _ in 0..STEP {
            let is_over = |(stamp, _): &mut (u64, RetiredExtent)| syncs.is_durable(*stamp) || without_sync;
            let Some((_, extent)) = self.syncs.pop_front_if(is_over) else { break };
            self.pins.push_back(extent);
            is_changed = true;
        }
        if !is_closing {
            self.calm_down();
        }
        if let Some(stamp) = self.wanted_sync() {
            syncs.want(stamp);
        }
        is_changed
    }

    /// Moves clusters on that no request uses any more. If somebody waits for clusters, the last request that
    /// uses them wakes. Returns whether it changed something.
    pub(super) fn advance_pins<R: Runtime>(&mut self, pins: &Pins<R>, rules: Rules, cluster: u64) -> bool {
        if self.pins.is_empty() {
            return false;
        }
        let mut is_changed = false;
        pins.advance();
        pins.advance();
        let without_pins = !rules.hold(Rule::R5Pins);
        for _ in 0..STEP {
            let is_over = |extent: &mut RetiredExtent| pins.is_over(extent.epoch) || without_pins;
            let Some(RetiredExtent { run, .. }) = self.pins.pop_front_if(is_over) else { break };
            self.bytes = self.bytes.saturating_sub(run.len * cluster);
            self.lowering.push_back(run);
            is_changed = true;
        }
        let is_waited_for = self.is_hurried && !self.pins.is_empty();
        is_changed || is_waited_for && pins.await_leaving()
    }

    pub(super) fn extents(&self) -> usize {
        self.writes.len() + self.syncs.len() + self.pins.len() + self.lowering.len()
    }

    pub(super) fn is_full(&self) -> bool {
        self.extents() >= self.extents_max
    }

    /// Returns whether clusters are on their way to being free.
    pub(super) fn is_busy(&self) -> bool {
        self.extents() > 0 || !self.to_punch.is_empty() || !self.punching.is_empty()
    }

    /// Returns the operations that must become durable soon.
    fn wanted_sync(&mut self) -> Option<u64> {
        let extents = self.extents();
        let (last, _) = self.syncs.back()?;
        let is_much = extents >= SYNC_EXTENTS.min(self.extents_max) || self.bytes >= SYNC_BYTES;
        let is_all = is_much || self.is_hurried;
        self.stalled.is_none().then_some(if is_all { *last } else { self.urgent })
    }

    /// Says that all of it is asked for, so the next sync is soon. Returns whether this is new.
    pub(super) fn hurry(&mut self) -> bool {
        self.extents() > 0 && !std::mem::replace(&mut self.is_hurried, true)
    }

    /// Ends the hurry when nothing is left.
    fn calm_down(&mut self) {
        self.is_hurried &= self.extents() > 0;
    }

    /// Permits another attempt after a failure.
    pub(super) fn retry(&mut self) {
        self.stalled = None;
    }

    pub(super) fn stall(&mut self, errno: Errno) {
        self.stalled = Some(errno);
    }

    /// Lowers counts without waiting: no entry on the disk refers to the clusters.
    pub(super) fn lower(&mut self, run: ClusterRun) {
        self.lowering.push_back(run);
    }

    /// Adds a run of free clusters whose space is to be returned. Runs join if `may_join`.
    pub(super) fn punch(&mut self, cluster: u64, may_join: bool) {
        match self.to_punch.back_mut() {
            Some(run) if may_join && run.end() == cluster => run.len += 1,
            _ => self.to_punch.push_back(ClusterRun { start: cluster, len: 1 }),
        }
    }

    /// Returns whether enough runs wait for the return of their space.
    pub(super) fn has_punches(&self) -> bool {
        self.to_punch.len() + self.punching.len() >= PUNCHES_MAX
    }

    /// Returns whether [`next_punch`](Self::next_punch) has something.
    pub(super) fn may_punch(&self) -> bool {
        !self.to_punch.is_empty() && self.punching.len() < PUNCHING_MAX
    }

    /// Takes a run to punch.
    pub(super) fn next_punch(&mut self) -> Option<ClusterRun> {
        let run = self.to_punch.pop_front_if(|_| self.punching.len() < PUNCHING_MAX)?;
        self.punching.push(run);
        Some(run)
    }

    pub(super) fn punched(&mut self, run: ClusterRun) {
        self.punching.retain(|known| *known != run);
    }

    /// Returns the clusters from `first` on, `len` of them, whose space is about to be returned: they must
    /// not be used yet. They are marked in the result.
    pub(super) fn punched_within(&self, first: u64, len: u64) -> Vec<bool> {
        let mut marks = vec![false; len as usize];
        for run in self.to_punch.iter().chain(&self.punching) {
            let (from, to) = (run.start.clamp(first, first + len), run.end().clamp(first, first + len));
            marks[(from - first) as usize..(to - first) as usize].fill(true);
        }
        marks
    }
}

/// Returns whether the removal of a mapping is written, of the L2 entry and of the L1 entry above.
fn is_unmapped(changes: Ticket, blocks: &Blocks, rules: Rules) -> bool {
    let slice = changes.slice.is_none_or(|(slice, number)| {
        blocks.is_written(Block::Slice(slice), number) || !rules.hold(Rule::R5L2)
    });
    let l1 = changes
        .l1
        .is_none_or(|(unit, number)| blocks.is_written(Block::L1(unit), number) || !rules.hold(Rule::R5L1));
    slice && l1
}
