//! Visits while the worker watches for stalls.

use crate::clock::Nanos;
use crate::event_loop::EventLoop;
use crate::scheduler::Visit;
use crate::stall::STALL;
use tracing::info;

impl EventLoop {
    /// Does the same as [`EventLoop::visit_now`], and finds out whether the kernel blocked the worker.
    #[cold]
    pub(crate) fn visit_watched(&mut self, number: u32, budget: u32, now: Nanos) -> Visit {
        // Operations of other queues do not count here. A failure occurs again in the next submission.
        if self.engine.needs_turn() {
            let _ = self.engine.submit();
            self.stalls.last_visit = None;
        }
        // A visit reads the clock once, if nothing but a visit was before it in this round. Many find an
        // empty ring, which takes no longer than that.
        let began = self.stalls.last_visit.unwrap_or_else(|| self.clock.now());
        self.stalls.sample(began, || self.host_probe.not_blocked());
        let visit = self.visit_now(number, budget, now);
        if self.engine.needs_turn() {
            let _ = self.engine.submit();
        }
        let ended = self.clock.now();
        self.stalls.last_visit = Some(ended);
        let blocked = self.stalls.blocked(ended.saturating_sub(began), || self.host_probe.not_blocked());
        if blocked >= STALL
            && let Some(entry) = self.entries[number as usize].as_mut()
        {
            self.stalls.start(ended, blocked);
            let vring = entry.task.vring();
            vring.counters().stalls.add(1);
            info!(
                parent: vring.span(),
                queue = vring.index(),
                ms = blocked / 1_000_000,
                "the kernel blocked the worker in a visit of this queue, and its other devices waited too: the guest's memory is \
                 swapped, the front-end punches holes into it, the file system of the disk is slow, or the host is overloaded"
            );
        }
        visit
    }
}
