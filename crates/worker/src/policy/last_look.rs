//! The look at an empty queue before it is armed, for `never`.
//!
//! A driver that polls turns the answers to a batch into requests within a microsecond. A worker that sleeps
//! meanwhile needs a kick and a sleep for each batch. So it looks for as long as it has worked, and does not
//! look again before it has worked again. Looking then never takes more time than work, whatever the load.
//! A driver's requests come in this time if it needs up to twice as long for them as the worker.

use super::{Nanos, Verdict};

/// The time that may be spent on looking, and the use of the time since the last decision.
#[derive(Debug, Default)]
pub(super) struct LastLook {
    left: Nanos,
    used: Use,
    since: Nanos,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Use {
    Work,
    Look,
    #[default]
    Sleep,
}

impl LastLook {
    pub(super) fn found(&mut self, now: Nanos) {
        self.account(now, Use::Work);
    }

    /// Decides about an empty queue. `sleep` is the cost of a sleep: a longer look cannot save anything.
    pub(super) fn empty(&mut self, now: Nanos, sleep: Nanos) -> Verdict {
        self.account(now, Use::Look);
        self.left = self.left.min(sleep);
        if self.left > 0 {
            return Verdict::Spin { until: now.saturating_add(self.left) };
        }
        self.used = Use::Sleep;
        Verdict::Arm
    }

    fn account(&mut self, now: Nanos, next: Use) {
        let passed = now.saturating_sub(std::mem::replace(&mut self.since, now));
        self.left = match std::mem::replace(&mut self.used, next) {
            Use::Work => self.left.saturating_add(passed),
            Use::Look => self.left.saturating_sub(passed),
            Use::Sleep => self.left,
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
        look.found(20_000);
        look.found(20_100);
        assert_eq!(look.empty(20_300, 5_000), Verdict::Spin { until: 20_600 });
        // Work comes after half of the look, and the rest is kept.
        look.found(20_450);
        assert_eq!(look.empty(20_500, 5_000), Verdict::Spin { until: 20_700 });
        assert_eq!(look.empty(20_701, 5_000), Verdict::Arm);
        assert_eq!(look.empty(30_000, 5_000), Verdict::Arm);
        look.found(40_000);
        assert_eq!(look.empty(90_000, 5_000), Verdict::Spin { until: 95_000 });
    }
}
