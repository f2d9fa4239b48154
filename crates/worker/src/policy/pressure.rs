//! Whether other threads want the core.

use super::Nanos;

const EVERY: Nanos = 10_000_000;

/// Running totals of a thread and its CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Time for which the thread was ready to run and did not.
    pub run_delay: Nanos,
    /// Time that the hypervisor gave to others.
    pub steal: Nanos,
    /// Time for which the thread ran.
    pub cpu: Nanos,
}

/// What one worker sees of others.
#[derive(Debug, Default)]
pub struct Pressure {
    last: Usage,
    at: Nanos,
}

impl Pressure {
    /// Takes the totals; whether others want the core.
    pub fn sample(&mut self, now: Nanos, usage: &Usage, _spun: Nanos) -> bool {
        let elapsed = now.saturating_sub(self.at);
        let waited = usage.run_delay.saturating_sub(self.last.run_delay);
        (self.last, self.at) = (*usage, now);
        waited > elapsed / 10
    }

    /// When to take the next.
    pub fn next(&self) -> Nanos {
        self.at + EVERY
    }
}
