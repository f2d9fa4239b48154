//! The rule of the kernel's vhost polling patches (Ladelsky, 2014): poll from a rate of work on, until there
//! has been none for a while.

use super::{Nanos, Verdict};

/// The unit of time in which work is counted: a tick of the kernel's clock at 100 Hz.
const TICK: Nanos = 10_000_000;
const TICKS_PER_SEC: u32 = 100;

#[derive(Debug, Default)]
pub(super) struct Rate {
    /// The number of visits with work in one tick at which polling starts. 0: never.
    start: u32,
    stop_idle: Nanos,
    tick: u64,
    /// Visits with work in that tick.
    visits: u32,
    /// The time at which requests were last found.
    last: Nanos,
}

impl Rate {
    pub(super) fn set(&mut self, start_per_sec: u32, stop_idle: Nanos) {
        self.start = start_per_sec.div_ceil(TICKS_PER_SEC);
        self.stop_idle = stop_idle;
    }

    /// Counts a visit that found requests. Returns whether polling starts.
    pub(super) fn found(&mut self, now: Nanos, polled: bool) -> bool {
        self.last = now;
        if polled {
            return false;
        }
        let tick = now / TICK;
        if tick != self.tick {
            (self.tick, self.visits) = (tick, 0);
        }
        self.visits = self.visits.saturating_add(1);
        let starts = self.start > 0 && self.visits >= self.start;
        if starts {
            self.visits = 0;
        }
        starts
    }

    pub(super) fn empty(&self, now: Nanos, polled: bool) -> Verdict {
        let until = self.last.saturating_add(self.stop_idle);
        if polled && now < until { Verdict::Spin { until } } else { Verdict::Arm }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_at_the_rate_and_within_one_tick_only() {
        let mut rate = Rate::default();
        rate.set(301, 50);
        assert!(!rate.found(TICK - 3, false));
        assert!(!rate.found(TICK - 2, false));
        assert!(!rate.found(TICK - 1, false));
        assert!(!rate.found(TICK, false), "another tick counts anew");
        assert!(!rate.found(TICK + 1, false));
        assert!(!rate.found(TICK + 2, false));
        assert!(rate.found(TICK + 3, false), "rounded up: 4 in a tick");
    }

    #[test]
    fn one_is_enough_for_the_smallest_rate_and_zero_never_starts() {
        let mut rate = Rate::default();
        rate.set(1, 50);
        assert!(rate.found(0, false));
        rate.set(0, 50);
        assert!((0..1000).all(|now| !rate.found(now, false)));
    }

    #[test]
    fn stops_when_idle_for_long_enough() {
        let mut rate = Rate::default();
        rate.set(1, 50);
        rate.found(100, false);
        assert_eq!(rate.empty(149, true), Verdict::Spin { until: 150 });
        assert_eq!(rate.empty(150, true), Verdict::Arm);
        assert_eq!(rate.empty(101, false), Verdict::Arm);
    }
}
