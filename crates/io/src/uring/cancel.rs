//! Requests to the kernel to cancel operations that it has.
//!
//! They go through the ring, as operations do. A system call that cancels would wait for the ring's lock. A
//! thread that submits can hold that for long: the kernel's (`IORING_SETUP_SQPOLL`), or ours
//! ([`crate::submit_thread`]).
//!
//! The kernel takes submissions in order. A request finds the operation that was at its place when the request
//! was staged, and none that gets the place later. A request that waits here is staged only if a cancelled
//! operation is at its place then.

use crate::operations::slots::Slots;
use io_uring::{opcode, squeue};

/// Requests that the ring has at a time. The completion ring has room for them beside all operations.
pub(super) const CANCELS_MAX: u32 = 16;

/// Distinguishes a request from the operation that it is to cancel: the kernel knows both by the operation's
/// place. No place is so large.
const CANCEL: u32 = 1 << 31;

/// Requests that wait, and those in the ring.
#[derive(Debug, Default)]
pub(super) struct Cancels {
    /// Places of operations that are to be cancelled.
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

    /// Has the kernel asked to cancel all cancelled operations.
    pub(super) fn ask_for_all(&mut self, slots: &Slots) {
        // Some of them may be with threads or AIO. The kernel finds nothing to cancel for these.
        self.waiting = slots.cancelled();
    }

    /// Returns what to stage for the next request.
    #[inline]
    pub(super) fn next(&mut self, slots: &Slots) -> Option<u32> {
        while self.can_stage() {
            let place = self.waiting.pop()?;
            if slots.is_cancelled(place) {
                self.in_ring += 1;
                return Some(place | CANCEL);
            }
        }
        None
    }

    /// Returns whether it is a request that the kernel has completed as `place`, and notes that.
    #[inline]
    pub(super) fn completes(&mut self, place: u32) -> bool {
        let is_request = place & CANCEL != 0;
        if is_request {
            self.in_ring -= 1;
        }
        is_request
    }
}

/// Returns what the ring is told about the request that is staged as `place`; `None`: it is none.
#[cold]
pub(super) fn entry(place: u32) -> Option<squeue::Entry> {
    let entry = || opcode::AsyncCancel::new(u64::from(place & !CANCEL)).build();
    (place & CANCEL != 0).then(|| entry().user_data(u64::from(place)))
}
