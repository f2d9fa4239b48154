//! Completes operations in any order, late, or with errors.

use super::life::Life;
use super::ops::{OpTarget, OpWork, SimOp};
use crate::images::cut_file::SECTOR;
use crate::images::failures::OpClass;
use crate::tables::ops::{OpId, TableOpKind};
use std::collections::VecDeque;
use std::ops::Range;

impl Life {
    pub(super) fn submit_due(&mut self) {
        let Some(op) = self.tables.next_op() else { return };
        match op.kind {
            TableOpKind::Read { at, buffer } => {
                self.push(OpTarget::Table(op.id, Some(buffer)), OpWork::Read { at });
            }
            TableOpKind::Write { at, buffer } => {
                let bytes = buffer.clone();
                self.submit_write(OpTarget::Table(op.id, Some(buffer)), at as usize, bytes, false);
            }
            TableOpKind::Sync => {
                let mark = self.image.sync_begins();
                self.submit_sync(OpTarget::Table(op.id, None), mark);
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
            Some(part) => {
                self.submit_write(OpTarget::Zero(id, parts), part.start, vec![0; part.len()], false)
            }
            None => self.tables.complete(id, None, Ok(0)),
        }
    }

    pub(super) fn submit_write(&mut self, target: OpTarget, at: usize, bytes: Vec<u8>, durable: bool) {
        let id = self.image.submit(at, bytes);
        self.push(target, OpWork::Write { id, durable });
    }

    pub(super) fn submit_sync(&mut self, target: OpTarget, mark: u64) {
        self.push(target, OpWork::Sync { mark });
    }

    fn push(&mut self, target: OpTarget, work: OpWork) {
        let late = match (&target, self.rng.u8(..20)) {
            (_, 0..11) => 0,
            (_, 11..17) => self.rng.u64(..30),
            (OpTarget::Table(..) | OpTarget::Zero(..), _) => self.rng.u64(..150),
            (OpTarget::Request(_), _) => self.rng.u64(..self.late_max),
        };
        self.ops.push(SimOp { target, work, not_before: self.now + late });
    }

    pub(super) fn complete_one(&mut self) {
        let ripe: Vec<usize> =
            (0..self.ops.len()).filter(|index| self.ops[*index].not_before <= self.now).collect();
        if let Some(index) = self.rng.choice(ripe) {
            let op = self.ops.swap_remove(index);
            self.complete(op);
        }
    }

    pub(super) fn complete(&mut self, op: SimOp) {
        let class = match (&op.work, &op.target) {
            (OpWork::Read { .. }, _) => OpClass::Read,
            (OpWork::Sync { .. }, _) => OpClass::Sync,
            (_, OpTarget::Zero(..)) => OpClass::Zero,
            (_, OpTarget::Table(..)) => OpClass::TableWrite,
            (_, OpTarget::Request(_)) => OpClass::Write,
        };
        let result = self.failures.result(class, &mut self.rng);
        let SimOp { target, work, .. } = op;
        let mut read = None;
        match work {
            OpWork::Read { at } => read = Some(at),
            OpWork::Write { id, durable: true } if result.is_ok() => self.image.complete_durable(id),
            OpWork::Write { id, .. } if result.is_ok() => self.image.complete(id),
            OpWork::Write { id, .. } => self.image.fail(id, &mut self.rng),
            OpWork::Sync { mark } if result.is_ok() => self.image.synced(mark),
            OpWork::Sync { .. } => {}
        }
        match target {
            OpTarget::Table(id, mut buffer) => {
                if let (Some(at), Some(buffer)) = (read, &mut buffer) {
                    self.image.read(at as usize, buffer);
                }
                self.tables.complete(id, buffer, result.map(|()| 0));
            }
            OpTarget::Zero(id, parts) => match result {
                Ok(()) => self.zero_next(id, parts),
                Err(errno) => self.tables.complete(id, None, Err(errno)),
            },
            OpTarget::Request(id) => {
                let mut request = self.requests.remove(&id).unwrap();
                if matches!(work, OpWork::Sync { .. }) {
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
