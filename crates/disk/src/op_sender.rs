//! Sends the operations of a request to the engine of its worker.

use crate::Step;
use kickless_io::{Buffers, OpKind, Waker};
use kickless_memory::Marks;

/// The result of sending an operation. If it cannot be sent now ([`Step::Busy`]) or ever, the buffers come
/// back.
pub(crate) type Sent = Result<(), (Step, Buffers)>;

/// Sends a request's operations, either straight to an engine or through injected faults.
///
/// The choice is made at compile time, so disks without faults pay nothing for them.
pub(crate) trait OpSender {
    /// Sends an operation.
    ///
    /// # Errors
    /// It cannot be sent now ([`Step::Busy`]) or ever. The buffers come back.
    #[inline]
    fn send(&mut self, kind: OpKind, offset: u64, buffers: Buffers) -> Sent {
        self.send_to(0, kind, offset, buffers)
    }

    /// Sends an operation to the file of a layer. Layer 0 is the disk's own file.
    ///
    /// # Errors
    /// As [`OpSender::send`].
    fn send_to(&mut self, layer: usize, kind: OpKind, offset: u64, buffers: Buffers) -> Sent;

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
