//! The requests of a driver, and their times.

use fastrand::Rng;
use kickless_worker::policy::Nanos;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

pub(crate) const US: Nanos = 1_000;
pub(crate) const MS: Nanos = 1_000_000;
pub(crate) const SEC: Nanos = 1_000_000_000;

/// The times of a part of a load: `on` out of each `on + off`, first at `from`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gate {
    pub(crate) from: Nanos,
    pub(crate) on: Nanos,
    pub(crate) off: Nanos,
}

impl Gate {
    pub(crate) const OPEN: Gate = Gate { from: 0, on: Nanos::MAX / 2, off: 0 };

    /// Returns the first time from `at` on at which it is active.
    fn admit(&self, at: Nanos) -> Nanos {
        if at < self.from {
            return self.from;
        }
        let phase = (at - self.from) % (self.on + self.off);
        if phase < self.on { at } else { at - phase + self.on + self.off }
    }
}

/// Times between requests of a load that does not react.
#[derive(Clone, Debug)]
pub(crate) enum Gaps {
    Steady(Nanos),
    Poisson(Nanos),
    /// A group of this many, `spacing` apart, every `every`.
    Bursts {
        every: Nanos,
        count: u32,
        spacing: Nanos,
    },
    /// One each `gap`, from a driver that sleeps in between and wakes late by up to `late`. One wake in a
    /// hundred is late by up to `stall` more. The driver then sends all due requests at once.
    Asleep {
        gap: Nanos,
        late: Nanos,
        stall: Nanos,
    },
    /// Requests at random times from a driver that sleeps in between and wakes late by up to `late`. While
    /// the worker sleeps, and for 200 us after that, its wakes are late by up to `deep` more, because an
    /// idle core takes longer to wake. Wakes are also late by up to `slow` more for some fifty wakes in a
    /// row, and then on time for as many. The driver sends all due requests at once.
    Late {
        mean: Nanos,
        late: Nanos,
        deep: Nanos,
        slow: Nanos,
    },
    /// These gaps, repeated.
    Recorded(Vec<u32>),
}

/// A closed loop: each of `in_flight` requests is sent again this long after its answer.
#[derive(Clone, Debug)]
pub(crate) struct Closed {
    pub(crate) in_flight: u32,
    pub(crate) think: Range<Nanos>,
    pub(crate) gate: Gate,
}

#[derive(Clone, Debug)]
pub(crate) struct Open {
    pub(crate) gaps: Gaps,
    pub(crate) gate: Gate,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Load {
    pub(crate) closed: Option<Closed>,
    pub(crate) open: Option<Open>,
    /// The time that the disk takes. 0: it answers at once.
    pub(crate) disk: Range<Nanos>,
}

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Request {
    pub(crate) at: Nanos,
    /// It belongs to a closed loop, so its delay delays others.
    pub(crate) closed: bool,
}

/// The time after a sleep of the worker for which wakes of the driver's core take longer.
const DEEP: Nanos = 200 * US;
/// Processor time that the driver takes to send a request.
const SEND: Nanos = 300;

/// Returns the time until the next of requests at random times, which are `mean` apart on average.
pub(crate) fn random_gap(rng: &mut Rng, mean: f64) -> Nanos {
    (-(1.0 - rng.f64()).ln() * mean) as Nanos
}

/// A running driver.
pub(crate) struct Driver {
    load: Load,
    rng: Rng,
    /// Requests that are sent or will be, and are not popped yet.
    coming: BinaryHeap<Reverse<Request>>,
    /// The time at which the present request is sent.
    free: Nanos,
    opened: u64,
    last_open: Nanos,
    /// Requests of the open load among `coming`.
    open_coming: u32,
    /// The time at which a sleeping driver sends.
    awake: Nanos,
    /// The time until which its core is deeply asleep, and whether its wakes are slow now.
    deep_until: Nanos,
    slow: bool,
}

impl Driver {
    pub(crate) fn new(load: Load, seed: u64) -> Self {
        let mut driver = Self {
            rng: Rng::with_seed(seed),
            coming: BinaryHeap::new(),
            free: 0,
            opened: 0,
            last_open: 0,
            open_coming: 0,
            awake: 0,
            deep_until: 0,
            slow: false,
            load,
        };
        for _ in 0..driver.load.closed.as_ref().map_or(0, |closed| closed.in_flight) {
            driver.answered(Request { at: 0, closed: true }, 0);
        }
        driver.open_next();
        driver
    }

    pub(crate) fn next_at(&self) -> Option<Nanos> {
        self.coming.peek().map(|next| next.0.at)
    }

    /// Takes a request that has been sent by `now`.
    pub(crate) fn pop(&mut self, now: Nanos) -> Option<Request> {
        let request = self.coming.peek().filter(|next| next.0.at <= now)?.0;
        self.coming.pop();
        if !request.closed {
            self.open_coming -= 1;
            if self.open_coming == 0 {
                self.open_next();
            }
        }
        Some(request)
    }

    pub(crate) fn answered(&mut self, request: Request, at: Nanos) {
        let Some(closed) = self.load.closed.as_ref().filter(|_| request.closed) else { return };
        let ready = closed.gate.admit(at + self.rng.u64(closed.think.clone()));
        self.free = self.free.max(ready) + SEND;
        self.coming.push(Reverse(Request { at: self.free, closed: true }));
    }

    /// Notes that the worker sleeps until `until`.
    pub(crate) fn worker_sleeps(&mut self, until: Nanos) {
        self.deep_until = until.saturating_add(DEEP);
    }

    /// Delays the driver by a kick for the present request.
    pub(crate) fn kick(&mut self, at: Nanos, cost: Nanos) {
        self.free = self.free.max(at + cost);
    }

    /// Returns the time that the disk takes for this request.
    pub(crate) fn disk(&mut self) -> Option<Nanos> {
        let disk = self.load.disk.clone();
        (!disk.is_empty()).then(|| self.rng.u64(disk))
    }

    fn open_next(&mut self) {
        let Some(open) = &self.load.open else { return };
        let gap = match &open.gaps {
            Gaps::Steady(gap) => *gap,
            Gaps::Poisson(mean) | Gaps::Late { mean, .. } => random_gap(&mut self.rng, *mean as f64),
            Gaps::Bursts { every, count, spacing } => match self.opened % u64::from(*count) {
                0 => every - spacing * u64::from(count - 1),
                _ => *spacing,
            },
            Gaps::Asleep { gap, .. } => *gap,
            Gaps::Recorded(gaps) => Nanos::from(gaps[self.opened as usize % gaps.len()]),
        };
        self.opened += 1;
        self.last_open = open.gate.admit(self.last_open + gap);
        let mut at = self.last_open;
        if let Gaps::Asleep { late, stall, .. } = open.gaps {
            if at > self.awake {
                let stalled = self.rng.u8(0..100) == 0;
                self.awake = at + self.rng.u64(0..=late) + if stalled { self.rng.u64(0..=stall) } else { 0 };
            }
            at = self.awake;
        }
        if let Gaps::Late { late, deep, slow, .. } = open.gaps {
            if at > self.awake {
                self.slow ^= self.rng.u8(0..50) == 0;
                let more = if at < self.deep_until { self.rng.u64(0..=deep) } else { 0 };
                let slow = if self.slow { self.rng.u64(0..=slow) } else { 0 };
                self.awake = at + self.rng.u64(0..=late) + more + slow;
            }
            at = self.awake;
        }
        self.open_coming += 1;
        self.coming.push(Reverse(Request { at, closed: false }));
    }
}
