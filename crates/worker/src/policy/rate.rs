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

    /// Counts a visit that found requests. Returns whether to poll from now on.
    pub(super) fn found(&mut self, now: Nanos) -> bool {
        if now / TICK != self.tick {
            (self.tick, self.visits) = (now / TICK, 0);
        }
        (self.last, self.visits) = (now, self.visits.saturating_add(1));
        self.start > 0 && self.visits >= self.start
    }

    pub(super) fn empty(&mut self, now: Nanos, polled: bool) -> Verdict {
        let until = self.last.saturating_add(self.stop_idle);
        if polled && now < until {
            return Verdict::Spin { until };
        }
        if polled {
            self.visits = 0;
        }
        Verdict::Arm
    }
}
