//! An engine for the whole disk. It records each write to the image, and completes operations in any order.

use super::held::{HeldOp, HoldOps};
use super::images::cut_file::{CutFile, SECTOR, WriteId};
use super::images::failures::{Failures, OpClass};
use fastrand::Rng;
use kickless_io::{Completion, Errno, OpKind};
use std::fs::File;
use std::os::unix::fs::FileExt;

/// An operation in flight.
#[derive(Debug)]
struct RecordedOp {
    held: HeldOp,
    /// The write that the image has.
    write: Option<(WriteId, usize)>,
    /// The completed writes when a sync began.
    mark: u64,
    /// The queue was cancelled.
    is_cancelled: bool,
    not_before: u64,
}

/// The files of a disk, and the operations in flight.
pub(super) struct Recorder {
    pub(super) image: CutFile,
    /// The image's file, which has the same length, and other contents.
    pub(super) file: File,
    pub(super) below: Option<File>,
    pub(super) failures: Failures,
    pub(super) now: u64,
    ops: Vec<RecordedOp>,
    late_max: u64,
    rng: Rng,
}

impl HoldOps for Recorder {
    fn has_room(&mut self, queue: usize) -> bool {
        self.in_flight(queue) == 0 || self.rng.u8(..20) > 0
    }

    fn hold(&mut self, held: HeldOp) {
        let write = match held.kind {
            OpKind::Write { .. } => Some(held.contents()),
            OpKind::Range { len, .. } => Some(vec![0; len as usize]),
            OpKind::Read | OpKind::Flush => None,
        };
        let write = write.map(|bytes| {
            let len = bytes.len();
            (self.image.submit(held.offset as usize, bytes), len)
        });
        let late = match self.rng.u8(..20) {
            0..11 => 0,
            11..17 => self.rng.u64(..30),
            _ => self.rng.u64(..self.late_max),
        };
        let (mark, not_before) = (self.image.sync_begins(), self.now + late);
        self.ops.push(RecordedOp { held, write, mark, is_cancelled: false, not_before });
    }
}

impl Recorder {
    pub(super) fn new(image: CutFile, file: File, below: Option<File>, mut rng: Rng) -> Self {
        let late_max = rng.choice([30, 150, 600]).unwrap();
        let failures = Failures::random(&mut rng);
        Self { image, file, below, failures, now: 1, ops: Vec::new(), late_max, rng }
    }

    pub(super) fn in_flight(&self, queue: usize) -> usize {
        self.ops.iter().filter(|op| op.held.queue == queue).count()
    }

    pub(super) fn is_idle(&self) -> bool {
        self.ops.is_empty()
    }

    /// Cancels the operations of a queue. Some go on.
    pub(super) fn cancel(&mut self, queue: usize) {
        for op in self.ops.iter_mut().filter(|op| op.held.queue == queue) {
            op.is_cancelled = self.rng.bool();
            op.not_before = self.now;
        }
    }

    /// Completes an operation, of any queue, and returns its queue. `any`: also a late one.
    pub(super) fn complete_one(&mut self, any: bool) -> Option<(usize, Completion)> {
        let is_ripe = |index: &usize| any || self.ops[*index].not_before <= self.now;
        let ripe: Vec<usize> = (0..self.ops.len()).filter(is_ripe).collect();
        let op = self.ops.swap_remove(self.rng.choice(ripe)?);
        Some(self.complete(op))
    }

    fn complete(&mut self, op: RecordedOp) -> (usize, Completion) {
        let rng = &mut self.rng;
        let mut held = op.held;
        let class = match held.kind {
            OpKind::Read => OpClass::Read,
            OpKind::Write { .. } if held.slot >= crate::TABLE_OP_SLOTS => OpClass::TableWrite,
            OpKind::Write { .. } => OpClass::Write,
            OpKind::Range { .. } => OpClass::Zero,
            OpKind::Flush => OpClass::Sync,
        };
        let mut result = self.failures.result(class, rng);
        if op.is_cancelled {
            result = Err(Errno::CANCELED);
        } else if class == OpClass::Zero && result.is_err() && rng.u8(..4) == 0 {
            result = Err(Errno::OPNOTSUPP);
        }
        let bytes = match (held.kind, op.write) {
            (OpKind::Read, _) if result.is_ok() => self.read(&mut held),
            (_, Some((id, _))) if result.is_err() => {
                self.image.fail(id, rng);
                0
            }
            (OpKind::Write { durable }, Some((id, len))) => {
                let sectors = len / SECTOR;
                // A short transfer.
                let done = if sectors > 1 && rng.u8(..30) == 0 { rng.usize(1..sectors) } else { sectors };
                self.image.shorten(id, done * SECTOR);
                if durable {
                    self.image.complete_durable(id)
                } else {
                    self.image.complete(id)
                }
                done * SECTOR
            }
            (_, Some((id, _))) => {
                self.image.complete(id);
                0
            }
            _ => 0,
        };
        if held.kind == OpKind::Flush && result.is_ok() {
            self.image.synced(op.mark);
        }
        self.file.set_len(self.image.now().len() as u64).unwrap();
        held.complete(result.map(|()| bytes as u32))
    }

    /// Reads, up to the end of the file.
    fn read(&self, held: &mut HeldOp) -> usize {
        let (mut bytes, offset) = (vec![0; held.bytes()], held.offset);
        let done = match (held.layer, &self.below) {
            (0, _) => {
                let end = self.image.now().len();
                self.image.read(offset as usize, &mut bytes);
                end.saturating_sub(offset as usize).min(bytes.len())
            }
            (_, Some(below)) => below.read_at(&mut bytes, offset).unwrap(),
            (_, None) => panic!("there is no backing image"),
        };
        held.put(&bytes[..done]);
        done
    }
}
