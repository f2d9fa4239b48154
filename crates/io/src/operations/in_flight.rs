//! An operation in flight, and those that are one with it for the kernel.

use crate::files::Held;
use crate::op::{Buffers, Op, OpKind, Token, View};
use crate::operations::merge::{BYTES_MAX, Merged, SEGMENTS_MAX};
use rustix::io::Errno;

/// An operation that has been queued, and all that it uses.
#[derive(Debug)]
pub(crate) struct InFlight {
    pub(crate) token: Token,
    pub(crate) held: Held,
    pub(crate) op: Op,
    /// Those that are one with it for the kernel.
    pub(crate) merged: Option<Box<Merged>>,
    /// It was one of several, and is done by itself now.
    pub(crate) alone: bool,
    /// It is not done again, whatever the kernel's result is.
    pub(crate) cancelled: bool,
    /// It is told not to wait; where it would have to, a thread does it.
    pub(crate) nowait: bool,
    /// The registered buffer that the kernel was told to use.
    pub(crate) buffer: Option<u16>,
}

impl InFlight {
    pub(crate) fn new(token: Token, held: Held, op: Op, nowait: bool) -> Self {
        Self { token, held, op, merged: None, alone: false, cancelled: false, nowait, buffer: None }
    }

    /// Returns how many bytes the kernel is to transfer, for all that are one with it.
    #[inline]
    pub(super) fn bytes(&self) -> u64 {
        self.merged.as_ref().map_or_else(|| self.op.buffers.len(), |merged| merged.bytes())
    }

    /// Returns the caller's result for this result of the kernel.
    #[inline]
    pub(super) fn result(&self, result: Result<u32, Errno>) -> Result<u32, Errno> {
        match result {
            // The caller would do it again.
            Err(Errno::INTR | Errno::AGAIN) if self.cancelled => Err(Errno::CANCELED),
            result => result,
        }
    }

    /// What the kernel takes, for all that are one with it.
    pub(crate) fn view(&mut self) -> View {
        match &self.merged {
            Some(merged) => merged.view(),
            None => self.op.buffers.view(self.op.kind),
        }
    }

    /// Whether `next` goes on where this ends, and the two can be one.
    pub(crate) fn takes(&self, next: &InFlight) -> bool {
        let (Buffers::Guest(ours), Buffers::Guest(theirs)) = (&self.op.buffers, &next.op.buffers) else {
            return false;
        };
        let (bytes, segments) = match &self.merged {
            Some(merged) => (merged.bytes(), merged.segments()),
            None => (ours.len(), ours.segments().len()),
        };
        self.op.kind == next.op.kind
            && self.op.kind.is_transfer()
            && self.held == next.held
            && !self.alone
            && !(ours.is_empty() || theirs.is_empty())
            && self.op.offset.checked_add(bytes) == Some(next.op.offset)
            && bytes.saturating_add(theirs.len()) <= BYTES_MAX
            && segments + theirs.segments().len() <= SEGMENTS_MAX
    }
}

/// `RWF_*` of a transfer.
#[inline]
pub(crate) fn rw_flags(operation: &InFlight) -> i32 {
    let durable = operation.op.kind == OpKind::Write { durable: true };
    (if durable { libc::RWF_DSYNC } else { 0 }) | if operation.nowait { libc::RWF_NOWAIT } else { 0 }
}
