//! The operations in flight, which complete in any order, late, or with errors.

use super::image::{SECTOR, WriteId};
use super::life::Life;
use crate::qcow2::tables::ops::{OpId, TableOpKind};
use fastrand::Rng;
use kickless_io::{AlignedBuf, Errno};
use std::collections::VecDeque;
use std::ops::Range;

/// The owner of an operation.
#[derive(Debug)]
pub(super) enum Target {
    Table(OpId, Option<AlignedBuf>),
    /// A part of a range that is zeroed. The other parts follow.
    Zero(OpId, VecDeque<Range<usize>>),
    Request(usize),
}

#[derive(Debug)]
enum Work {
    Read { at: u64 },
    Write { id: WriteId, durable: bool },
    Sync { mark: u64 },
}

/// An operation in flight.
#[derive(Debug)]
pub(super) struct Op {
    target: Target,
    work: Work,
    /// The step before which it does not complete.
    pub(super) not_before: u64,
}

/// The kinds of operations, by which they fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    Read,
    Write,
    TableWrite,
    Zero,
    Sync,
}

/// Operations that all fail, until the failure ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    All,
    Writes,
    TableWrites,
    Syncs,
    Zeroes,
    Reads,
}

/// The failures of a life.
#[derive(Debug)]
pub(super) struct Failures {
    /// The share of operations that fail.
    share: f64,
    broken: Option<Broken>,
    /// Something breaks now and then, and stays so for a while.
    breaks: bool,
    /// An operation has failed.
    pub(super) has_failed: bool,
}

impl Failures {
    pub(super) fn random(rng: &mut Rng) -> Self {
        let share = rng.choice([0.0, 0.0, 0.02, 0.1]).unwrap();
        Self { share, broken: None, breaks: rng.u8(..3) == 0, has_failed: false }
    }

    /// Breaks or mends something now and then.
    pub(super) fn turn(&mut self, rng: &mut Rng) {
        if !self.breaks || rng.u8(..200) > 0 {
            return;
        }
        self.broken = match self.broken {
            Some(_) if rng.bool() => None,
            _ => rng.choice([
                Broken::All,
                Broken::Writes,
                Broken::TableWrites,
                Broken::Syncs,
                Broken::Zeroes,
                Broken::Reads,
            ]),
        };
    }

    /// Lets nothing be zeroed, as if the file system were full.
    pub(super) fn break_zeroes(&mut self) {
        self.broken = Some(Broken::Zeroes);
    }

    /// Returns whether operations fail in this life.
    pub(super) fn may_fail(&self) -> bool {
        self.share > 0.0 || self.breaks
    }

    /// Mends everything for good.
    pub(super) fn end(&mut self) {
        (self.share, self.broken, self.breaks) = (0.0, None, false);
    }

    /// Returns the result of an operation.
    pub(super) fn result(&mut self, class: Class, rng: &mut Rng) -> Result<(), Errno> {
        let is_broken = match (self.broken, class) {
            (Some(Broken::All), _)
            | (Some(Broken::Writes), Class::Write | Class::TableWrite | Class::Zero)
            | (Some(Broken::TableWrites), Class::TableWrite)
            | (Some(Broken::Zeroes), Class::Zero)
            | (Some(Broken::Syncs), Class::Sync)
            | (Some(Broken::Reads), Class::Read) => true,
            _ => rng.f64() < self.share,
        };
        self.has_failed |= is_broken;
        let errno = if rng.bool() { Errno::NOSPC } else { Errno::IO };
        if is_broken { Err(errno) } else { Ok(()) }
    }
}

impl Life {
    pub(super) fn submit_due(&mut self) {
        let Some(op) = self.tables.next_op() else { return };
        match op.kind {
            TableOpKind::Read { at, buffer } => {
                self.push(Target::Table(op.id, Some(buffer)), Work::Read { at });
            }
            TableOpKind::Write { at, buffer } => {
                let bytes = buffer[buffer.window()].to_vec();
                self.submit_write(Target::Table(op.id, Some(buffer)), at as usize, bytes, false);
            }
            TableOpKind::Sync => {
                let mark = self.image.sync_begins();
                self.submit_sync(Target::Table(op.id, None), mark);
            }
            TableOpKind::Zero { at, len, .. } => {
                let range = at as usize..(at + len) as usize;
                let parts = self.parts_to_zero(range);
                self.zero_next(op.id, parts);
            }
        }
    }

    /// Divides a range into the writes that zero it. Beyond the end of the file, one sector does so.
    fn parts_to_zero(&mut self, range: Range<usize>) -> VecDeque<Range<usize>> {
        let end = self.image.now().len().clamp(range.start, range.end);
        let (mut parts, mut start) = (VecDeque::new(), range.start);
        let most = self.rng.choice([1, 3, 1000]).unwrap() * SECTOR;
        while start < end {
            let len = (end - start).min(most);
            parts.push_back(start..start + len);
            start += len;
        }
        if end < range.end {
            parts.push_back(range.end - SECTOR..range.end);
        }
        parts
    }

    fn zero_next(&mut self, id: OpId, mut parts: VecDeque<Range<usize>>) {
        match parts.pop_front() {
            Some(part) => self.submit_write(Target::Zero(id, parts), part.start, vec![0; part.len()], false),
            None => self.tables.complete(id, None, Ok(0)),
        }
    }

    pub(super) fn submit_write(&mut self, target: Target, at: usize, bytes: Vec<u8>, durable: bool) {
        let id = self.image.submit(at, bytes);
        self.push(target, Work::Write { id, durable });
    }

    pub(super) fn submit_sync(&mut self, target: Target, mark: u64) {
        self.push(target, Work::Sync { mark });
    }

    fn push(&mut self, target: Target, work: Work) {
        let late = match (&target, self.rng.u8(..20)) {
            (_, 0..11) => 0,
            (_, 11..17) => self.rng.u64(..30),
            (Target::Table(..) | Target::Zero(..), _) => self.rng.u64(..150),
            (Target::Request(_), _) => self.rng.u64(..self.late_max),
        };
        self.ops.push(Op { target, work, not_before: self.now + late });
    }

    pub(super) fn complete_one(&mut self) {
        let ripe: Vec<usize> =
            (0..self.ops.len()).filter(|index| self.ops[*index].not_before <= self.now).collect();
        if let Some(index) = self.rng.choice(ripe) {
            let op = self.ops.swap_remove(index);
            self.complete(op);
        }
    }

    pub(super) fn complete(&mut self, op: Op) {
        let class = match (&op.work, &op.target) {
            (Work::Read { .. }, _) => Class::Read,
            (Work::Sync { .. }, _) => Class::Sync,
            (_, Target::Zero(..)) => Class::Zero,
            (_, Target::Table(..)) => Class::TableWrite,
            (_, Target::Request(_)) => Class::Write,
        };
        let result = self.failures.result(class, &mut self.rng);
        let Op { target, work, .. } = op;
        let mut read = None;
        match work {
            Work::Read { at } => read = Some(at),
            Work::Write { id, durable: true } if result.is_ok() => self.image.complete_durable(id),
            Work::Write { id, .. } if result.is_ok() => self.image.complete(id),
            Work::Write { id, .. } => self.image.fail(id, &mut self.rng),
            Work::Sync { mark } if result.is_ok() => self.image.synced(mark),
            Work::Sync { .. } => {}
        }
        match target {
            Target::Table(id, mut buffer) => {
                if let (Some(at), Some(buffer)) = (read, &mut buffer) {
                    self.image.read(at as usize, buffer);
                }
                self.tables.complete(id, buffer, result.map(|()| 0));
            }
            Target::Zero(id, parts) => match result {
                Ok(()) => self.zero_next(id, parts),
                Err(errno) => self.tables.complete(id, None, Err(errno)),
            },
            Target::Request(id) => {
                let mut request = self.requests.remove(&id).unwrap();
                if matches!(work, Work::Sync { .. }) {
                    let (mark, began) = request.synced(result);
                    self.tables.synced(mark, result);
                    if result.is_ok() {
                        self.model.flushed(began);
                    }
                    self.end(&request);
                } else {
                    request.transferred(result);
                    self.requests.insert(id, request);
                }
            }
        }
    }
}
