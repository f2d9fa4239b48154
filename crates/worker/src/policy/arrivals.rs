//! The rate of a queue's requests.

use super::Nanos;

/// The binary logarithm of the unit of time of a rate: 2^30 ns, a little over a second.
const UNIT: u32 = 30;
/// The shortest span over which requests are counted.
const SPAN: Nanos = 1_000_000;
/// The longest part of a span that counts. The rate describes the active load, not its pauses. A longer span
/// is a pause, which is no change of load: the next span is compared with the one before the pause. Two long
/// spans in a row are no pause.
const PAUSE: Nanos = 8_000_000;
/// Each span reduces earlier counts by one part in this many.
const DECAY: u64 = 8;
/// A rate this many times as high or as low belongs to another load.
const CHANGE_FACTOR: u64 = 3;
/// The smallest count for such a decision. Below it, chance alone causes such differences.
const COUNT_MIN: u64 = 32;
/// The highest rate that is believed.
const RATE_MAX: u64 = 1 << 32;

/// The result of comparing a span with the load before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LoadChange {
    Same,
    /// Hardly any requests for this long. The next span shows whether the load is still the same.
    Pause(Nanos),
    /// A rate that is so much higher or lower that it probably belongs to another load.
    Change,
}

/// A moving average of a queue's request rate.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    /// `None` before the first span is over.
    rate: Option<u64>,
    since: Nanos,
    count: u64,
    /// Requests of the recent past, in 256ths, and the time in which they came.
    recent: u64,
    time: Nanos,
    /// The rate before the last pause, until a span without a pause shows whether the load is the same.
    before: Option<u64>,
}

/// Returns the rate of `count` requests in `time`.
pub(super) fn rate(count: u64, time: Nanos) -> u64 {
    ((u128::from(count) << UNIT) / u128::from(time.max(1))).min(u128::from(RATE_MAX)) as u64
}

/// Returns the number of requests that come in `time` at `rate`, in 256ths.
pub(super) fn expected_256(rate: u64, time: Nanos) -> u64 {
    ((u128::from(rate) * u128::from(time)) >> (UNIT - 8)) as u64
}

/// Returns the time in which `count` requests come at `rate`.
pub(super) fn time_of(count: u64, rate: u64) -> Nanos {
    (count << UNIT) / rate.max(1)
}

impl Arrivals {
    pub(super) fn record(&mut self, requests: u32) {
        self.count += u64::from(requests);
    }

    /// Closes the span if it is long enough, and compares it with the load before.
    pub(super) fn close_span(&mut self, now: Nanos) -> Option<LoadChange> {
        let time = now.saturating_sub(self.since);
        if time < SPAN {
            return None;
        }
        let counted = rate(self.count, time);
        // Counts and times are summed, not rates. A mean of rates would overvalue short gaps.
        self.recent = self.recent - self.recent / DECAY + 256 * self.count.min(RATE_MAX);
        self.time = self.time - self.time / DECAY + time.min(PAUSE);
        let old = self.rate.unwrap_or(counted);
        self.rate = Some(rate(self.recent, self.time.saturating_mul(256)));
        let count = std::mem::take(&mut self.count);
        self.since = now;
        let known = match self.before.take() {
            None if time > PAUSE => {
                self.before = Some(old);
                return Some(LoadChange::Pause(time));
            }
            before => before.unwrap_or(old),
        };
        let many = count.max(expected_256(known, time) / 256) >= COUNT_MIN;
        let other = counted < known / CHANGE_FACTOR || counted > known.saturating_mul(CHANGE_FACTOR);
        Some(if many && other { LoadChange::Change } else { LoadChange::Same })
    }

    /// Returns the rate, if it is known.
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
        arrivals.close_span(now);
        for _ in 0..10_000 {
            now += 10_000;
            arrivals.record(1);
            assert_ne!(arrivals.close_span(now), Some(LoadChange::Change));
        }
        let steady = arrivals.rate().unwrap();
        assert!((105_000..110_000).contains(&steady), "{steady}: a hundred thousand in 10^9 ns");
        arrivals.record(1);
        assert_eq!(arrivals.close_span(now + 900_000_000), Some(LoadChange::Pause(900_000_000)));
        assert_eq!(arrivals.close_span(now + 900_000_001), None);
        let after = arrivals.rate().unwrap();
        assert!(after > steady / 3 && after < steady, "{after} after {steady}");
        assert_eq!(expected_256(steady, 20_000), steady * 20_000 / (1 << 22));
        assert!(time_of(10, steady).abs_diff(100_000) < 3_000);
    }

    #[test]
    fn a_span_after_a_pause_is_compared_with_the_load_before_it() {
        // The counts are for each millisecond before and after a pause. Returns the result of the first span
        // after it.
        let after = |before: u32, after: u32| {
            let mut arrivals = Arrivals::default();
            let mut now = 0;
            for _ in 0..100 {
                now += SPAN;
                arrivals.record(before);
                arrivals.close_span(now);
            }
            arrivals.record(1);
            now += 100 * PAUSE;
            assert_eq!(arrivals.close_span(now), Some(LoadChange::Pause(100 * PAUSE)));
            arrivals.record(after);
            arrivals.close_span(now + SPAN)
        };
        assert_eq!(after(300, 300), Some(LoadChange::Same));
        assert_eq!(after(300, 90), Some(LoadChange::Change));
        assert_eq!(after(300, 1000), Some(LoadChange::Change));
    }

    #[test]
    fn a_load_that_stays_away_is_another() {
        let mut arrivals = Arrivals::default();
        let mut now = 0;
        for _ in 0..100 {
            now += SPAN;
            arrivals.record(300);
            arrivals.close_span(now);
        }
        for seen in [LoadChange::Pause(10 * PAUSE), LoadChange::Change, LoadChange::Pause(10 * PAUSE)] {
            now += 10 * PAUSE;
            arrivals.record(1);
            assert_eq!(arrivals.close_span(now), Some(seen));
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
                arrivals.close_span(now);
            }
            arrivals.record(counts[1]);
            arrivals.close_span(now + SPAN)
        };
        assert_eq!(of([8, 31]), Some(LoadChange::Same));
        assert_eq!(of([8, 33]), Some(LoadChange::Change));
        assert_eq!(of([100, 10]), Some(LoadChange::Change));
        assert_eq!(of([100, 50]), Some(LoadChange::Same));
        assert_eq!(of([20, 0]), Some(LoadChange::Same));
    }

    #[test]
    fn short_gaps_among_long_ones_do_not_make_a_rate_high() {
        let mut arrivals = Arrivals::default();
        let mut now = 0;
        for number in 0..100 {
            now += if number % 2 == 0 { 1_000_000 } else { 7_000_000 };
            arrivals.record(1);
            arrivals.close_span(now);
            let rate = arrivals.rate().unwrap();
            assert!(number < 20 || (200..350).contains(&rate), "{rate}: one in 4 ms");
        }
    }

    #[test]
    fn absurd_numbers_stay_bounded() {
        let mut arrivals = Arrivals::default();
        for now in [Nanos::MAX / 2, 0, Nanos::MAX] {
            arrivals.record(u32::MAX);
            arrivals.close_span(now);
        }
        assert!(arrivals.rate().unwrap() <= RATE_MAX);
        assert!(expected_256(RATE_MAX, 1_000_000_000) > 0);
        assert!(time_of(u64::from(u16::MAX), 0) > 0);
    }
}
