//! Turns of the loop that find nothing, and the time that they take.
//!
//! Reading the clock takes as long as polling a ring. A request that comes meanwhile waits for that time.
//! With one request in flight, which takes a third of a microsecond to serve, this was a tenth of the time.
//! So the loop reads the clock after each turn that found something, but only after several in a row that
//! found nothing. Until then, everything that depends on the time (naps, the end of a spin) is late by these
//! turns, about 100 ns.

use crate::clock::Nanos;

/// The number of empty turns in a row after which the clock is read.
const TURNS: u32 = 4;
/// The estimate of an empty turn's time grows at most to the double plus this, each time that it is measured.
const STEP: Nanos = 32;

/// Empty turns since the clock was read.
#[derive(Debug, Default)]
pub(crate) struct EmptyTurns {
    since: u32,
    /// The estimated time of one: that of the last measured turns, but with bounded growth, because another
    /// thread may have run meanwhile.
    each: Nanos,
}

impl EmptyTurns {
    /// Counts an empty turn. Returns whether the loop must read the clock.
    #[inline]
    pub(crate) fn clock_is_due(&mut self) -> bool {
        self.since += 1;
        self.since == TURNS
    }

    /// Returns the part of `passed`, the time since the clock was read, that went into empty turns. `worked`:
    /// the last turn found something.
    #[inline]
    pub(crate) fn time_polled(&mut self, passed: Nanos, worked: bool) -> Nanos {
        let since = std::mem::take(&mut self.since);
        if worked {
            return (Nanos::from(since) * self.each).min(passed);
        }
        if since == TURNS {
            self.each = (passed / Nanos::from(TURNS)).min(2 * self.each + STEP);
        }
        passed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_divided_between_work_and_empty_turns() {
        let mut empty_turns = EmptyTurns::default();
        // There is no estimate yet.
        assert_eq!(empty_turns.time_polled(70, true), 0);
        let turns: Vec<bool> = (0..TURNS).map(|_| empty_turns.clock_is_due()).collect();
        assert_eq!(turns, [false, false, false, true]);
        assert_eq!(empty_turns.time_polled(120, false), 120);
        // A turn that worked, after two empty ones of 30 each.
        assert!(!empty_turns.clock_is_due() && !empty_turns.clock_is_due());
        assert_eq!(empty_turns.time_polled(100, true), 60);
        assert_eq!(empty_turns.time_polled(100, true), 0);
        // At most the time that has passed.
        assert!(!empty_turns.clock_is_due() && !empty_turns.clock_is_due());
        assert_eq!(empty_turns.time_polled(40, true), 40);
    }

    #[test]
    fn one_disturbed_turn_is_no_measure() {
        let mut empty_turns = EmptyTurns { since: 0, each: 30 };
        let group = |empty_turns: &mut EmptyTurns, passed| {
            while !empty_turns.clock_is_due() {}
            empty_turns.time_polled(passed, false)
        };
        let one = |empty_turns: &mut EmptyTurns| {
            assert!(!empty_turns.clock_is_due());
            empty_turns.time_polled(1000, true)
        };
        assert_eq!((group(&mut empty_turns, 4_000_000), one(&mut empty_turns)), (4_000_000, 92));
        assert_eq!((group(&mut empty_turns, 120), one(&mut empty_turns)), (120, 30));
        // A turn with a system call is no measure of an empty turn.
        assert!(!empty_turns.clock_is_due());
        assert_eq!(
            (empty_turns.time_polled(500, false), empty_turns.time_polled(500, false), one(&mut empty_turns)),
            (500, 500, 30)
        );
    }
}
