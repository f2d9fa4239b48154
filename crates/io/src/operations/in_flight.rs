//! An operation in flight, and those that are merged with it.

use crate::files::HeldFile;
use crate::op::{Buffers, KernelBuffers, Op, OpKind, Token};
use crate::operations::merge::{BYTES_MAX, Merged, SEGMENTS_MAX};
use rustix::io::Errno;

/// A queued operation, and everything that it uses.
#[derive(Debug)]
pub(crate) struct InFlight {
    pub(crate) token: Token,
    pub(crate) held: HeldFile,
    pub(crate) op: Op,
    /// The operations that are merged with it.
    pub(crate) merged: Option<Box<Merged>>,
    /// The operation was merged with others before, and is done by itself now.
    pub(crate) unmerged: bool,
    /// The operation is not done again, for any result of the kernel.
    pub(crate) cancelled: bool,
    /// The operation carries `RWF_NOWAIT`. If it would have to wait, a thread does it.
    pub(crate) nowait: bool,
}

impl InFlight {
    pub(crate) fn new(token: Token, held: HeldFile, op: Op, nowait: bool) -> Self {
        Self { token, held, op, merged: None, unmerged: false, cancelled: false, nowait }
    }

    /// Returns the bytes to transfer, with all merged operations.
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

    /// Returns the memory for the kernel, with all merged operations.
    pub(crate) fn view(&mut self) -> KernelBuffers {
        match &self.merged {
            Some(merged) => merged.view(),
            None => self.op.buffers.view(self.op.kind),
        }
    }

    /// Returns whether `next` starts where this ends, and the two can be merged.
    pub(crate) fn can_merge(&self, next: &InFlight) -> bool {
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
            && !self.unmerged
            && !(ours.is_empty() || theirs.is_empty())
            && self.op.offset.checked_add(bytes) == Some(next.op.offset)
            && bytes.saturating_add(theirs.len()) <= BYTES_MAX
            && segments + theirs.segments().len() <= SEGMENTS_MAX
    }
}

/// Returns the `RWF_*` flags of a transfer.
#[inline]
pub(crate) fn rw_flags(operation: &InFlight) -> i32 {
    let durable = operation.op.kind == OpKind::Write { durable: true };
    (if durable { libc::RWF_DSYNC } else { 0 }) | if operation.nowait { libc::RWF_NOWAIT } else { 0 }
}
