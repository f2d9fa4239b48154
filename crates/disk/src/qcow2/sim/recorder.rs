//! An engine for the whole disk. It records each write to the image, and completes operations in any order.

use super::engine::{Class, Failures};
use super::image::{Image, SECTOR, WriteId};
use crate::Step;
use crate::op_sender::OpSender;
use crate::qcow2::own::OwnSender;
use fastrand::Rng;
use kickless_io::{Buffers, Completion, Errno, OpKind, Token, Waker};
use kickless_memory::Marks;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// An operation in flight.
#[derive(Debug)]
struct Op {
    queue: usize,
    slot: u32,
    layer: usize,
    kind: OpKind,
    offset: u64,
    buffers: Buffers,
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
    pub(super) image: Image,
    /// The image's file, which has the same length, and other contents.
    pub(super) file: File,
    pub(super) below: Option<File>,
    pub(super) failures: Failures,
    pub(super) now: u64,
    ops: Vec<Op>,
    late_max: u64,
}

/// Sends the operations of one request.
pub(super) struct Sender<'a> {
    pub(super) recorder: &'a mut Recorder,
    pub(super) rng: &'a mut Rng,
    pub(super) queue: usize,
    pub(super) slot: u32,
    pub(super) waker: &'a Waker,
    pub(super) marks: &'a mut Marks,
}

impl OpSender for Sender<'_> {
    fn send_to(
        &mut self,
        layer: usize,
        kind: OpKind,
        offset: u64,
        buffers: Buffers,
    ) -> Result<(), (Step, Buffers)> {
        // The queue tries again after its next completion.
        if self.recorder.in_flight(self.queue) > 0 && self.rng.u8(..20) == 0 {
            return Err((Step::Busy, buffers));
        }
        self.recorder.push((self.queue, self.slot), (layer, kind, offset), buffers, self.rng);
        Ok(())
    }

    fn waker(&self) -> &Waker {
        self.waker
    }

    fn marks(&mut self) -> &mut Marks {
        self.marks
    }

    fn pause_layer(&mut self, _layer: usize) {}
}

impl OwnSender for Sender<'_> {
    fn set_slot(&mut self, slot: u32) {
        self.slot = slot;
    }
}

impl Recorder {
    pub(super) fn new(image: Image, file: File, below: Option<File>, rng: &mut Rng) -> Self {
        let late_max = rng.choice([30, 150, 600]).unwrap();
        let failures = Failures::random(rng);
        Self { image, file, below, failures, now: 1, ops: Vec::new(), late_max }
    }

    pub(super) fn in_flight(&self, queue: usize) -> usize {
        self.ops.iter().filter(|op| op.queue == queue).count()
    }

    pub(super) fn is_idle(&self) -> bool {
        self.ops.is_empty()
    }

    fn push(
        &mut self,
        (queue, slot): (usize, u32),
        (layer, kind, offset): (usize, OpKind, u64),
        buffers: Buffers,
        rng: &mut Rng,
    ) {
        assert!(layer == 0 || kind == OpKind::Read, "a backing image is written");
        let write = match kind {
            OpKind::Write { .. } => Some(contents(&buffers)),
            OpKind::Range { len, .. } => Some(vec![0; len as usize]),
            OpKind::Read | OpKind::Flush => None,
        };
        let write = write.map(|bytes| {
            let len = bytes.len();
            (self.image.submit(offset as usize, bytes), len)
        });
        let late = match rng.u8(..20) {
            0..11 => 0,
            11..17 => rng.u64(..30),
            _ => rng.u64(..self.late_max),
        };
        let (mark, not_before) = (self.image.sync_begins(), self.now + late);
        let is_cancelled = false;
        self.ops.push(Op {
            queue,
            slot,
            layer,
            kind,
            offset,
            buffers,
            write,
            mark,
            is_cancelled,
            not_before,
        });
    }

    /// Cancels the operations of a queue. Some go on.
    pub(super) fn cancel(&mut self, queue: usize, rng: &mut Rng) {
        for op in self.ops.iter_mut().filter(|op| op.queue == queue) {
            op.is_cancelled = rng.bool();
            op.not_before = self.now;
        }
    }

    /// Completes an operation, of any queue, and returns its queue. `any`: also a late one.
    pub(super) fn complete_one(&mut self, any: bool, rng: &mut Rng) -> Option<(usize, Completion)> {
        let is_ripe = |index: &usize| any || self.ops[*index].not_before <= self.now;
        let ripe: Vec<usize> = (0..self.ops.len()).filter(is_ripe).collect();
        let op = self.ops.swap_remove(rng.choice(ripe)?);
        Some((op.queue, self.complete(op, rng)))
    }

    fn complete(&mut self, op: Op, rng: &mut Rng) -> Completion {
        let token = Token { source: op.queue as u32, slot: op.slot };
        let class = match op.kind {
            OpKind::Read => Class::Read,
            OpKind::Write { .. } if op.slot >= crate::OWN_SLOTS => Class::TableWrite,
            OpKind::Write { .. } => Class::Write,
            OpKind::Range { .. } => Class::Zero,
            OpKind::Flush => Class::Sync,
        };
        let mut result = self.failures.result(class, rng);
        if op.is_cancelled {
            result = Err(Errno::CANCELED);
        } else if class == Class::Zero && result.is_err() && rng.u8(..4) == 0 {
            result = Err(Errno::OPNOTSUPP);
        }
        let mut buffers = op.buffers;
        let bytes = match (op.kind, op.write) {
            (OpKind::Read, _) if result.is_ok() => self.read(op.layer, op.offset, &mut buffers),
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
        if op.kind == OpKind::Flush && result.is_ok() {
            self.image.synced(op.mark);
        }
        self.file.set_len(self.image.now().len() as u64).unwrap();
        Completion { token, result: result.map(|()| bytes as u32), buffers }
    }

    /// Reads, up to the end of the file.
    fn read(&self, layer: usize, offset: u64, buffers: &mut Buffers) -> usize {
        let mut bytes = vec![0; len(buffers)];
        let done = match (layer, &self.below) {
            (0, _) => {
                let end = self.image.now().len();
                self.image.read(offset as usize, &mut bytes);
                end.saturating_sub(offset as usize).min(bytes.len())
            }
            (_, Some(below)) => below.read_at(&mut bytes, offset).unwrap(),
            (_, None) => panic!("there is no backing image"),
        };
        match buffers {
            Buffers::Guest(iov) => drop(iov.write(0, &bytes[..done], &mut Marks::off())),
            Buffers::Owned(buffer) => {
                let window = buffer.window();
                buffer[window.start..window.start + done].copy_from_slice(&bytes[..done]);
            }
            Buffers::None => {}
        }
        done
    }
}

fn len(buffers: &Buffers) -> usize {
    match buffers {
        Buffers::Guest(iov) => iov.len() as usize,
        Buffers::Owned(buffer) => buffer.window().len(),
        Buffers::None => 0,
    }
}

fn contents(buffers: &Buffers) -> Vec<u8> {
    let mut bytes = vec![0; len(buffers)];
    match buffers {
        Buffers::Guest(iov) => drop(iov.read(0, &mut bytes)),
        Buffers::Owned(buffer) => bytes.copy_from_slice(&buffer[buffer.window()]),
        Buffers::None => {}
    }
    bytes
}
