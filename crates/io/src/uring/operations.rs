//! Operations in flight in an engine that has a ring.

use super::buffers::Registered;
use crate::files::{Files, Gone};
use crate::op::Completion;
use crate::operations::in_flight::InFlight;
use crate::operations::slots::Slots;
use io_uring::Submitter;
use rustix::io::Errno;

/// Operations in flight, and what they use.
pub(crate) struct Operations {
    pub(super) slots: Slots,
    pub(crate) files: Files,
    /// Guest memory that the kernel has pinned, where that is asked for.
    pub(super) buffers: Option<Registered>,
    /// Places of merged operations that are to be done each by itself.
    pub(super) again: Vec<u32>,
    /// Places of operations that would have had to wait.
    pub(super) missed: Vec<u32>,
}

impl Operations {
    /// The kernel has done what it was told of `place`.
    #[inline]
    pub(super) fn complete(
        &mut self,
        submitter: &Submitter<'_>,
        place: u32,
        result: Result<u32, Errno>,
        into: &mut Vec<Completion>,
    ) {
        self.let_go(submitter, place);
        let Self { slots, files, again, missed, .. } = self;
        if slots.is_missed(place, result, files) {
            return missed.push(place);
        }
        slots.complete(place, result, again, |InFlight { token, held, op, .. }, result| {
            into.push(Completion { token, result, buffers: op.buffers });
            forget(submitter, files.release(held));
        });
    }

    /// The operation at `place` is over, with all that are one with it.
    pub(super) fn fail(
        &mut self,
        submitter: &Submitter<'_>,
        place: u32,
        errno: Errno,
        into: &mut Vec<Completion>,
    ) {
        self.let_go(submitter, place);
        let Self { slots, files, .. } = self;
        slots.take(place, |InFlight { token, held, op, .. }| {
            into.push(Completion { token, result: Err(errno), buffers: op.buffers });
            forget(submitter, files.release(held));
        });
    }

    /// The kernel uses no registered buffer for `place` any more.
    #[inline]
    fn let_go(&mut self, submitter: &Submitter<'_>, place: u32) {
        if let Some(buffers) = &mut self.buffers
            && let Some(operation) = self.slots.get_mut(place)
            && let Some(index) = operation.buffer.take()
        {
            buffers.done(submitter, index);
        }
    }
}

/// The kernel lets go of a file as well. Should it refuse, the next file that gets the place replaces it.
#[inline]
pub(super) fn forget(submitter: &Submitter<'_>, gone: Option<Gone>) {
    if let Some(Gone { index, fixed: true }) = gone {
        let _ = submitter.register_files_update(index, &[-1]);
    }
}
