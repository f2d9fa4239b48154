//! Requests to the kernel to cancel its operations.
//!
//! They go through the ring, as operations do. A system call that cancels (`IORING_REGISTER_SYNC_CANCEL`)
//! would wait for the ring's lock and for the end of the operations.
//!
//! The kernel takes submissions in order. A request finds the operation that had its slot when the request
//! was staged, and no later one. A request that waits here is staged only if its slot has a cancelled
//! operation then.

use crate::operations::slots::Slots;
use io_uring::{opcode, squeue};

/// The most requests in the ring. The completion ring has room for them beside all operations.
pub(super) const CANCELS_MAX: u32 = 16;

/// Distinguishes a request from the operation that it cancels: the kernel knows both by the operation's slot.
/// No slot is so large.
const CANCEL: u32 = 1 << 31;

/// Requests that wait, and those in the ring.
#[derive(Debug, Default)]
pub(super) struct Cancels {
    /// Slots of operations to cancel.
    waiting: Vec<u32>,
    /// Requests that are staged, or with the kernel.
    in_ring: u32,
}

impl Cancels {
    /// Returns whether requests wait, and the ring has room for one.
    #[inline]
    pub(super) fn can_stage(&self) -> bool {
        !self.waiting.is_empty() && self.in_ring < CANCELS_MAX
    }

    /// Starts requests for all cancelled operations.
    pub(super) fn request_all(&mut self, slots: &Slots) {
        // Threads or AIO may have some of them. The kernel finds nothing to cancel for these.
        self.waiting = slots.cancelled();
    }

    /// Returns the value to stage for the next request.
    #[inline]
    pub(super) fn next(&mut self, slots: &Slots) -> Option<u32> {
        while self.can_stage() {
            let op_slot = self.waiting.pop()?;
            if slots.is_cancelled(op_slot) {
                self.in_ring += 1;
                return Some(op_slot | CANCEL);
            }
        }
        None
    }

    /// Returns whether the kernel has completed a request as `op_slot`, and counts it.
    #[inline]
    pub(super) fn completes(&mut self, op_slot: u32) -> bool {
        let is_request = op_slot & CANCEL != 0;
        if is_request {
            self.in_ring -= 1;
        }
        is_request
    }
}

/// Returns the ring entry of the request that is staged as `op_slot`. `None` if it is no request.
#[cold]
pub(super) fn entry(op_slot: u32) -> Option<squeue::Entry> {
    let entry = || opcode::AsyncCancel::new(u64::from(op_slot & !CANCEL)).build();
    (op_slot & CANCEL != 0).then(|| entry().user_data(u64::from(op_slot)))
}
