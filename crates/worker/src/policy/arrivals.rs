//! How many requests come for each unit of time.

use super::Nanos;

/// The unit of time that a rate is for: 2^30 ns, a little over a second.
const UNIT: u32 = 30;
/// Counted over at least so long.
const SPAN: Nanos = 1_000_000;
/// Of a longer span no more than this counts: the rate is that of a load that is there, not that of its pauses. Nor is one such
/// span another load; the next one is compared with what was before, and two in a row are no pause.
const PAUSE: Nanos = 8_000_000;
/// What was counted before loses a part in so many with each span.
const FADE: u64 = 8;
/// A rate so many times as high or as low is another load's.
const OTHER: u64 = 3;
/// But of fewer than so many, chance makes as many more or less.
const MANY: u64 = 32;
/// No queue has more.
const MOST: u64 = 1 << 32;

/// What a span showed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    Same,
    /// Hardly anything for so long; what follows will show whether the load is still the same.
    Pause(Nanos),
    /// A rate so much higher or lower that it is probably another load's.
    Change,
}

/// A moving average of a queue's requests for each unit of time.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    /// Nothing is known before the first span is over.
    rate: Option<u64>,
    since: Nanos,
    count: u64,
    /// Requests of the recent past, in 256ths, and the time in which they came.
    recent: u64,
    time: Nanos,
    /// The rate before the pause that was seen last, until a span without one shows whether the load is the same again.
    before: Option<u64>,
}

/// `count` in `time`, as a rate.
pub(super) fn rate(count: u64, time: Nanos) -> u64 {
    ((u128::from(count) << UNIT) / u128::from(time.max(1))).min(u128::from(MOST)) as u64
}

/// As much as comes in `time` at `rate`, in 256ths.
pub(super) fn expected_256(rate: u64, time: Nanos) -> u64 {
    ((u128::from(rate) * u128::from(time)) >> (UNIT - 8)) as u64
}

/// How long it takes at `rate` until `count` have come.
pub(super) fn time_of(count: u64, rate: u64) -> Nanos {
    (count << UNIT) / rate.max(1)
}

impl Arrivals {
    pub(super) fn record(&mut self, requests: u32) {
        self.count += u64::from(requests);
    }

    /// Closes the span if it is long enough, and tells what that showed.
    pub(super) fn look(&mut self, now: Nanos) -> Option<Seen> {
        let time = now.saturating_sub(self.since);
        if time < SPAN {
            return None;
        }
        let counted = rate(self.count, time);
        // Counts and times are added up, not rates: short gaps would count for more than long ones.
        self.recent = self.recent - self.recent / FADE + 256 * self.count.min(MOST);
        self.time = self.time - self.time / FADE + time.min(PAUSE);
        let old = self.rate.unwrap_or(counted);
        self.rate = Some(rate(self.recent, self.time.saturating_mul(256)));
        let count = std::mem::take(&mut self.count);
        self.since = now;
        let known = match self.before.take() {
            None if time > PAUSE => {
                self.before = Some(old);
                return Some(Seen::Pause(time));
            }
            before => before.unwrap_or(old),
        };
        let many = count.max(expected_256(known, time) / 256) >= MANY;
        let other = counted < known / OTHER || counted > known.saturating_mul(OTHER);
        Some(if many && other { Seen::Change } else { Seen::Same })
    }

    /// The rate, if any is known.
    pub(super) fn rate(&self) -> Option<u64> {
        self.rate
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_steady_rate_is_found_and_a_pause_does_not_end_it() {
        let mut arrivals = Arrivals::default();
        let mut now = 0;
        arrivals.look(now);
        for _ in 0..10_000 {
            now += 10_000;
            arrivals.record(1);
            assert_ne!(arrivals.look(now), Some(Seen::Change));
        }
        let steady = arrivals.rate().unwrap();
        assert!((105_000..110_000).contains(&steady), "{steady}: a hundred thousand in 10^9 ns");
        arrivals.record(1);
        assert_eq!(arrivals.look(now + 900_000_000), Some(Seen::Pause(900_000_000)));
        assert_eq!(arrivals.look(now + 900_000_001), None);
        let after = arrivals.rate().unwrap();
        assert!(after > steady / 3 && after < steady, "{after} after {steady}");
        assert_eq!(expected_256(steady, 20_000), steady * 20_000 / (1 << 22));
        assert!(time_of(10, steady).abs_diff(100_000) < 3_000);
    }

    #[test]
    fn what_follows_a_pause_is_compared_with_what_was_before() {
        // Each millisecond, before a pause and after it; what the first span after it shows.
        let after = |before: u32, after: u32| {
            let mut arrivals = Arrivals::default();
            let mut now = 0;
            for _ in 0..100 {
                now += SPAN;
                arrivals.record(before);
                arrivals.look(now);
            }
            arrivals.record(1);
            now += 100 * PAUSE;
            assert_eq!(arrivals.look(now), Some(Seen::Pause(100 * PAUSE)));
            arrivals.record(after);
            arrivals.look(now + SPAN)
        };
        assert_eq!(after(300, 300), Some(Seen::Same));
        assert_eq!(after(300, 90), Some(Seen::Change));
        assert_eq!(after(300, 1000), Some(Seen::Change));
    }

    #[test]
    fn a_load_that_stays_away_is_another() {
        let mut arrivals = Arrivals::default();
        let mut now = 0;
        for _ in 0..100 {
            now += SPAN;
            arrivals.record(300);
            arrivals.look(now);
        }
        for seen in [Seen::Pause(10 * PAUSE), Seen::Change, Seen::Pause(10 * PAUSE)] {
            now += 10 * PAUSE;
            arrivals.record(1);
            assert_eq!(arrivals.look(now), Some(seen));
        }
    }

    #[test]
    fn a_change_is_more_than_chance_makes_of_few() {
        let of = |counts: [u32; 2]| {
            let mut arrivals = Arrivals::default();
            let mut now = 0;
            for _ in 0..100 {
                now += SPAN;
                arrivals.record(counts[0]);
                arrivals.look(now);
            }
            arrivals.record(counts[1]);
            arrivals.look(now + SPAN)
        };
        assert_eq!(of([8, 31]), Some(Seen::Same));
        assert_eq!(of([8, 33]), Some(Seen::Change));
        assert_eq!(of([100, 10]), Some(Seen::Change));
        assert_eq!(of([100, 50]), Some(Seen::Same));
        assert_eq!(of([20, 0]), Some(Seen::Same));
    }

    #[test]
    fn short_gaps_among_long_ones_do_not_make_a_rate_high() {
        let mut arrivals = Arrivals::default();
        let mut now = 0;
        for number in 0..100 {
            now += if number % 2 == 0 { 1_000_000 } else { 7_000_000 };
            arrivals.record(1);
            arrivals.look(now);
            let rate = arrivals.rate().unwrap();
            assert!(number < 20 || (200..350).contains(&rate), "{rate}: one in 4 ms");
        }
    }

    #[test]
    fn absurd_numbers_stay_bounded() {
        let mut arrivals = Arrivals::default();
        for now in [Nanos::MAX / 2, 0, Nanos::MAX] {
            arrivals.record(u32::MAX);
            arrivals.look(now);
        }
        assert!(arrivals.rate().unwrap() <= MOST);
        assert!(expected_256(MOST, 1_000_000_000) > 0);
        assert!(time_of(u64::from(u16::MAX), 0) > 0);
    }
}
