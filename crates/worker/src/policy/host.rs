//! The cost of sleeping and waking on this machine.

use super::Nanos;

/// The highest cost and the longest delay of a wake that are believed. Both were 5 to 60 us on idle machines.
const ESTIMATE_MAX: Nanos = 200_000;
/// A measurement moves an estimate by one part in this many, so 11 in a row double it. A sixteenth keeps the
/// estimate within a tenth of the median while measurements scatter.
const STEP: Nanos = 16;

/// A worker's estimates for its machine, made when it starts and with each sleep. None is above 0.2 ms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Host {
    /// The processor time of a sleep that a kick or a completion ends, and of the wake.
    pub kicked_cpu: Nanos,
    /// The processor time of a sleep that a timer ends, and of the wake.
    pub timed_cpu: Nanos,
    /// The time from an event, or from the end of a timer, until the worker runs again.
    pub wake_delay: Nanos,
    /// Other threads want the core; see [`Pressure`](super::Pressure).
    pub contended: bool,
}

impl Host {
    /// Makes the estimates of a worker that has measured this for sleeps that a timer ends. Others cost half
    /// of it until they are measured, because they set no timer.
    pub fn new(timed_cpu: Nanos, wake_delay: Nanos) -> Self {
        let (timed_cpu, wake_delay) = (timed_cpu.clamp(1, ESTIMATE_MAX), wake_delay.min(ESTIMATE_MAX));
        Self { kicked_cpu: timed_cpu.div_ceil(2), timed_cpu, wake_delay, contended: false }
    }

    /// Moves an estimate of a host towards the median of measurements. A step does not depend on the
    /// distance, so a pause of the process or of the machine, however long, counts as one late wake among
    /// many.
    pub fn approach(estimate: &mut Nanos, measured: Nanos) {
        let step = *estimate / STEP + 1;
        let moved = if measured > *estimate { *estimate + step } else { estimate.saturating_sub(step) };
        *estimate = moved.clamp(1, ESTIMATE_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimates_follow_the_median_and_one_pause_changes_nothing() {
        let mut host = Host::new(8_000, 30_000);
        let hour = 3_600_000_000_000;
        Host::approach(&mut host.wake_delay, hour);
        Host::approach(&mut host.timed_cpu, hour);
        assert!(host.wake_delay < 32_000 && host.timed_cpu < 8_600);
        // Nine of ten sleeps take 20 us, and the tenth is disturbed.
        for sleep in 0..1000 {
            Host::approach(&mut host.kicked_cpu, if sleep % 10 == 0 { 500_000 } else { 20_000 });
        }
        assert!((18_000..=22_500).contains(&host.kicked_cpu), "{}", host.kicked_cpu);
        (0..1000).for_each(|_| Host::approach(&mut host.wake_delay, hour));
        assert_eq!(host.wake_delay, ESTIMATE_MAX);
    }
}
