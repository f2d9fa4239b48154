//! The rule by which the worker waits for a call of `io_submit` that a thread makes for it. Pure.
//!
//! # Why it waits at all
//! A thread makes a call that could wait for a frozen file system ([`crate::files::route`]). Nearly always
//! the call does not wait. A worker that goes on meanwhile gains little then: each completion of the batch
//! wakes it and interrupts the thread that still submits, often on the same processor. Batches become small,
//! and a request costs several switches. A worker that polls keeps the processor from the thread. So the
//! worker sleeps until the batches are submitted. It would be busy for that time if it made the calls itself.
//! Afterwards it finds the completions of the whole batch.
//!
//! # Why a call that waits delays no other device
//! - The worker waits for at most [`SUBMIT_WAIT_MAX`], and only for calls that it has just handed out.
//! - While an earlier call has not come back, it waits for none. So a frozen file system costs an engine one
//!   such wait, for any number of its disks, and then nothing until it is thawed.
//! - A device without tags makes each call late. After some late calls in a row the worker waits only in one
//!   of several cases, until calls are prompt ([`Backoff`]).

use crate::files::route::Backoff;
use std::time::Duration;

/// The longest wait for calls: a batch of 64 small transfers takes a third of this. The worker also sleeps
/// this long before it retries operations for which the kernel had no room.
pub(crate) const SUBMIT_WAIT_MAX: Duration = Duration::from_millis(1);

/// The calls that threads have, and how prompt they were recently.
#[derive(Debug, Default)]
pub(crate) struct SubmitWait {
    /// The number of calls that were not reaped.
    in_flight: usize,
    /// The number of these for which the worker has not decided whether it waits.
    new: usize,
    /// Waits that ended before the calls.
    late: Backoff,
}

impl SubmitWait {
    /// Notes that a thread makes another call.
    pub(crate) fn called(&mut self) {
        self.in_flight += 1;
        self.new += 1;
    }

    /// Notes that a call was reaped.
    pub(crate) fn returned(&mut self) {
        self.in_flight -= 1;
    }

    /// Returns the number of calls to wait for now, if any.
    pub(crate) fn awaited(&mut self) -> Option<usize> {
        let new = std::mem::take(&mut self.new);
        (new > 0 && new == self.in_flight && self.late.should_try()).then_some(new)
    }

    /// Notes whether the awaited calls were done in time.
    pub(crate) fn waited(&mut self, prompt: bool) {
        if prompt {
            self.late.succeeded();
        } else {
            self.late.failed();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_wait_beside_a_call_that_hangs() {
        let mut wait = SubmitWait::default();
        assert_eq!(wait.awaited(), None);
        (0..3).for_each(|_| wait.called());
        assert_eq!(wait.awaited(), Some(3));
        wait.waited(false);
        wait.returned();
        wait.returned();
        for _ in 0..1000 {
            wait.called();
            assert_eq!(wait.awaited(), None, "beside a call that hangs");
            wait.returned();
        }
        wait.returned();
        let waits = |wait: &mut SubmitWait, prompt: bool| {
            wait.called();
            let waits = wait.awaited().inspect(|_| wait.waited(prompt)).is_some();
            wait.returned();
            waits
        };
        assert_eq!((0..7 + 160).filter(|_| waits(&mut wait, false)).count(), 7 + 10);
        assert_eq!((0..16).filter(|_| waits(&mut wait, true)).count(), 1);
        assert_eq!((0..16).filter(|_| waits(&mut wait, true)).count(), 16);
    }
}
