//! Requests that have failed, and are kept because the device stops on their errors.
//!
//! A kept request has left the disk and the engine. Its slot has everything that it needs to start again:
//! the device's resume starts it from its beginning. The driver does not learn of the failure. A request that
//! is done in part is done again, which has the same effect as on a disk that was slow.
//!
//! # The end of a wait
//! Kept requests wait without end, unless a caller waits for them:
//! - **A queue that stops may leave them** in its ring's in-flight buffer ([`super::leave`]). The next queue
//!   of this ring takes them from there. After the end of a connection its front-end keeps the buffer, unless
//!   memory is logged: then a migration may be under way, whose destination gets a new buffer.
//! - **Any other queue that stops, and one whose memory is taken away**, gives them [`KEPT_NS`]. Then each
//!   starts one last time, and its error is reported. Queues of a device stop one after another, and the time
//!   is for all of them together.
//!
//! A queue that moves to another worker or is parked takes them along, and they go on waiting.

use super::Queue;
use kickless_device::{Context, Leave};
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
        let is_remote = self.is_remote();
        let (shared, entry) = (&self.shared, self.slots.get(slot));
        let Some(kept) = entry.kept.as_deref().filter(|kept| !kept.is_last) else { return false };
        if !crate::on_error::can_be_mended(error, entry.operation, is_remote) {
            return false;
        }
        if self.kept.slots.is_empty() {
            (self.kept.until, self.kept.limits_seen) = (None, shared.on_error.limits());
        }
        shared.on_error.keep(&shared.halt, self.vring.span(), kept.resumes, (entry.operation, error));
        self.kept.slots.push(slot);
        true
    }

    /// Starts kept requests again or gives them up, if it is time for that.
    #[cold]
    pub(super) fn continue_kept(&mut self, context: &mut Context<'_>) {
        let is_broken = self.vring.is_broken();
        if self.leaves_kept() {
            self.leave_kept();
        }
        if self.kept.slots.is_empty() {
            return;
        }
        let on_error = &self.shared.on_error;
        let (resumes, limits, now_ns) = (on_error.resumes(), on_error.limits(), context.now_ns);
        let until = now_ns.saturating_add(KEPT_NS);
        let is_last = match (self.stop.leave, limits != self.kept.limits_seen) {
            (Some(_), _) => is_broken || now_ns >= on_error.stop_deadline(until),
            (None, true) => is_broken || now_ns >= *self.kept.until.get_or_insert(until),
            (None, false) => false,
        };
        if is_last {
            (self.kept.until, self.kept.limits_seen) = (None, limits);
        }
        for slot in std::mem::take(&mut self.kept.slots) {
            if is_last || self.slots.get(slot).kept.as_ref().is_some_and(|kept| kept.resumes != resumes) {
                self.start_kept(context, slot, resumes, is_last);
            } else {
                self.kept.slots.push(slot);
            }
        }
    }

    fn start_kept(&mut self, context: &mut Context<'_>, slot: u32, resumes: u64, is_last: bool) {
        self.shared.on_error.release(&self.shared.halt);
        let marks = self.vring.memory().1;
        let Some(wanted) = self.slots.get(slot).restore(resumes, is_last, marks) else { return };
        let step = self.on_disk(context, slot, |disk, io_context, io| disk.start(io_context, io, wanted));
        self.take_step(slot, step);
    }

    /// Returns whether the queue stops, and its kept requests can wait in the in-flight buffer.
    fn leaves_kept(&mut self) -> bool {
        match self.stop.leave {
            None | Some(Leave::Nothing) => false,
            Some(Leave::Unfinished) => self.leaves_unfinished(),
            Some(Leave::Failed) => {
                let is_logged = self.vring.memory().1.is_on();
                self.vring.has_inflight_buffer() && !self.vring.is_broken() && !is_logged
            }
        }
    }

    /// Leaves kept requests in the in-flight buffer, for the next queue of this ring.
    fn leave_kept(&mut self) {
        let (answered, left): (Vec<u32>, Vec<u32>) =
            std::mem::take(&mut self.kept.slots).into_iter().partition(|slot| self.must_answer(*slot));
        self.kept.slots = answered;
        let requests = left.len();
        for slot in left {
            self.shared.on_error.release(&self.shared.halt);
            self.leave(slot);
        }
        if requests > 0 {
            info!(parent: self.vring.span(), queue = self.vring.index(), requests, "failed requests are left in the in-flight buffer; the next start of this queue tries them again");
        }
    }
}
