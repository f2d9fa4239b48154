//! Finds the queue whose visit blocks the worker in the kernel.
//!
//! A visit does bounded work and waits for nothing. But each access to guest memory can need a page from the
//! kernel, and the kernel can be slow: it swaps, or the front-end punches a hole at that place, and the
//! access waits for the end of that. A file system can block a submission. All tasks of the worker wait too,
//! and the worker cannot know it before.
//!
//! It can find out whose visit it was. To time each visit would cost every request. So the worker watches in
//! two steps:
//!
//! 1. The length of a turn is known anyway. A turn that is longer than [`STALL`] starts a watch.
//! 2. For the time of [`WATCH`], each visit is timed. What it queued is submitted at once and by itself,
//!    because the kernel uses guest memory in this call too. If the thread was blocked for [`STALL`], the
//!    visit counts as a stall of its queue, the log names its device, and the watch goes on.
//!
//! So the first of several stalls has no name. A thread that had no core was not blocked. The kernel is asked
//! for the time that it had one only every [`SAMPLE`], because that costs more than a visit.
//!
//! The queue stays on its worker. A worker of its own would be a thread beyond the number that the operator
//! chose, for each guest that swaps, and would take processor time from the others. A process of its own,
//! which `docs/memory.md` advises, has limits for that.

use crate::clock::Nanos;
use tracing::debug;

/// The shortest wait that counts as a stall: longer than any visit takes, and as long as another device may
/// at most wait because of this one.
pub(crate) const STALL: Nanos = 50_000_000;
/// The time for which visits are timed after a stall.
const WATCH: Nanos = 10_000_000_000;

/// The time between two samples of the thread's time: a fifth of the shortest stall, which can seem shorter
/// by this.
const SAMPLE: Nanos = STALL / 5;

/// The state of the watch.
#[derive(Debug, Default)]
pub(crate) struct StallWatch {
    /// Visits are timed until then.
    until: Nanos,
    /// The last sample: the time, and that in which the thread was not blocked.
    sample: (Nanos, Nanos),
    /// The end of the last visit of this round that was timed, if nothing was done since.
    pub(crate) last_visit: Option<Nanos>,
}

impl StallWatch {
    /// Returns whether visits are timed now.
    #[inline(always)]
    pub(crate) fn is_on(&self, now: Nanos) -> bool {
        now < self.until
    }

    /// Starts the watch if a turn took as long as a stall.
    #[inline(always)]
    pub(crate) fn note_turn(&mut self, now: Nanos, took: Nanos) {
        if took >= STALL {
            self.start(now, took);
        }
    }

    /// Takes a sample before a visit, if one is due. `not_blocked` returns the time in which the thread was
    /// not blocked.
    pub(crate) fn sample(&mut self, now: Nanos, not_blocked: impl FnOnce() -> Nanos) {
        if now.saturating_sub(self.sample.0) >= SAMPLE {
            self.sample = (now, not_blocked());
        }
    }

    /// Returns the time for which a visit of this duration was blocked at least.
    pub(crate) fn blocked(&self, took: Nanos, not_blocked: impl FnOnce() -> Nanos) -> Nanos {
        if took < STALL { 0 } else { blocked(took, self.sample.1, not_blocked()) }
    }

    /// Starts the watch, or goes on with it, after a stall that took so long.
    #[cold]
    pub(crate) fn start(&mut self, now: Nanos, took: Nanos) {
        if !self.is_on(now) {
            debug!(ms = took / 1_000_000, "a turn took long; the visits of this worker are timed");
        }
        self.until = now.saturating_add(WATCH);
    }
}

/// Returns the time in which the thread was blocked, of `took` altogether. The other times are those in which
/// it ran or waited for a core, before and after.
fn blocked(took: Nanos, before: Nanos, after: Nanos) -> Nanos {
    took.saturating_sub(after.saturating_sub(before))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_blocked_thread_stalls() {
        assert_eq!(blocked(STALL, 7, 7), STALL);
        assert_eq!(blocked(STALL, 7, 7 + STALL), 0, "it had no core, or worked");
        assert_eq!(blocked(STALL, 7, 8 + STALL), 0);
    }

    #[test]
    fn samples_are_few_and_before_a_visit() {
        let mut watch = StallWatch::default();
        watch.sample(SAMPLE, || 7);
        watch.sample(2 * SAMPLE - 1, || unreachable!("too early"));
        assert_eq!(watch.blocked(STALL - 1, || unreachable!("no stall")), 0);
        assert_eq!(watch.blocked(STALL + 9, || 16), STALL, "it ran for 9");
        watch.sample(2 * SAMPLE, || 16);
        assert_eq!(watch.blocked(STALL + 9, || 16), STALL + 9);
    }

    #[test]
    fn a_watch_ends() {
        let watch = StallWatch { until: 10, ..StallWatch::default() };
        assert!(watch.is_on(9) && !watch.is_on(10) && !StallWatch::default().is_on(0));
    }
}
