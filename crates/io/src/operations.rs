//! Operations in flight and what becomes of them, whichever back-end does them.
//!
//! An operation has a place in [`Slots`] from the moment when the engine takes it until it completes.
//! Back-ends know it by this place, and report the kernel's result of it to [`Operations::complete`]. The
//! result is one of four:
//! - The operation is done. It leaves its place, gives its share back, and goes to the caller.
//! - It carried `RWF_NOWAIT` and would have had to wait. A thread does it.
//! - It was merged with others. Each of them takes its part of the bytes; those that got none are done again,
//!   each by itself.
//! - The kernel refused it when it was submitted. It completes at the next reap.
//!
//! An operation that was cancelled is never done again: it completes with `ECANCELED` instead.

pub(crate) mod in_flight;
pub(crate) mod merge;
pub(crate) mod slots;

use crate::aio::batch::Batches;
use crate::files::route::Route;
use crate::files::shares::Shares;
use crate::files::{Files, Gone, Held};
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
    /// Places of merged operations that are to be done each by itself.
    again: Vec<u32>,
    /// Places of operations that would have had to wait.
    missed: Vec<u32>,
    /// Completed outside of a reap.
    failed: Vec<Completion>,
    /// Indices of files that went, and that the kernel knows.
    gone: Vec<u32>,
}

impl Operations {
    /// Makes an empty table for owners that share these places.
    pub(crate) fn new(shares: Shares) -> Self {
        Self {
            slots: Slots::new(shares.total()),
            files: Files::new(shares),
            batches: Batches::default(),
            again: Vec::new(),
            missed: Vec::new(),
            failed: Vec::new(),
            gone: Vec::new(),
        }
    }

    /// Returns the operations that were taken and not reaped.
    pub(crate) fn in_flight(&self) -> usize {
        self.files.in_flight() + self.failed.len()
    }

    /// Completes the operation at `place`, with those that are one with it, or notes what is to be done next:
    /// see the module.
    #[inline]
    pub(crate) fn complete(
        &mut self,
        place: u32,
        mut result: Result<u32, Errno>,
        into: &mut Vec<Completion>,
    ) {
        let Self { slots, files, again, missed, gone, .. } = self;
        if slots.is_missed(place, result, files) {
            if !slots.is_cancelled(place) {
                return missed.push(place);
            }
            result = Err(Errno::CANCELED);
        }
        slots.complete(place, result, again, |InFlight { token, held, op, .. }, result| {
            into.push(Completion { token, result, buffers: op.buffers });
            note_gone(files.release(held), gone);
        });
    }

    /// Notes that the kernel refused the operation at `place`.
    pub(crate) fn refuse(&mut self, place: u32, errno: Errno) {
        let mut failed = std::mem::take(&mut self.failed);
        self.complete(place, Err(errno), &mut failed);
        self.failed = failed;
    }

    /// Ends the operation at `place`, with all that are one with it.
    pub(crate) fn fail(&mut self, place: u32, errno: Errno) {
        let Self { slots, files, failed, gone, .. } = self;
        slots.take(place, |InFlight { token, held, op, .. }| {
            failed.push(Completion { token, result: Err(errno), buffers: op.buffers });
            note_gone(files.release(held), gone);
        });
    }

    /// Marks the operations on a file as cancelled, and ends those that were to be queued again.
    pub(crate) fn cancel(&mut self, file: FileId) {
        let Self { slots, files, again, missed, .. } = self;
        let of_file = slots.iter_mut().filter(|operation| files.is_held(operation.held, file));
        of_file.for_each(|operation| operation.cancelled = true);
        let is_cancelled = |place: &mut u32| slots.is_cancelled(*place);
        let mut ended: Vec<u32> = again.extract_if(.., is_cancelled).collect();
        ended.extend(missed.extract_if(.., is_cancelled));
        ended.into_iter().for_each(|place| self.fail(place, Errno::CANCELED));
    }

    /// Fails an operation on a file that was unregistered. It has no place and no share.
    #[cold]
    pub(crate) fn fail_stray(&mut self, op: Op, token: Token) {
        self.failed.push(Completion { token, result: Err(Errno::BADF), buffers: op.buffers });
    }

    /// Appends operations that completed outside of a reap.
    #[inline]
    pub(crate) fn reap_failed(&mut self, into: &mut Vec<Completion>) {
        if !self.failed.is_empty() {
            into.append(&mut self.failed);
            self.files.forget_strays();
        }
    }

    /// Returns whether operations completed outside of a reap, or are to be queued again.
    pub(crate) fn needs_turn(&self) -> bool {
        !self.failed.is_empty() || self.has_again()
    }

    /// Forgets a file once nothing of it is in flight.
    pub(crate) fn unregister(&mut self, file: FileId) {
        note_gone(self.files.remove(file), &mut self.gone);
    }

    /// Takes the index of a file that went, and that the kernel is to forget.
    #[inline]
    pub(crate) fn take_gone(&mut self) -> Option<u32> {
        self.gone.pop()
    }

    /// Returns whether operations are to be queued again.
    #[inline]
    pub(crate) fn has_again(&self) -> bool {
        !(self.again.is_empty() && self.missed.is_empty())
    }

    /// Calls `queue` for each merged operation that is to be done by itself, with the place and the route
    /// that it has now.
    pub(crate) fn queue_again(&mut self, mut queue: impl FnMut(u32, Held, Route)) {
        let Self { again, slots, files, .. } = self;
        for place in again.drain(..) {
            let Some(operation) = slots.get_mut(place) else { continue };
            let held = operation.held;
            let route = files.route(held, operation.op.kind, operation.op.buffers.len());
            operation.nowait = route == Route::NoWait;
            queue(place, held, route);
        }
    }

    /// Calls `queue` for the place of each operation that would have had to wait.
    pub(crate) fn queue_missed(&mut self, queue: impl FnMut(u32)) {
        self.missed.drain(..).for_each(queue);
    }

    /// Takes the place of an operation that would have had to wait.
    pub(crate) fn take_missed(&mut self) -> Option<u32> {
        self.missed.pop()
    }

    /// Gives up the merged operations that are to be done each by itself.
    pub(crate) fn discard_again(&mut self) {
        while let Some(place) = self.again.pop() {
            self.discard(place);
        }
    }

    /// Gives up the operation at `place`, with all that are one with it. The engine is being dropped, and the
    /// kernel was not told of them.
    pub(crate) fn discard(&mut self, place: u32) {
        self.slots.take(place, drop);
    }
}

/// Notes a file that went if the kernel knows it.
#[inline]
fn note_gone(file: Option<Gone>, gone: &mut Vec<u32>) {
    if let Some(Gone { index, fixed: true }) = file {
        gone.push(index);
    }
}
