//! The look at an empty queue before it is armed, for `never`.
//!
//! A driver that polls turns the answers to a batch into requests within a microsecond. A worker that sleeps
//! meanwhile needs a kick and a sleep for each batch. So it looks for as long as it has worked, and does not
//! look again before it has worked again. Looking then never takes more time than work, whatever the load.
//! A driver's requests come in this time if it needs up to twice as long for them as the worker.
//!
//! Work that takes longer is not the answer to a batch: it sends calls, and the driver has to wake first.

use super::{Nanos, Verdict};

/// The longest time that counts for a request. A polling driver with one request in flight sends the next one
/// 250 to 400 ns after the answer. A call takes some 5 us, and looking for as long took a quarter more
/// processor time at 1000 requests a second.
const REQUEST: Nanos = 500;

#[derive(Debug, Default)]
pub(super) struct LastLook {
    /// The time that may be spent on looking.
    left: Nanos,
    /// The time of the last decision, and the longest work that may have been done since then. `None`: the
    /// time was spent on looking or sleeping.
    since: Nanos,
    work_max: Option<Nanos>,
}

impl LastLook {
    pub(super) fn found(&mut self, now: Nanos, requests: u32) {
        self.account(now, Some(REQUEST * Nanos::from(requests)));
    }

    /// Decides about an empty queue. `sleep` is the cost of a sleep: a longer look cannot save anything.
    pub(super) fn empty(&mut self, now: Nanos, sleep: Nanos) -> Verdict {
        self.account(now, None);
        self.left = self.left.min(sleep);
        if self.left > 0 { Verdict::Spin { until: now.saturating_add(self.left) } } else { Verdict::Arm }
    }

    fn account(&mut self, now: Nanos, work_max: Option<Nanos>) {
        let passed = now.saturating_sub(std::mem::replace(&mut self.since, now));
        self.left = match std::mem::replace(&mut self.work_max, work_max) {
            Some(most) => self.left.saturating_add(passed.min(most)),
            None => self.left.saturating_sub(passed),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_as_long_as_it_has_worked_and_not_longer_than_a_sleep_costs() {
        let mut look = LastLook::default();
        assert_eq!(look.empty(0, 5_000), Verdict::Arm);
        look.found(20_000, 1);
        look.found(20_100, 1);
        assert_eq!(look.empty(20_300, 5_000), Verdict::Spin { until: 20_600 });
        // Work comes after half of the look, and the rest is kept.
        look.found(20_450, 1);
        assert_eq!(look.empty(20_500, 5_000), Verdict::Spin { until: 20_700 });
        assert_eq!(look.empty(20_701, 5_000), Verdict::Arm);
        assert_eq!(look.empty(30_000, 5_000), Verdict::Arm);
        look.found(40_000, 32);
        assert_eq!(look.empty(90_000, 5_000), Verdict::Spin { until: 95_000 });
        assert_eq!(look.empty(95_000, 5_000), Verdict::Arm);
        look.found(100_000, 1);
        assert_eq!(look.empty(106_000, 5_000), Verdict::Spin { until: 106_500 }, "it has sent a call");
    }
}
