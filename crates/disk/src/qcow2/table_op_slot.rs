//! One operation that a queue carries out for the tables of an image.

use super::layer::{Image, errno_of};
use super::local_buffers::LocalBuffers;
use super::runtime::{TableOp, TableOpKind};
use super::sender::{CancelledSender, LayerSender};
use crate::buffers::TransferBuffers;
use crate::fault::{FaultInjector, FaultState};
use crate::file::{FileState, Unchecked, ZeroParts};
use crate::op_sender::OpSender;
use crate::{Extent, IoError, Step};
use kickless_io::{AlignedBuf, Completion, Errno};
use kickless_qcow2::OpId;
use std::sync::Arc;

/// One operation for the tables of an image.
#[derive(Debug)]
pub(super) struct RunningOp {
    image: Arc<Image>,
    /// The layer of the image.
    layer: usize,
    id: OpId,
    /// The request to the file.
    wanted: Unchecked,
    buffers: LocalBuffers,
    /// The range to zero, if the operation does that: offset, length, and whether its space is given back.
    zeroes: Option<(u64, u64, bool)>,
    /// The part to write after the rest, so that the file reaches the end of a range: offset and length.
    extend: Option<(u64, u64)>,
    /// The bytes of the operation, its result if it succeeds.
    bytes: u32,
    is_started: bool,
    is_cancelled: bool,
    file: FileState,
}

/// An operation and its faults.
#[derive(Debug)]
pub(super) struct TableOpSlot {
    op: RunningOp,
    faults: FaultState,
    /// The engine had no room for it.
    pub(super) is_busy: bool,
}

impl RunningOp {
    /// Prepares an operation. `Err`: it ends at once.
    fn new(image: &Arc<Image>, layer: usize, TableOp { id, kind }: TableOp) -> Result<Self, (OpId, Errno)> {
        let (mut zeroes, mut extend) = (None, None);
        let (wanted, buffers) = match kind {
            TableOpKind::Read { at, buffer } => (Unchecked::Read { at }, LocalBuffers::new(buffer)),
            TableOpKind::Write { at, buffer } => {
                (Unchecked::Write { at, durable: false }, LocalBuffers::new(buffer))
            }
            TableOpKind::Sync => (Unchecked::Flush, LocalBuffers::default()),
            TableOpKind::Zero { at, len, gives_back } => {
                let ZeroParts { inside, last } =
                    image.file.split_zeroes(at, len).map_err(|errno| (id, errno))?;
                extend = last;
                zeroes = Some((at, len, gives_back));
                let extent = Extent { offset: at, len: inside, unmap: gives_back };
                (Unchecked::Zero, LocalBuffers::of_extent(extent))
            }
        };
        let bytes = buffers.left() as u32;
        Ok(Self {
            image: image.clone(),
            layer,
            id,
            wanted,
            buffers,
            zeroes,
            extend,
            bytes,
            is_started: false,
            is_cancelled: false,
            file: FileState::default(),
        })
    }

    /// Starts the operation, or continues it, after a completion if there is one.
    fn step<S: OpSender>(&mut self, sender: &mut S, completion: Option<Completion>) -> Step {
        if !self.is_cancelled {
            return self.step_with(sender, completion);
        }
        let sender = &mut CancelledSender(sender);
        match self.step_with(sender, completion) {
            Step::Busy | Step::More => {
                self.file.cancel();
                self.step_with(sender, None)
            }
            step => step,
        }
    }

    fn step_with(&mut self, sender: &mut impl OpSender, completion: Option<Completion>) -> Step {
        let sender = &mut LayerSender { sender, layer: self.layer };
        let (file, buffers) = (&self.image.file, &mut self.buffers);
        let step = match completion {
            Some(completion) => file.resume(sender, buffers, &mut self.file, completion),
            None if self.is_started => file.retry(sender, buffers, &mut self.file),
            None => {
                self.is_started = true;
                file.start_unchecked(sender, buffers, &mut self.file, self.wanted)
            }
        };
        // The last zeroes are written if the rest has succeeded.
        match (step, self.extend.take()) {
            (Step::Done(Ok(())), Some((at, len))) => {
                let Ok(buffer) = AlignedBuf::new(len as usize, len as usize) else {
                    return Step::Done(Err(IoError::Os(Errno::NOMEM)));
                };
                self.buffers = LocalBuffers::new(buffer);
                self.wanted = Unchecked::Write { at, durable: false };
                file.start_unchecked(sender, &mut self.buffers, &mut self.file, self.wanted)
            }
            (step, extend) => {
                self.extend = extend;
                step
            }
        }
    }

    /// Reports the end of the operation to the tables. They take one back that was cancelled.
    fn end(mut self, result: Result<(), IoError>) {
        let buffer = self.buffers.take();
        if self.is_cancelled && result.is_err() {
            let kind = match (self.zeroes, self.wanted, buffer) {
                (Some((at, len, gives_back)), ..) => Some(TableOpKind::Zero { at, len, gives_back }),
                (_, Unchecked::Read { at }, Some(buffer)) => Some(TableOpKind::Read { at, buffer }),
                (_, Unchecked::Write { at, .. }, Some(buffer)) => Some(TableOpKind::Write { at, buffer }),
                (_, Unchecked::Flush, _) => Some(TableOpKind::Sync),
                _ => None,
            };
            if let Some(mut kind) = kind {
                if let TableOpKind::Read { buffer, .. } | TableOpKind::Write { buffer, .. } = &mut kind {
                    buffer.set_window(0..self.bytes as usize);
                }
                return self.image.with_tables(|tables| tables.take_back(TableOp { id: self.id, kind }));
            }
            return self.image.with_tables(|tables| tables.complete(self.id, None, Err(Errno::CANCELED)));
        }
        if let (Ok(()), Some((at, len, _))) = (result, self.zeroes) {
            self.image.file.reached(at + len);
        }
        let result = result.map(|()| self.bytes).map_err(errno_of);
        self.image.with_tables(|tables| tables.complete(self.id, buffer, result));
    }
}

impl TableOpSlot {
    /// Prepares an operation. `Err`: it ends at once.
    pub(super) fn new(image: &Arc<Image>, layer: usize, op: TableOp) -> Result<Self, (OpId, Errno)> {
        let op = RunningOp::new(image, layer, op)?;
        Ok(Self { op, faults: FaultState::default(), is_busy: false })
    }

    /// Runs a step, with the faults of an injector.
    pub(super) fn step<S: OpSender>(
        &mut self,
        sender: &mut S,
        injector: Option<&FaultInjector>,
        completion: Option<Completion>,
    ) -> Step {
        let Some(injector) = injector else { return self.op.step(sender, completion) };
        let completion =
            completion.map(|completion| injector.completed(&mut self.faults, completion, sender.marks()));
        self.op.step(&mut injector.sender(sender, &mut self.faults), completion)
    }

    /// Cancels the operation. It ends after the part that the engine has, at its next step.
    pub(super) fn cancel(&mut self) {
        self.op.is_cancelled = true;
        self.op.file.cancel();
    }

    /// Reports the end of the operation to the tables.
    pub(super) fn end(self, result: Result<(), IoError>) {
        self.op.end(result);
    }
}
