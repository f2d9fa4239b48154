//! Requests that a stopping queue leaves in the in-flight buffer. The next queue of the ring does them, here
//! or on another host.
//!
//! # What it means
//! The next queue does a request that was left from its beginning. So once the stop is answered, nothing of
//! this queue may use guest memory, the ring or the disk for it. A read that comes late overwrites memory
//! that the guest uses for something else, because the memory stays mapped and a migration can be cancelled.
//! A write that comes late overwrites newer data: the next queue has done it, and then others to the same
//! sectors.
//!
//! # Which requests can be left
//! A queue can leave a request that the disk has given back, or has never got:
//! - **Failed requests that are kept** ([`super::kept`]).
//! - **Requests that were cancelled.** A queue waits [`CANCEL_NS`] for its requests, because a disk that
//!   works does most of them in this time. Then it cancels the others. The engine gives each back, as failed
//!   with `ECANCELED`, unless it has done it or has an operation of it in the kernel.
//! - **Requests to a remote server that did not answer in time**, if only the stop has limited this time.
//! - **Requests that wait for memory**, and those of an earlier process that this queue has not popped.
//!
//! # Which requests cannot
//! - **What the kernel has** is waited for. Nothing can take it back, not even the end of the process. The
//!   lock on the image is no replacement for the wait: it keeps out other processes of this host and of a
//!   cluster's file system, but not another host with the same block device. So a disk of this host that
//!   hangs delays the stop, until the kernel has given back what it has. Its other requests are left at once.
//!   The lock is held meanwhile, and the log says each second that the ring is waited for.
//! - **What a remote server has got** has no fence. The disk's modules say what they do before they give up a
//!   request. The same late write is possible after a kill, and after an error that the guest sees.
//! - **A flush of a remote disk** is answered. Only this process knows which writes a server has lost, and
//!   the flush of another process would succeed without them.
//!
//! Requests of an earlier process that wait for a translation of a vIOMMU are left by each stop. Without it
//! their status bytes cannot be written, and the front-end may send it only after the stop.
//!
//! # Which stops leave requests
//! [`Leave`] says it, and the transport decides. A front-end that has negotiated `GET_VRING_BASE_INFLIGHT`
//! gives the buffer to the destination of a migration, or keeps it in a saved machine. One that has not may
//! begin a new buffer there. The requests in the old one would never be answered.

use super::Queue;
use super::state::Cancel;
use crate::operation::Operation;
use kickless_device::{Context, Leave, QueueTask};
use kickless_disk::IoError;
use kickless_io::Errno;
use tracing::info;

/// The time that unfinished requests get before they are cancelled. It is a part of a migration's downtime
/// (QEMU aims at 300 ms in all), and enough for a disk that works.
const CANCEL_NS: u64 = 100_000_000;

impl Queue {
    /// Returns whether the queue leaves what it does not finish soon.
    #[inline]
    pub(super) fn leaves_unfinished(&self) -> bool {
        self.stop.leave == Some(Leave::Unfinished)
            && self.vring.has_inflight_buffer()
            && !self.vring.is_broken()
    }

    /// Returns the number of chains of an earlier process that this queue has to pop.
    #[inline]
    pub(super) fn resubmissions(&self) -> usize {
        if self.leaves_unfinished() { 0 } else { self.vring.resubmissions().into() }
    }

    /// Cancels the requests that are unfinished, once they had their time.
    #[cold]
    pub(super) fn cancel_unfinished(&mut self, context: &mut Context<'_>) {
        match self.stop.cancel {
            Cancel::Done => return,
            Cancel::No => return self.stop.cancel = Cancel::At(context.now_ns.saturating_add(CANCEL_NS)),
            Cancel::At(at) if context.now_ns < at => return,
            Cancel::At(_) => self.stop.cancel = Cancel::Done,
        }
        if let Some((slot, _)) = self.other_work.over_budget.take() {
            self.stop.left += 1;
            self.leave(slot);
        }
        let Self { disk, attached, slots, .. } = self;
        disk.cancel(context.engine, attached, slots.each_io());
    }

    /// Returns the time until unfinished requests are cancelled, if they will be.
    #[inline]
    pub(super) fn time_to_cancel(&self, context: &Context<'_>) -> Option<u64> {
        let Cancel::At(at) = self.stop.cancel else { return None };
        // Only the engine's operations are cancelled.
        let has_some = !self.is_remote() && self.in_flight() > 0;
        has_some.then(|| at.saturating_sub(context.now_ns))
    }

    /// Leaves a request with this error, if it was cancelled, or a server had too little time because the
    /// queue stops. Returns whether it does.
    pub(super) fn leave_failed(&mut self, slot: u32, error: IoError) -> bool {
        let can_leave = match error {
            IoError::Os(Errno::CANCELED) => self.stop.has_cancelled() && !self.is_remote(),
            IoError::Os(Errno::TIMEDOUT | Errno::NOLINK) => self.is_remote() && !self.must_answer(slot),
            _ => false,
        };
        if !can_leave || !self.leaves_unfinished() {
            return false;
        }
        self.stop.left += 1;
        self.leave(slot);
        true
    }

    /// Returns whether a request that the disk has given back must be answered by this process.
    pub(super) fn must_answer(&mut self, slot: u32) -> bool {
        self.is_remote() && self.slots.get(slot).operation == Operation::Flush
    }

    /// Returns whether the disk is served over a network, not through a file.
    pub(super) fn is_remote(&self) -> bool {
        self.disk.file().is_none()
    }

    /// Leaves a request that the disk has given back, and frees its slot.
    pub(super) fn leave(&mut self, slot: u32) {
        self.meter.left(slot);
        let (view, marks) = self.vring.memory();
        let entry = self.slots.get(slot);
        entry.unpin_unless((view, marks));
        let reserved = entry.has_reservation();
        self.slots.release(slot, reserved);
    }

    /// Logs the number of unfinished requests that were left.
    pub(super) fn log_left(&self) {
        if self.stop.left > 0 {
            info!(parent: self.vring.span(), queue = self.vring.index(), requests = self.stop.left, "unfinished requests are left in the in-flight buffer; the next start of this queue does them");
        }
    }
}
