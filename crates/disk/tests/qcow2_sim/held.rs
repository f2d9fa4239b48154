//! Operations that the engine of a test holds until it completes them.

use crate::Step;
use crate::op_sender::OpSender;
use crate::qcow2::table_ops::TableOpSender;
use kickless_io::{Buffers, Completion, Errno, OpKind, Token, Waker};
use kickless_memory::Marks;

/// An operation in flight.
#[derive(Debug)]
pub(super) struct HeldOp {
    pub(super) queue: usize,
    pub(super) slot: u32,
    pub(super) layer: usize,
    pub(super) kind: OpKind,
    pub(super) offset: u64,
    pub(super) buffers: Buffers,
}

/// An engine that holds operations.
pub(super) trait HoldOps {
    /// Returns whether a queue may begin an operation. If not, it tries again after its next completion.
    fn has_room(&mut self, queue: usize) -> bool;

    /// Takes an operation.
    fn hold(&mut self, op: HeldOp);
}

/// Sends the operations of one request to an engine.
pub(super) struct HeldSender<'a, E> {
    pub(super) engine: &'a mut E,
    pub(super) queue: usize,
    pub(super) slot: u32,
    pub(super) waker: &'a Waker,
    pub(super) marks: &'a mut Marks,
}

impl<E: HoldOps> OpSender for HeldSender<'_, E> {
    fn send_to(
        &mut self,
        layer: usize,
        kind: OpKind,
        offset: u64,
        buffers: Buffers,
    ) -> Result<(), (Step, Buffers)> {
        assert!(layer == 0 || kind == OpKind::Read, "a backing image is written");
        if !self.engine.has_room(self.queue) {
            return Err((Step::Busy, buffers));
        }
        let (queue, slot) = (self.queue, self.slot);
        self.engine.hold(HeldOp { queue, slot, layer, kind, offset, buffers });
        Ok(())
    }

    fn waker(&self) -> &Waker {
        self.waker
    }

    fn marks(&mut self) -> &mut Marks {
        self.marks
    }

    fn pause_layer(&mut self, _layer: usize) {}
}

impl<E: HoldOps> TableOpSender for HeldSender<'_, E> {
    fn set_slot(&mut self, slot: u32) {
        self.slot = slot;
    }
}

impl HeldOp {
    /// Returns the number of bytes of its buffers.
    pub(super) fn bytes(&self) -> usize {
        match &self.buffers {
            Buffers::Guest(iov) => iov.len() as usize,
            Buffers::Owned(buffer) => buffer.window().len(),
            Buffers::None => 0,
        }
    }

    /// Returns the contents of its buffers.
    pub(super) fn contents(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.bytes()];
        match &self.buffers {
            Buffers::Guest(iov) => drop(iov.read(0, &mut bytes)),
            Buffers::Owned(buffer) => bytes.copy_from_slice(&buffer[buffer.window()]),
            Buffers::None => {}
        }
        bytes
    }

    /// Puts bytes into the beginning of its buffers.
    pub(super) fn put(&mut self, bytes: &[u8]) {
        match &mut self.buffers {
            Buffers::Guest(iov) => drop(iov.write(0, bytes, &mut Marks::off())),
            Buffers::Owned(buffer) => {
                let start = buffer.window().start;
                buffer[start..start + bytes.len()].copy_from_slice(bytes);
            }
            Buffers::None => {}
        }
    }

    /// Returns its queue and its completion.
    pub(super) fn complete(self, result: Result<u32, Errno>) -> (usize, Completion) {
        let token = Token { source: self.queue as u32, slot: self.slot };
        (self.queue, Completion { token, result, buffers: self.buffers })
    }
}
