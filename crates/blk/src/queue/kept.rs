//! Requests that have failed, and are kept because the device stops on their errors.
//!
//! A kept request has left the disk and the engine. Its slot has everything that it needs to start again:
//! the device's resume starts it from its beginning. The driver does not learn of the failure. A request that
//! is done in part is done again, which has the same effect as on a disk that was slow.
//!
//! # The end of a wait
//! Kept requests wait without end, unless a caller waits for them:
//! - **A queue that stops and has an in-flight buffer** leaves them there. The next queue of this ring, here
//!   or in another process, takes them from the buffer. While memory is logged, a migration may be under way,
//!   and the buffer does not follow to the other host. Then they are not left.
//! - **Any other queue that stops, and one whose memory is taken away**, gives them [`KEPT_NS`]. Then each
//!   starts one last time, and its error is reported.

use super::Queue;
use kickless_device::Context;
use kickless_disk as disk;
use tracing::info;

/// The time that kept requests get when a caller waits for them. It is enough for a program that reacts to
/// the event, and less than the ten seconds that a removal waits by default.
const KEPT_NS: u64 = 2_000_000_000;

impl Queue {
    /// Copies what the request in a slot needs to start again.
    #[cold]
    pub(super) fn keep_copy(&mut self, slot: u32, wanted: disk::Request) {
        let resumes = self.shared.on_error.resumes();
        self.slots.get(slot).keep(wanted, resumes, self.vring.memory().1);
    }

    /// Keeps a failed request, if the device stops on its error. Returns whether it does.
    #[cold]
    pub(super) fn keep_failed(&mut self, slot: u32, error: disk::IoError) -> bool {
        let (shared, entry) = (&self.shared, self.slots.get(slot));
        let Some(kept) = entry.kept.as_deref().filter(|kept| !kept.is_last) else { return false };
        let is_remote = self.disk.file().is_none();
        if !crate::on_error::can_be_mended(error, entry.operation, is_remote) {
            return false;
        }
        if self.kept.is_empty() {
            (self.kept_until, self.limits_seen) = (None, shared.on_error.limits());
        }
        shared.on_error.keep(&shared.halt, self.vring.span(), kept.resumes, (entry.operation, error));
        self.kept.push(slot);
        true
    }

    /// Starts kept requests again or gives them up, if it is time for that.
    #[cold]
    pub(super) fn continue_kept(&mut self, context: &mut Context<'_>) {
        let is_broken = self.vring.is_broken();
        let is_logged = self.vring.memory().1.is_on();
        if self.waits_limited && self.vring.has_inflight_buffer() && !is_logged && !is_broken {
            return self.leave_kept();
        }
        let (resumes, limits) = (self.shared.on_error.resumes(), self.shared.on_error.limits());
        let is_limited = self.waits_limited || limits != self.limits_seen;
        let now_ns = context.now_ns;
        let is_last = is_limited
            && (is_broken || now_ns >= *self.kept_until.get_or_insert(now_ns.saturating_add(KEPT_NS)));
        if is_last {
            (self.kept_until, self.limits_seen) = (None, limits);
        }
        for slot in std::mem::take(&mut self.kept) {
            if is_last || self.slots.get(slot).kept.as_ref().is_some_and(|kept| kept.resumes != resumes) {
                self.start_kept(context, slot, resumes, is_last);
            } else {
                self.kept.push(slot);
            }
        }
    }

    fn start_kept(&mut self, context: &mut Context<'_>, slot: u32, resumes: u64, is_last: bool) {
        self.shared.on_error.release(&self.shared.halt);
        let marks = self.vring.memory().1;
        let Some(wanted) = self.slots.get(slot).restore(resumes, is_last, marks) else { return };
        let step = self.on_disk(context, slot, |disk, io_context, io| disk.start(io_context, io, wanted));
        self.handle_next_step(slot, step);
    }

    /// Leaves kept requests in the in-flight buffer, for the next queue of this ring.
    fn leave_kept(&mut self) {
        let requests = self.kept.len();
        for slot in std::mem::take(&mut self.kept) {
            self.shared.on_error.release(&self.shared.halt);
            self.meter.left(slot);
            let (view, marks) = self.vring.memory();
            let entry = self.slots.get(slot);
            entry.unpin_unless((view, marks));
            let reserved = entry.has_reservation();
            self.slots.release(slot, reserved);
        }
        info!(parent: self.vring.span(), queue = self.vring.index(), requests, "failed requests are left in the in-flight buffer; the next start of this queue tries them again");
    }
}
