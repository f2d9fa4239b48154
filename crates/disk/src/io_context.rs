//! Sends the operations of a request to the engine of its worker.

use crate::lost_writes::LostWritesSeen;
use crate::{Attached, IoError, Step};
use kickless_io::{Buffers, Engine, Op, OpKind, Token, Waker};
use kickless_memory::Marks;

/// The means by which a worker runs one request on a disk.
#[derive(Debug)]
pub struct IoContext<'a> {
    /// The worker's engine.
    pub engine: &'a mut Engine,
    /// The first half of the token that completions of this request carry.
    pub task: u32,
    /// The second half.
    pub slot: u32,
    /// The result of [`crate::Disk::attach`] for this engine.
    pub attached: &'a mut Attached,
    /// Signalled when a request that got [`Step::Busy`] should be retried, if it waits for something shared
    /// that no engine announces.
    pub waker: &'a Waker,
    /// The lost writes that the queue has reported, from [`crate::Disk::lost_writes_seen`].
    pub lost_writes: &'a mut LostWritesSeen,
    /// The record of writes to the guest's buffers, for the dirty log.
    pub marks: &'a mut Marks,
}

/// Sends a request's operations, either straight to an engine or through injected faults.
///
/// The choice is made at compile time, so disks without faults pay nothing for them.
pub(crate) trait OpSender {
    /// Sends an operation.
    ///
    /// # Errors
    /// It cannot be sent now ([`Step::Busy`]) or ever. The buffers come back.
    #[inline]
    fn send(&mut self, kind: OpKind, offset: u64, buffers: Buffers) -> Result<(), (Step, Buffers)> {
        self.send_to(0, kind, offset, buffers)
    }

    /// Sends an operation to the file of a layer. Layer 0 is the disk's own file.
    ///
    /// # Errors
    /// As [`OpSender::send`].
    fn send_to(
        &mut self,
        layer: usize,
        kind: OpKind,
        offset: u64,
        buffers: Buffers,
    ) -> Result<(), (Step, Buffers)>;

    /// Returns the waker of the worker.
    fn waker(&self) -> &Waker;

    /// Returns the record of writes to the guest's buffers.
    fn marks(&mut self) -> &mut Marks;

    /// Stops further operations of this disk for a moment, because the kernel had no room.
    fn pause(&mut self) {
        self.pause_layer(0);
    }

    /// Stops further operations of a layer's file for a moment.
    fn pause_layer(&mut self, layer: usize);
}

impl OpSender for IoContext<'_> {
    #[inline]
    fn send_to(
        &mut self,
        layer: usize,
        kind: OpKind,
        offset: u64,
        buffers: Buffers,
    ) -> Result<(), (Step, Buffers)> {
        let Some(file) = self.attached.layer(layer) else {
            return Err((Step::Done(Err(IoError::Os(kickless_io::Errno::BADF))), buffers));
        };
        let token = Token { source: self.task, slot: self.slot };
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

    fn pause_layer(&mut self, layer: usize) {
        if let Some(file) = self.attached.layer(layer) {
            self.engine.pause(file);
        }
    }
}
