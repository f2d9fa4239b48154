//! The way of operations from a request to the engine of its worker.

use crate::lost_writes::LostWritesSeen;
use crate::{IoError, Step};
use kickless_io::{Buffers, Engine, FileId, Op, OpKind, Token, Waker};
use kickless_memory::Marks;

/// The way from one worker to a disk, for one request.
#[derive(Debug)]
pub struct Lane<'a> {
    /// The worker's engine.
    pub engine: &'a mut Engine,
    /// First half of the token that completions of this request carry.
    pub source: u32,
    /// Second half.
    pub slot: u32,
    /// What [`crate::Disk::attach`] returned for this engine.
    pub file: Option<FileId>,
    /// Signalled when a request of this lane that got [`Step::Busy`] for want of something that is shared,
    /// and no engine can announce, should be retried.
    pub waker: &'a Waker,
    /// The queue's own, from [`crate::Disk::lost_writes_seen`].
    pub lost_writes: &'a mut LostWritesSeen,
    /// Where writes to the guest's buffers are marked.
    pub marks: &'a mut Marks,
}

/// Where a request's operations go: straight to an engine, or past a disk's injected faults. Chosen at compile time, so that
/// the one pays nothing for the other.
pub(crate) trait Outlet {
    /// Sends an operation on its way.
    ///
    /// # Errors
    /// Not now ([`Step::Busy`]), or not at all; the buffers come back.
    fn send(&mut self, kind: OpKind, offset: u64, buffers: Buffers) -> Result<(), (Step, Buffers)>;

    /// What wakes the worker.
    fn waker(&self) -> &Waker;

    /// Where writes to the guest's buffers are marked.
    fn marks(&mut self) -> &mut Marks;

    /// The kernel had no room for an operation: nothing more of this disk is to be sent for a moment.
    fn stall(&mut self);
}

impl Outlet for Lane<'_> {
    #[inline]
    fn send(&mut self, kind: OpKind, offset: u64, buffers: Buffers) -> Result<(), (Step, Buffers)> {
        let Some(file) = self.file else {
            return Err((Step::Done(Err(IoError::Os(kickless_io::Errno::BADF))), buffers));
        };
        let token = Token { source: self.source, slot: self.slot };
        self.engine.queue(Op { file, kind, offset, buffers }, token).map_err(|op| (Step::Busy, op.buffers))
    }

    #[inline]
    fn waker(&self) -> &Waker {
        self.waker
    }

    #[inline]
    fn marks(&mut self) -> &mut Marks {
        self.marks
    }

    fn stall(&mut self) {
        if let Some(file) = self.file {
            self.engine.stall(file);
        }
    }
}
