//! What sleeping and waking costs on this machine.

use super::Nanos;

/// An average moves towards what was measured last by a part in so many.
const WEIGHT: Nanos = 8;
/// What was measured counts as no more than this: longer ones are another thread's doing.
const MOST: Nanos = 500_000;

/// What a worker knows of the machine that it runs on. The defaults are those of a virtual machine of 2024; a worker measures
/// at start-up and goes on from there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Host {
    /// Processor time of one sleep and the wake that ends it.
    pub sleep_cpu: Nanos,
    /// From an event to the worker that runs again.
    pub wake_delay: Nanos,
    /// How much later than asked a timed sleep ends.
    pub nap_overshoot: Nanos,
    /// Other threads want the core; see [`Pressure`](super::Pressure).
    pub contended: bool,
}

impl Default for Host {
    fn default() -> Self {
        Self { sleep_cpu: 8_000, wake_delay: 30_000, nap_overshoot: 30_000, contended: false }
    }
}

impl Host {
    /// A sleep and a wake took `cpu` of processor time.
    pub fn slept(&mut self, cpu: Nanos) {
        towards(&mut self.sleep_cpu, cpu);
    }

    /// The worker ran again `delay` after the event that woke it.
    pub fn woke(&mut self, delay: Nanos) {
        towards(&mut self.wake_delay, delay);
    }

    /// A timed sleep ended `late` after it should have.
    pub fn overslept(&mut self, late: Nanos) {
        towards(&mut self.nap_overshoot, late);
    }
}

/// A moving average that rests within `WEIGHT` of what is measured again and again.
fn towards(average: &mut Nanos, measured: Nanos) {
    let (old, new) = ((*average).min(MOST), measured.min(MOST));
    *average = if new >= old { old + (new - old) / WEIGHT } else { old - (old - new) / WEIGHT };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn averages_follow_and_are_bounded() {
        let mut host = Host::default();
        for _ in 0..100 {
            host.slept(5_000);
            host.woke(Nanos::MAX);
            host.overslept(0);
        }
        assert!((5_000..5_000 + WEIGHT).contains(&host.sleep_cpu));
        assert!((MOST - WEIGHT..=MOST).contains(&host.wake_delay));
        assert!(host.nap_overshoot < WEIGHT);
    }

    #[test]
    fn one_outlier_moves_an_average_by_a_bounded_part() {
        let mut host = Host::default();
        host.slept(Nanos::MAX);
        assert_eq!(host.sleep_cpu, 8_000 + (MOST - 8_000) / WEIGHT);
    }
}
