//! The times at which requests are due: an even rate, and periods without load.

use std::ops::Range;
use std::time::Duration;

use serde::Serialize;

/// Serializes a duration as seconds.
pub(super) fn as_seconds<S: serde::Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(time.as_secs_f64())
}

/// A load that alternates between on and off.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct OnOff {
    #[serde(serialize_with = "as_seconds")]
    pub(crate) on: Duration,
    #[serde(serialize_with = "as_seconds")]
    pub(crate) off: Duration,
}

/// The periods of an [`OnOff`], in nanoseconds since the start of the turn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cycle {
    on: u64,
    period: u64,
    /// The position in the period at time 0.
    phase: u64,
}

impl Cycle {
    /// Makes a cycle that turns on at `start`, and at whole periods before and after it.
    pub(crate) fn new(times: OnOff, start: u64) -> Cycle {
        let on = times.on.as_nanos() as u64;
        let period = on + times.off.as_nanos() as u64;
        Cycle { on, period, phase: (period - start % period) % period }
    }

    /// Returns the time from which the load is on: `now`, or the start of the next period.
    pub(crate) fn on_from(&self, now: u64) -> u64 {
        let into = (now + self.phase) % self.period;
        if into < self.on { now } else { now + self.period - into }
    }

    /// Returns the time at which the load has been on for `on` nanoseconds in all since time 0.
    fn time_after(&self, on: u64) -> u64 {
        let on = on + self.phase.min(self.on);
        on / self.on * self.period + on % self.on - self.phase
    }
}

/// Requests at an even rate, while the load is on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Schedule {
    /// The time of the first request, in nanoseconds during which the load is on.
    first: f64,
    /// The time between two requests, in nanoseconds during which the load is on.
    step: f64,
    /// The number of the next request.
    next: u64,
    cycle: Option<Cycle>,
}

impl Schedule {
    /// Makes the schedule of one thread. All `threads` threads together make `rate` requests a second.
    pub(crate) fn new(rate: u32, thread: u64, threads: u64, cycle: Option<Cycle>) -> Schedule {
        let step = 1e9 / f64::from(rate);
        Schedule { first: step * thread as f64, step: step * threads as f64, next: 0, cycle }
    }

    /// Returns the time at which the next request is due, in nanoseconds since the start of the turn.
    pub(crate) fn due(&self) -> u64 {
        self.due_of(self.next)
    }

    /// Returns the time at which the request is due that comes `by` requests after the next one.
    pub(crate) fn due_later(&self, by: u64) -> u64 {
        self.due_of(self.next + by)
    }

    /// Returns the time at which the request `number` is due.
    pub(crate) fn due_of(&self, number: u64) -> u64 {
        // A multiplication, because rounding errors of a sum would add up.
        let on = (self.first + self.step * number as f64) as u64;
        self.cycle.map_or(on, |cycle| cycle.time_after(on))
    }

    /// Returns the numbers of the requests that are due in `from..to` and that were not made.
    pub(crate) fn unsent(&self, from: u64, to: u64) -> Range<u64> {
        let end = self.number_at(to);
        self.next.max(self.number_at(from)).min(end)..end
    }

    /// Returns the number of the first request that is due at `time` or later.
    fn number_at(&self, time: u64) -> u64 {
        // The load is on for at most `time`, so no more requests than this are due.
        let (mut low, mut high) = (0, (time as f64 / self.step) as u64 + 1);
        while low < high {
            let middle = u64::midpoint(low, high);
            if self.due_of(middle) < time { low = middle + 1 } else { high = middle }
        }
        low
    }

    /// Moves on to the next request.
    pub(crate) fn advance(&mut self) {
        self.next += 1;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn cycle(on: u64, off: u64, start: u64) -> Cycle {
        Cycle::new(OnOff { on: Duration::from_nanos(on), off: Duration::from_nanos(off) }, start)
    }

    #[test]
    fn on_and_off() {
        let cycle = cycle(100, 900, 250);
        for (now, from) in
            [(0, 250), (249, 250), (250, 250), (349, 349), (350, 1250), (1249, 1250), (1300, 1300)]
        {
            assert_eq!(cycle.on_from(now), from, "at {now}");
        }
    }

    #[test]
    fn an_even_rate() {
        let mut schedule = Schedule::new(1_000_000, 1, 2, None);
        let due: Vec<u64> = (0..3)
            .map(|_| {
                let due = schedule.due();
                schedule.advance();
                due
            })
            .collect();
        assert_eq!(due, [1000, 3000, 5000]);
        assert_eq!((schedule.unsent(0, 7001), schedule.unsent(7001, 11_000)), (3..4, 4..5));
        assert!(schedule.unsent(0, 5000).is_empty() && schedule.unsent(20_000, 19_000).is_empty());
        let paused = Schedule::new(1_000_000, 0, 1, Some(cycle(2000, 8000, 0)));
        assert_eq!((paused.due_of(2), paused.unsent(2000, 20_000)), (10_000, 2..4));
    }

    proptest! {
        #[test]
        fn requests_are_due_only_while_the_load_is_on(
            on in 1u64..1_000_000, off in 0u64..1_000_000, start in 0u64..3_000_000, rate in 1000u32..10_000_000,
        ) {
            let cycle = cycle(on, off, start);
            let mut schedule = Schedule::new(rate, 0, 1, Some(cycle));
            let mut last = 0;
            for _ in 0..100 {
                let due = schedule.due();
                schedule.advance();
                prop_assert_eq!(cycle.on_from(due), due);
                prop_assert!(due >= last);
                last = due;
            }
        }
    }
}
