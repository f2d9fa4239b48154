//! Clusters that lost a mapping (R5), and free ones (R6).

use super::Tables;
use super::blocks::{Block, Blocks};
use super::l2::Stop;
use super::op::TableOpKind;
use super::ops::{Purpose, Run};
use super::plan::Ticket;
use super::refcounts::Load;
use super::rule::Rule;
use crate::qcow2::pins::Epoch;
use kickless_io::Errno;
use std::collections::VecDeque;

/// Retired extents from which on a sync of our own begins.
const SYNC_EXTENTS: usize = 1024;
/// Retired bytes from which on a sync of our own begins.
const SYNC_BYTES: u64 = 64 << 20;
/// Retired extents from which on requests wait that would retire more.
const EXTENTS_MAX: usize = 65536;
/// Extents to look at in one step.
const STEP: usize = 64;

/// A run of clusters whose counts are to be lowered by one.
#[derive(Clone, Copy, Debug)]
struct Extent {
    run: Run,
    /// The changes that removed the mapping.
    changes: Ticket,
    epoch: Epoch,
}

/// A run of clusters with refcount 0 that the reserve may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Free {
    pub(super) run: Run,
    pub(super) is_zero: bool,
    /// Punching it failed.
    pub(super) is_tried: bool,
}

/// The clusters between their last mapping and the reserve, in the order of their way.
#[derive(Debug, Default)]
pub(super) struct Retired {
    /// Wait for the writes of their changes.
    writes: VecDeque<Extent>,
    /// Wait for a sync that begins after the operation with the number.
    syncs: VecDeque<(u64, Extent)>,
    /// Wait for requests that may still use them.
    pins: VecDeque<Extent>,
    /// Their counts are to be lowered.
    lowering: VecDeque<Run>,
    /// Free, but their bytes are old.
    punching: usize,
    free: Vec<Free>,
    bytes: u64,
    wants_sync: bool,
    /// A sync or a read failed. The next request starts it again.
    stalled: Option<Errno>,
}

impl Retired {
    pub(super) fn extents(&self) -> usize {
        self.writes.len() + self.syncs.len() + self.pins.len() + self.lowering.len()
    }

    /// Returns whether more can be retired. If the sync for that failed, it is tried again.
    pub(super) fn check_space(&mut self) -> Result<(), Stop> {
        match self.stalled {
            _ if self.extents() < EXTENTS_MAX => Ok(()),
            Some(errno) => {
                self.retry();
                Err(Stop::Fail(errno))
            }
            None => Err(Stop::Wait),
        }
    }

    /// Says that space is asked for, so the next sync is soon.
    pub(super) fn want_sync(&mut self) {
        self.wants_sync = true;
    }

    /// Permits another attempt after a failure.
    pub(super) fn retry(&mut self) {
        self.stalled = None;
    }

    pub(super) fn stall(&mut self, errno: Errno) {
        self.stalled = Some(errno);
    }

    /// Lowers counts without waiting: no entry on the disk refers to the clusters.
    pub(super) fn lower(&mut self, run: Run) {
        self.lowering.push_back(run);
    }

    /// Takes free runs within one refcount unit of `per_unit` counts, at most `max` clusters.
    pub(super) fn take_free(&mut self, per_unit: u64, max: u64) -> Vec<Free> {
        let Some(unit) = self.free.last().map(|free| free.run.start / per_unit) else { return Vec::new() };
        let (mut taken, mut count) = (Vec::new(), 0);
        self.free.retain_mut(|free| {
            if free.run.start / per_unit != unit || count == max {
                return true;
            }
            let within = (unit + 1) * per_unit - free.run.start;
            let run = free.run.split(within.min(max - count));
            count += run.len;
            taken.push(Free { run, ..*free });
            free.run.len > 0
        });
        taken
    }

    pub(super) fn put_free(&mut self, free: Free) {
        self.free.push(free);
    }

    pub(super) fn punched(&mut self, run: Run, is_ok: bool) {
        self.punching -= 1;
        self.free.push(Free { run, is_zero: is_ok, is_tried: true });
    }
}

impl Tables {
    /// Retires clusters that the changes of `changes` have unmapped.
    pub(super) fn retire(&mut self, run: Run, changes: Ticket) {
        let extent = Extent { run, changes, epoch: self.pins.current() };
        self.retired.bytes += run.len * self.geometry.cluster();
        self.retired.retry();
        match self.retired.writes.back_mut() {
            Some(last)
                if last.run.end() == run.start && last.changes == changes && last.epoch == extent.epoch =>
            {
                last.run.len += run.len;
            }
            _ => self.retired.writes.push_back(extent),
        }
    }

    /// Moves retired clusters on. Returns whether it changed something.
    pub(super) fn advance_retired(&mut self) -> bool {
        let mut is_changed = false;
        for _ in 0..self.retired.writes.len().min(STEP) {
            let Some(extent) = self.retired.writes.pop_front() else { break };
            if self.is_unmapped(extent.changes) {
                self.retired.syncs.push_back((self.syncs.completed(), extent));
                is_changed = true;
            } else {
                self.retired.writes.push_back(extent);
            }
        }
        let without_sync = !self.rules.hold(Rule::R5Sync);
        while let Some((_, extent)) =
            self.retired.syncs.pop_front_if(|(stamp, _)| self.syncs.is_durable(*stamp) || without_sync)
        {
            self.retired.pins.push_back(extent);
            is_changed = true;
        }
        let extents = self.retired.extents();
        match self.retired.syncs.back() {
            Some((stamp, _))
                if self.retired.stalled.is_none()
                    && (self.retired.wants_sync
                        || extents >= SYNC_EXTENTS
                        || self.retired.bytes >= SYNC_BYTES) =>
            {
                self.syncs.want(*stamp);
            }
            _ => {}
        }
        if extents == 0 {
            self.retired.wants_sync = false;
        }
        if !self.retired.pins.is_empty() {
            self.pins.advance();
            self.pins.advance();
        }
        let without_pins = !self.rules.hold(Rule::R5Pins);
        let pins = &self.pins;
        while let Some(extent) =
            self.retired.pins.pop_front_if(|extent| pins.is_over(extent.epoch) || without_pins)
        {
            self.retired.bytes = self.retired.bytes.saturating_sub(extent.run.len * self.geometry.cluster());
            self.retired.lowering.push_back(extent.run);
            is_changed = true;
        }
        self.lower_counts() | self.punch() | is_changed
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
        let mut is_changed = false;
        while let Some(run) = self.retired.lowering.front().copied() {
            let unit = self.refcounts.unit_of(run.start);
            if self.retired.stalled.is_some() {
                break;
            }
            match self.refcounts.load(unit, &mut self.ops, &self.blocks) {
                Load::Wait => break,
                Load::Ready => {}
                Load::NoBlock => {
                    self.retired.lowering.pop_front();
                    self.found_bad();
                    continue;
                }
            }
            is_changed = true;
            self.retired.lowering.pop_front();
            let mut rest = run;
            let part = rest.split((unit + 1) * self.refcounts.per_unit() - run.start);
            if rest.len > 0 {
                self.retired.lowering.push_front(rest);
            }
            self.lower_run(part, unit);
        }
        is_changed
    }

    /// Lowers the counts of a run in one loaded unit.
    fn lower_run(&mut self, run: Run, unit: u64) {
        for cluster in run.start..run.end() {
            match self.refcounts.get(cluster) {
                Some(count @ 1..) => {
                    self.refcounts.set(cluster, count - 1);
                    if count == 1 {
                        self.free(cluster);
                    }
                }
                _ => self.found_bad(),
            }
        }
        self.blocks.change(Block::Refcounts(unit));
    }

    fn free(&mut self, cluster: u64) {
        let is_zero = !self.rules.hold(Rule::R6);
        match self.retired.free.last_mut() {
            Some(Free { run, is_zero: same, is_tried: false })
                if run.end() == cluster && *same == is_zero =>
            {
                run.len += 1;
            }
            _ => {
                self.retired.free.push(Free { run: Run { start: cluster, len: 1 }, is_zero, is_tried: false })
            }
        }
    }

    /// Returns the space of free clusters to the host.
    fn punch(&mut self) -> bool {
        if !self.options.discard {
            return false;
        }
        let mut is_changed = false;
        let cluster = self.geometry.cluster();
        for Free { run, .. } in self.retired.free.extract_if(.., |free| !free.is_zero && !free.is_tried) {
            let kind = TableOpKind::Zero { at: run.start * cluster, len: run.len * cluster };
            self.ops.queue(Purpose::Punch(run), kind);
            self.retired.punching += 1;
            is_changed = true;
        }
        is_changed
    }
}
