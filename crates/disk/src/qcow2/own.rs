//! The operations that a queue carries out for the tables of an image.

use super::disk::AttachedImages;
use super::layer::{Image, LayerSender};
use super::own_buffers::OwnBuffers;
use super::tables::op::{OpId, TableOp, TableOpKind};
use super::write::errno_of;
use crate::attached::OWN_SLOTS;
use crate::buffers::TransferBuffers;
use crate::fault::{FaultInjector, FaultState};
use crate::file::{FileState, Unchecked};
use crate::io_context::OpSender;
use crate::{Extent, IoContext, Step};
use kickless_io::{AlignedBuf, Completion, Errno};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The largest number of operations of a queue at a time. Others wait, or go to other queues.
const OWN_MAX: usize = 16;

/// One operation for the tables of an image.
#[derive(Debug)]
struct OwnOp {
    image: Arc<Image>,
    /// The layer of the image.
    layer: usize,
    id: OpId,
    /// The request to the file.
    wanted: Unchecked,
    buffers: OwnBuffers,
    /// The part to write after the rest, so that the file reaches the end of a range: offset and length.
    extend: Option<(u64, u64)>,
    /// The bytes of the operation, its result if it succeeds.
    bytes: u32,
    is_started: bool,
    file: FileState,
}

/// An operation and its faults.
#[derive(Debug)]
pub(super) struct OwnSlot {
    op: OwnOp,
    faults: FaultState,
    /// The engine had no room for it.
    is_busy: bool,
}

impl OwnOp {
    /// Prepares an operation. `Err`: it ends at once.
    fn new(image: &Arc<Image>, layer: usize, TableOp { id, kind }: TableOp) -> Result<Self, (OpId, Errno)> {
        let (wanted, buffers) = match kind {
            TableOpKind::Read { at, buffer } => (Unchecked::Read { at }, OwnBuffers::new(buffer)),
            TableOpKind::Write { at, buffer } => {
                (Unchecked::Write { at, durable: false }, OwnBuffers::new(buffer))
            }
            TableOpKind::Sync => (Unchecked::Flush, OwnBuffers::default()),
            TableOpKind::Zero { at, len } => {
                let file_bytes = image.file.bytes().map_err(|errno| (id, errno))?;
                let inside = file_bytes.saturating_sub(at).min(len);
                let extent = Extent { offset: at, len: inside, unmap: true };
                let extend = (inside < len).then(|| {
                    let last = image.file.unit().min(len);
                    (at + len - last, last)
                });
                if extend.is_some() && image.file.is_device() {
                    return Err((id, Errno::NOSPC));
                }
                let (image, file) = (image.clone(), FileState::default());
                let buffers = OwnBuffers::of_extent(extent);
                let wanted = Unchecked::Zero;
                return Ok(Self {
                    image,
                    layer,
                    id,
                    wanted,
                    buffers,
                    extend,
                    bytes: 0,
                    is_started: false,
                    file,
                });
            }
        };
        let (image, file, bytes) = (image.clone(), FileState::default(), buffers.left() as u32);
        Ok(Self { image, layer, id, wanted, buffers, extend: None, bytes, is_started: false, file })
    }

    /// Starts the operation, or continues it.
    fn drive(&mut self, sender: &mut impl OpSender) -> Step {
        let sender = &mut LayerSender { sender, layer: self.layer };
        let step = if self.is_started {
            self.image.file.retry(sender, &mut self.buffers, &mut self.file)
        } else {
            self.is_started = true;
            self.image.file.start_unchecked(sender, &mut self.buffers, &mut self.file, self.wanted)
        };
        self.extend_after(sender, step)
    }

    fn resume(&mut self, sender: &mut impl OpSender, completion: Completion) -> Step {
        let sender = &mut LayerSender { sender, layer: self.layer };
        let step = self.image.file.resume(sender, &mut self.buffers, &mut self.file, completion);
        self.extend_after(sender, step)
    }

    /// Writes the last zeroes, if the rest has succeeded.
    fn extend_after(&mut self, sender: &mut impl OpSender, step: Step) -> Step {
        match (step, self.extend.take()) {
            (Step::Done(Ok(())), Some((at, len))) => {
                let Ok(buffer) = AlignedBuf::new(len as usize, len as usize) else {
                    return Step::Done(Err(crate::IoError::Os(Errno::NOMEM)));
                };
                self.buffers = OwnBuffers::new(buffer);
                self.wanted = Unchecked::Write { at, durable: false };
                self.image.file.start_unchecked(sender, &mut self.buffers, &mut self.file, self.wanted)
            }
            (step, extend) => {
                self.extend = extend;
                step
            }
        }
    }

    /// Reports the end of the operation to the tables.
    fn end(mut self, result: Result<(), crate::IoError>) {
        let result = result.map(|()| self.bytes).map_err(errno_of);
        let buffer = self.buffers.take();
        self.image.with_tables(|tables| tables.complete(self.id, buffer, result));
    }
}

impl OwnSlot {
    /// Calls `step` with the sender of the operation.
    fn drive(&mut self, context: &mut IoContext<'_>, injector: Option<&FaultInjector>) -> Step {
        match injector {
            None => self.op.drive(context),
            Some(injector) => self.op.drive(&mut injector.sender(context, &mut self.faults)),
        }
    }

    fn resume(
        &mut self,
        context: &mut IoContext<'_>,
        injector: Option<&FaultInjector>,
        completion: Completion,
    ) -> Step {
        match injector {
            None => self.op.resume(context, completion),
            Some(injector) => {
                let completion = injector.completed(&mut self.faults, completion, context.marks);
                self.op.resume(&mut injector.sender(context, &mut self.faults), completion)
            }
        }
    }
}

impl AttachedImages {
    /// Starts the operations that are due, as far as there is room.
    #[cold]
    pub(super) fn submit_own(&mut self, context: &mut IoContext<'_>, injector: Option<&FaultInjector>) {
        self.busy = 0;
        for index in 0..self.own.len() {
            if self.own[index].as_ref().is_some_and(|slot| slot.is_busy) {
                self.run_own(index, context, injector, None);
            }
        }
        // Acquire. Partner: the store in `Image::with_tables`. An operation that becomes due later sets the
        // flag again.
        while self.busy == 0 && self.in_flight < OWN_MAX && self.chain.due.swap(false, Ordering::AcqRel) {
            let chain = self.chain.clone();
            'layers: for (layer, image) in chain.layers.iter().enumerate() {
                let Some(image) = image.image() else { continue };
                loop {
                    if self.in_flight >= OWN_MAX || self.busy > 0 {
                        self.chain.due.store(true, Ordering::Release);
                        break 'layers;
                    }
                    // The flag is for this queue's own look, so no other queue is told.
                    let Some(op) = image.next_op() else { break };
                    match OwnOp::new(image, layer, op) {
                        Ok(op) => self.begin_own(op, context, injector),
                        Err((id, errno)) => {
                            image.with_tables(|tables| tables.complete(id, None, Err(errno)));
                        }
                    }
                }
            }
        }
    }

    fn begin_own(&mut self, op: OwnOp, context: &mut IoContext<'_>, injector: Option<&FaultInjector>) {
        let free = self.own.iter().position(Option::is_none).unwrap_or(self.own.len());
        if free == self.own.len() {
            self.own.push(None);
        }
        self.own[free] = Some(Box::new(OwnSlot { op, faults: FaultState::default(), is_busy: false }));
        self.in_flight += 1;
        self.run_own(free, context, injector, None);
    }

    /// Takes the completion of one.
    #[cold]
    pub(super) fn resume_own(
        &mut self,
        context: &mut IoContext<'_>,
        injector: Option<&FaultInjector>,
        completion: Completion,
    ) {
        let index = (completion.token.slot - OWN_SLOTS) as usize;
        self.run_own(index, context, injector, Some(completion));
    }

    /// Runs a step of one.
    fn run_own(
        &mut self,
        index: usize,
        context: &mut IoContext<'_>,
        injector: Option<&FaultInjector>,
        completion: Option<Completion>,
    ) {
        let Some(mut slot) = self.own.get_mut(index).and_then(Option::take) else { return };
        context.slot = OWN_SLOTS + index as u32;
        let step = match completion {
            Some(completion) => slot.resume(context, injector, completion),
            None => slot.drive(context, injector),
        };
        slot.is_busy = matches!(step, Step::Busy | Step::More);
        self.busy += usize::from(slot.is_busy);
        if let Step::Done(result) = step {
            self.in_flight -= 1;
            slot.op.end(result);
        } else {
            self.own[index] = Some(slot);
        }
    }
}
