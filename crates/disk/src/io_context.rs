//! The means by which a worker runs requests.

use crate::lost_writes::LostWritesSeen;
use crate::op_sender::{OpSender, Sent};
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

impl OpSender for IoContext<'_> {
    #[inline]
    fn send_to(&mut self, layer: usize, kind: OpKind, offset: u64, buffers: Buffers) -> Sent {
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
