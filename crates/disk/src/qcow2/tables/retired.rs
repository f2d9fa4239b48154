//! The clusters that lost a mapping, in the order of their way to being free (R5).

use super::ops::Run;
use super::plan::Ticket;
use crate::qcow2::pins::Epoch;
use kickless_io::Errno;
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

/// A run of clusters whose counts are to be lowered by one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    pub(super) run: Run,
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
    pub(super) writes: VecDeque<Extent>,
    /// Wait for a sync that begins after the operation with the number.
    pub(super) syncs: VecDeque<(u64, Extent)>,
    /// Wait for requests that may still use them.
    pub(super) pins: VecDeque<Extent>,
    /// Their counts are to be lowered.
    pub(super) lowering: VecDeque<Run>,
    /// Free. Their space is to be returned to the host.
    to_punch: VecDeque<Run>,
    punching: Vec<Run>,
    /// The bytes of the extents in the first three lists.
    pub(super) bytes: u64,
    extents_max: usize,
    /// The operations up to this one must become durable soon.
    pub(super) urgent: u64,
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
    pub(super) fn wanted_sync(&mut self) -> Option<u64> {
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

    pub(super) fn is_hurried(&self) -> bool {
        self.is_hurried
    }

    /// Ends the hurry when nothing is left.
    pub(super) fn calm_down(&mut self) {
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
    pub(super) fn lower(&mut self, run: Run) {
        self.lowering.push_back(run);
    }

    /// Adds a run of free clusters whose space is to be returned. Runs join if `may_join`.
    pub(super) fn punch(&mut self, cluster: u64, may_join: bool) {
        match self.to_punch.back_mut() {
            Some(run) if may_join && run.end() == cluster => run.len += 1,
            _ => self.to_punch.push_back(Run { start: cluster, len: 1 }),
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
    pub(super) fn next_punch(&mut self) -> Option<Run> {
        let run = self.to_punch.pop_front_if(|_| self.punching.len() < PUNCHING_MAX)?;
        self.punching.push(run);
        Some(run)
    }

    pub(super) fn punched(&mut self, run: Run) {
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
