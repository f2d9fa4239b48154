//! When a thread looks at the ring for a moment before it sleeps.
//!
//! A sleep and the wake-up from it cost both sides microseconds. A device that answers sooner than that is waited for more cheaply
//! awake; for another, the look is in vain. Which it is shows from how the last ones ended: after one in vain, twice as many
//! sleeps as before go without, so that a slow device costs next to nothing, and after one that paid, none.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// How long a look lasts: about what a sleep costs in processor time.
pub(crate) const TIME: Duration = Duration::from_micros(5);
/// Most sleeps without a look.
const PAUSE_MAX: u32 = 255;

/// What the last looks came to. Several threads may be at it at once, and then it is not exact, and need not be.
#[derive(Debug, Default)]
pub(crate) struct ShortSpin {
    /// Sleeps that still go without.
    left: AtomicU32,
    /// How many went without after the last look in vain.
    pause: AtomicU32,
}

impl ShortSpin {
    /// Whether to look now, before this sleep.
    pub(crate) fn is_due(&self) -> bool {
        let left = self.left.load(Ordering::Relaxed);
        self.left.store(left.saturating_sub(1), Ordering::Relaxed);
        left == 0
    }

    /// What came of it.
    pub(crate) fn record(&self, paid: bool) {
        let pause = if paid { 0 } else { (2 * self.pause.load(Ordering::Relaxed) + 1).min(PAUSE_MAX) };
        self.pause.store(pause, Ordering::Relaxed);
        self.left.store(pause, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of so many sleeps, before how many it looks.
    fn spins(spin: &ShortSpin, sleeps: u32, paid: bool) -> u32 {
        (0..sleeps).filter(|_| spin.is_due()).inspect(|_| spin.record(paid)).count() as u32
    }

    #[test]
    fn a_device_that_is_always_late_is_hardly_looked_for() {
        let spin = ShortSpin::default();
        // With pauses of 1, 3, 7 ... 255, and of 255 from then on.
        assert_eq!(spins(&spin, 511 - 8, false), 8);
        assert_eq!(spins(&spin, 25_600, false), 100);
    }

    #[test]
    fn one_that_is_quick_is_always_looked_for() {
        let spin = ShortSpin::default();
        assert_eq!(spins(&spin, 1000, true), 1000);
        spins(&spin, 10_000, false);
        // It is found out at the next look.
        assert!(spins(&spin, 1255, true) >= 1000);
    }
}
