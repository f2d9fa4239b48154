//! Looks that find nothing, and the clock.
//!
//! To read the clock takes as long as to look at a ring: for as long again a request that comes now lies there. With one request in flight,
//! which is served in a third of a microsecond, that was a tenth of its time. So the clock is read after each turn that found
//! something, and after some in a row that found nothing; until then what the time is needed for (naps, when to give up) is
//! late by as many looks, some 100 ns.

use crate::clock::Nanos;

/// In a row without the clock.
const LOOKS: u32 = 4;
/// What is known of how long one takes grows by as much, and to the double, each time.
const STEP: Nanos = 32;

/// Looks that found nothing, since the clock was read.
#[derive(Debug, Default)]
pub(crate) struct Looks {
    since: u32,
    /// How long one takes: that of the last that were timed, but not much more than was known before, for something else may have run.
    each: Nanos,
}

impl Looks {
    /// A turn found nothing: whether it is time to read the clock.
    #[inline]
    pub(crate) fn is_time(&mut self) -> bool {
        self.since += 1;
        self.since == LOOKS
    }

    /// The clock says that so much has passed: how much of it went into looks that found nothing. `worked`: the last turn found
    /// something.
    #[inline]
    pub(crate) fn share(&mut self, passed: Nanos, worked: bool) -> Nanos {
        let since = std::mem::take(&mut self.since);
        if worked {
            return (Nanos::from(since) * self.each).min(passed);
        }
        if since == LOOKS {
            self.each = (passed / Nanos::from(LOOKS)).min(2 * self.each + STEP);
        }
        passed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_is_read_now_and_then_and_time_is_booked_as_it_was_spent() {
        let mut looks = Looks::default();
        // Nothing is known of looks yet.
        assert_eq!(looks.share(70, true), 0);
        let turns: Vec<bool> = (0..LOOKS).map(|_| looks.is_time()).collect();
        assert_eq!(turns, [false, false, false, true]);
        assert_eq!(looks.share(120, false), 120);
        // A turn that worked, after two that did not, of 30 each.
        assert!(!looks.is_time() && !looks.is_time());
        assert_eq!(looks.share(100, true), 60);
        assert_eq!(looks.share(100, true), 0);
        // Not more than there was.
        assert!(!looks.is_time() && !looks.is_time());
        assert_eq!(looks.share(40, true), 40);
    }

    #[test]
    fn one_disturbed_look_is_no_measure() {
        let mut looks = Looks { since: 0, each: 30 };
        let group = |looks: &mut Looks, passed| {
            while !looks.is_time() {}
            looks.share(passed, false)
        };
        let one = |looks: &mut Looks| {
            assert!(!looks.is_time());
            looks.share(1000, true)
        };
        assert_eq!((group(&mut looks, 4_000_000), one(&mut looks)), (4_000_000, 92));
        assert_eq!((group(&mut looks, 120), one(&mut looks)), (120, 30));
        // A look and a system call are not looks.
        assert!(!looks.is_time());
        assert_eq!((looks.share(500, false), looks.share(500, false), one(&mut looks)), (500, 500, 30));
    }
}
