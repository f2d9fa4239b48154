//! Decides when a thread polls the ring for a moment before it sleeps.
//!
//! A sleep and its wake-up cost both sides microseconds. If the device answers faster than that, a short spin
//! is cheaper than the sleep. If not, the spin is wasted. The results of earlier spins decide: after a wasted
//! spin, twice as many sleeps as before go without one, so that a slow device costs almost nothing. After a
//! successful spin, every sleep has one.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The length of a spin: about the processor time that a sleep costs.
pub(crate) const TIME: Duration = Duration::from_micros(5);
/// The largest number of sleeps in a row without a spin.
const PAUSE_MAX: u32 = 255;

/// The results of the last spins. Several threads may update it at once; it need not be exact.
#[derive(Debug, Default)]
pub(crate) struct ShortSpin {
    /// The number of sleeps that still go without a spin.
    left: AtomicU32,
    /// The number of sleeps without a spin after the last wasted one.
    pause: AtomicU32,
}

impl ShortSpin {
    /// Returns whether to spin before this sleep.
    pub(crate) fn is_due(&self) -> bool {
        let left = self.left.load(Ordering::Relaxed);
        self.left.store(left.saturating_sub(1), Ordering::Relaxed);
        left == 0
    }

    /// Records whether the spin was successful.
    pub(crate) fn record(&self, paid: bool) {
        let pause = if paid { 0 } else { (2 * self.pause.load(Ordering::Relaxed) + 1).min(PAUSE_MAX) };
        self.pause.store(pause, Ordering::Relaxed);
        self.left.store(pause, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of spins before `sleeps` sleeps.
    fn spins(spin: &ShortSpin, sleeps: u32, paid: bool) -> u32 {
        (0..sleeps).filter(|_| spin.is_due()).inspect(|_| spin.record(paid)).count() as u32
    }

    #[test]
    fn a_slow_device_causes_few_spins() {
        let spin = ShortSpin::default();
        // The pauses are 1, 3, 7 and so on up to 255, and stay at 255.
        assert_eq!(spins(&spin, 511 - 8, false), 8);
        assert_eq!(spins(&spin, 25_600, false), 100);
    }

    #[test]
    fn a_fast_device_causes_a_spin_every_time() {
        let spin = ShortSpin::default();
        assert_eq!(spins(&spin, 1000, true), 1000);
        spins(&spin, 10_000, false);
        // The next spin finds that the device is fast again.
        assert!(spins(&spin, 1255, true) >= 1000);
    }
}
