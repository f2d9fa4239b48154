//! Operations in flight and their results, for all back-ends.
//!
//! An operation has a slot in [`Slots`] from the moment when the engine takes it until it completes.
//! Back-ends know it by this slot, and report the kernel's result to [`Operations::complete`]. The result is
//! one of four:
//! - The operation is done. It leaves its slot, returns its share, and goes to the caller.
//! - It carried `RWF_NOWAIT` and would have had to wait. A thread does it.
//! - It was merged with others. Each of them takes its part of the bytes. Those that got none are done again,
//!   each by itself.
//! - The kernel refused it when it was submitted. It completes at the next reap.
//!
//! A cancelled operation is never done again: it completes with `ECANCELED` instead.

pub(crate) mod in_flight;
pub(crate) mod merge;
pub(crate) mod slots;

use crate::aio::batch::Batches;
use crate::files::route::Route;
use crate::files::shares::Shares;
use crate::files::{ClosedFile, Files, HeldFile};
use crate::op::{Completion, FileId, Op, Token};
use in_flight::InFlight;
use rustix::io::Errno;
use slots::Slots;

/// Operations in flight, with the files that they use.
#[derive(Debug)]
pub(crate) struct Operations {
    pub(crate) slots: Slots,
    pub(crate) files: Files,
    /// Calls of `io_submit` that threads make for AIO.
    pub(crate) batches: Batches,
    /// Slots of merged operations that must be done again, each by itself.
    split: Vec<u32>,
    /// Slots of operations that would have had to wait.
    would_wait: Vec<u32>,
    /// Operations that completed outside of a reap.
    failed: Vec<Completion>,
    /// Indices of closed files that the kernel still knows.
    closed: Vec<u32>,
}

impl Operations {
    /// Makes an empty table for owners with these shares.
    pub(crate) fn new(shares: Shares) -> Self {
        Self {
            slots: Slots::new(shares.total()),
            files: Files::new(shares),
            batches: Batches::default(),
            split: Vec::new(),
            would_wait: Vec::new(),
            failed: Vec::new(),
            closed: Vec::new(),
        }
    }

    /// Returns the number of operations that were taken and not reaped.
    pub(crate) fn in_flight(&self) -> usize {
        self.files.in_flight() + self.failed.len()
    }

    /// Completes the operation in `op_slot` and those that are merged with it, or notes the next step: see
    /// the module.
    #[inline]
    pub(crate) fn complete(
        &mut self,
        op_slot: u32,
        mut result: Result<u32, Errno>,
        into: &mut Vec<Completion>,
    ) {
        let Self { slots, files, split, would_wait, closed, .. } = self;
        if slots.is_missed(op_slot, result, files) {
            if !slots.is_cancelled(op_slot) {
                return would_wait.push(op_slot);
            }
            result = Err(Errno::CANCELED);
        }
        slots.complete(op_slot, result, split, |InFlight { token, held, op, .. }, result| {
            into.push(Completion { token, result, buffers: op.buffers });
            note_closed(files.release(held), closed);
        });
    }

    /// Notes that the kernel refused the operation in `op_slot`.
    pub(crate) fn refuse(&mut self, op_slot: u32, errno: Errno) {
        let mut failed = std::mem::take(&mut self.failed);
        self.complete(op_slot, Err(errno), &mut failed);
        self.failed = failed;
    }

    /// Ends the operation in `op_slot`, and those that are merged with it.
    pub(crate) fn fail(&mut self, op_slot: u32, errno: Errno) {
        let Self { slots, files, failed, closed, .. } = self;
        slots.take(op_slot, |InFlight { token, held, op, .. }| {
            failed.push(Completion { token, result: Err(errno), buffers: op.buffers });
            note_closed(files.release(held), closed);
        });
    }

    /// Marks the operations on a file as cancelled, and ends those that would be queued again.
    pub(crate) fn cancel(&mut self, file: FileId) {
        let Self { slots, files, split, would_wait, .. } = self;
        let of_file = slots.iter_mut().filter(|operation| files.is_held(operation.held, file));
        of_file.for_each(|operation| operation.cancelled = true);
        let is_cancelled = |op_slot: &mut u32| slots.is_cancelled(*op_slot);
        let mut ended: Vec<u32> = split.extract_if(.., is_cancelled).collect();
        ended.extend(would_wait.extract_if(.., is_cancelled));
        ended.into_iter().for_each(|op_slot| self.fail(op_slot, Errno::CANCELED));
    }

    /// Fails an operation on an unregistered file. It has no slot and no share.
    #[cold]
    pub(crate) fn fail_unregistered(&mut self, op: Op, token: Token) {
        self.failed.push(Completion { token, result: Err(Errno::BADF), buffers: op.buffers });
    }

    /// Appends operations that completed outside of a reap.
    #[inline]
    pub(crate) fn reap_failed(&mut self, into: &mut Vec<Completion>) {
        if !self.failed.is_empty() {
            into.append(&mut self.failed);
            self.files.forget_unregistered();
        }
    }

    /// Returns whether operations completed outside of a reap, or must be queued again.
    pub(crate) fn needs_turn(&self) -> bool {
        !self.failed.is_empty() || self.needs_requeue()
    }

    /// Closes a file once none of its operations is in flight.
    pub(crate) fn unregister(&mut self, file: FileId) {
        note_closed(self.files.remove(file), &mut self.closed);
    }

    /// Takes the index of a closed file that the kernel must forget.
    #[inline]
    pub(crate) fn take_closed(&mut self) -> Option<u32> {
        self.closed.pop()
    }

    /// Returns whether operations must be queued again.
    #[inline]
    pub(crate) fn needs_requeue(&self) -> bool {
        !(self.split.is_empty() && self.would_wait.is_empty())
    }

    /// Calls `queue` for each merged operation that must be done by itself, with its slot and its present
    /// route.
    pub(crate) fn requeue_split(&mut self, mut queue: impl FnMut(u32, HeldFile, Route)) {
        let Self { split, slots, files, .. } = self;
        for op_slot in split.drain(..) {
            let Some(operation) = slots.get_mut(op_slot) else { continue };
            let held = operation.held;
            let route = files.route(held, operation.op.kind, operation.op.buffers.len());
            operation.nowait = route == Route::NoWait;
            queue(op_slot, held, route);
        }
    }

    /// Calls `queue` for the slot of each operation that would have had to wait.
    pub(crate) fn requeue_missed(&mut self, queue: impl FnMut(u32)) {
        self.would_wait.drain(..).for_each(queue);
    }

    /// Takes the slot of an operation that would have had to wait.
    pub(crate) fn take_missed(&mut self) -> Option<u32> {
        self.would_wait.pop()
    }

    /// Discards the merged operations that would be done again.
    pub(crate) fn discard_split(&mut self) {
        while let Some(op_slot) = self.split.pop() {
            self.discard(op_slot);
        }
    }

    /// Discards the operation in `op_slot`, and those that are merged with it. The engine is being dropped,
    /// and the kernel does not know them.
    pub(crate) fn discard(&mut self, op_slot: u32) {
        self.slots.take(op_slot, drop);
    }
}

/// Notes a closed file if the kernel knows it.
#[inline]
fn note_closed(file: Option<ClosedFile>, closed: &mut Vec<u32>) {
    if let Some(ClosedFile { index, fixed: true }) = file {
        closed.push(index);
    }
}
