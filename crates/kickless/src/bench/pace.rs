//! When requests are due: an even rate, and times when the load is off.

use std::time::Duration;

use serde::Serialize;

/// A load that is on for a while, then off for a while, over and over.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct OnOff {
    /// Seconds.
    #[serde(serialize_with = "super::scenario::as_seconds")]
    pub(crate) on: Duration,
    /// Seconds.
    #[serde(serialize_with = "super::scenario::as_seconds")]
    pub(crate) off: Duration,
}

/// The times of an [`OnOff`], all in nanoseconds of the run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cycle {
    on: u64,
    period: u64,
    /// How far the cycle is when the run begins.
    lead: u64,
}

impl Cycle {
    /// One that goes on at `start`, and at whole periods before and after.
    pub(crate) fn new(times: OnOff, start: u64) -> Cycle {
        let on = times.on.as_nanos() as u64;
        let period = on + times.off.as_nanos() as u64;
        Cycle { on, period, lead: (period - start % period) % period }
    }

    /// From when on the load is on: `now`, if it is.
    pub(crate) fn on_from(&self, now: u64) -> u64 {
        let into = (now + self.lead) % self.period;
        if into < self.on { now } else { now + self.period - into }
    }

    /// When the load has been on for so long since the run began.
    fn after(&self, on: u64) -> u64 {
        let on = on + self.lead.min(self.on);
        on / self.on * self.period + on % self.on - self.lead
    }
}

/// An even rate, while the load is on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Schedule {
    first: f64,
    step: f64,
    next: u64,
    cycle: Option<Cycle>,
}

impl Schedule {
    /// The part of the thread `thread` of `threads` in so many requests a second.
    pub(crate) fn new(rate: u32, thread: u64, threads: u64, cycle: Option<Cycle>) -> Schedule {
        let step = 1e9 / f64::from(rate);
        Schedule { first: step * thread as f64, step: step * threads as f64, next: 0, cycle }
    }

    /// When the next request is due, in nanoseconds of the run.
    pub(crate) fn due(&self) -> u64 {
        // Multiplied, not summed up: no error adds up.
        let on = (self.first + self.step * self.next as f64) as u64;
        self.cycle.map_or(on, |cycle| cycle.after(on))
    }

    /// That request has been made.
    pub(crate) fn pass(&mut self) {
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
                schedule.pass();
                due
            })
            .collect();
        assert_eq!(due, [1000, 3000, 5000]);
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
                schedule.pass();
                prop_assert_eq!(cycle.on_from(due), due);
                prop_assert!(due >= last);
                last = due;
            }
        }
    }
}
