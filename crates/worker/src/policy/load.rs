//! The rate of a queue's requests.

use super::Nanos;

/// The shortest span over which requests are counted.
const SPAN: Nanos = 1_000_000;
/// A longer span is a pause, and does not count: the rate is that of the active load.
const PAUSE: Nanos = 8_000_000;
/// Each span reduces earlier counts by one part in this many.
const DECAY: u64 = 8;
/// A rate this many times as high or as low belongs to another load, if at least so many requests came or
/// were expected. By chance, a third of 32 is four standard deviations away.
const CHANGE_FACTOR: u64 = 3;
const COUNT_MIN: u64 = 32;
/// The unit of a rate: requests in 2^30 ns, a little over a second. The highest rate that is believed.
const UNIT: u32 = 30;
const RATE_MAX: u64 = 1 << 32;

/// A span of an active load, or a pause, which takes no time of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) time: Nanos,
    /// Its rate is so much higher or lower that it probably belongs to another load.
    pub(super) changed: bool,
}

/// A moving average of a queue's request rate.
#[derive(Debug, Default)]
pub(super) struct Load {
    /// `None` before the first span is over.
    rate: Option<u64>,
    since: Nanos,
    counted: u64,
    /// Requests of the recent past, in 256ths, and the time in which they came.
    recent: u64,
    time: Nanos,
}

/// Returns the rate of so many 256ths of a request.
pub(super) fn rate(count_256: u64, time: Nanos) -> u64 {
    ((u128::from(count_256) << (UNIT - 8)) / u128::from(time.max(1))).min(u128::from(RATE_MAX)) as u64
}

impl Load {
    /// Returns the time at which the span can be closed.
    pub(super) fn until(&self) -> Nanos {
        self.since.saturating_add(SPAN)
    }

    /// Closes the span if it is long enough. `requests` is the number of all requests so far.
    pub(super) fn close_span(&mut self, now: Nanos, requests: u64) -> Option<Span> {
        let time = now.saturating_sub(self.since);
        if time < SPAN {
            return None;
        }
        let count = requests.wrapping_sub(std::mem::replace(&mut self.counted, requests));
        self.since = now;
        if time > PAUSE {
            return Some(Span { time: 0, changed: false });
        }
        let count = count.min(RATE_MAX);
        let counted = rate(256 * count, time);
        let known = self.rate.unwrap_or(counted);
        let many = count >= COUNT_MIN || self.expected_256(time) >= 256 * COUNT_MIN;
        let other = counted < known / CHANGE_FACTOR || counted > known.saturating_mul(CHANGE_FACTOR);
        let changed = many && other;
        if changed {
            (self.recent, self.time) = (0, 0);
        }
        // Counts and times are summed, not rates. A mean of rates would overvalue short gaps.
        self.recent = self.recent - self.recent / DECAY + 256 * count;
        self.time = self.time - self.time / DECAY + time;
        self.rate = Some(rate(self.recent, self.time));
        Some(Span { time, changed })
    }

    /// Returns whether the rate is known.
    pub(super) fn is_known(&self) -> bool {
        self.rate.is_some()
    }

    /// Returns the number of requests that come in `time`, in 256ths.
    pub(super) fn expected_256(&self, time: Nanos) -> u64 {
        ((u128::from(self.rate.unwrap_or(0)) * u128::from(time)) >> (UNIT - 8)) as u64
    }

    /// Returns the time in which `count` requests come.
    pub(super) fn time_of(&self, count: u64) -> Nanos {
        (count << UNIT) / self.rate.unwrap_or(0).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the result of a span with `after` requests, after a hundred of a millisecond with `before`
    /// each.
    fn after(before: u64, after: u64, time: Nanos) -> (Load, Option<Span>) {
        let mut load = Load::default();
        for span in 1..=100 {
            load.close_span(span * SPAN, span * before);
        }
        let span = load.close_span(100 * SPAN + time, 100 * before + after);
        (load, span)
    }

    #[test]
    fn a_steady_rate_is_known_and_a_pause_does_not_change_it() {
        let (load, span) = after(100, 1, 900 * SPAN);
        assert_eq!(span, Some(Span { time: 0, changed: false }));
        assert!(load.time_of(10).abs_diff(100_000) < 3_000);
        assert_eq!(load.expected_256(SPAN).div_ceil(256), 100);
        assert_eq!(after(100, 1, SPAN - 1).1, None);
    }

    #[test]
    fn a_change_is_more_than_chance_makes_of_few() {
        let changed =
            |before, count| after(before, count, SPAN).1 == Some(Span { time: SPAN, changed: true });
        assert_eq!([31, 33].map(|count| changed(8, count)), [false, true]);
        assert_eq!([10, 50, 290, 310].map(|count| changed(100, count)), [true, false, false, true]);
        assert!(!changed(20, 0));
    }
}
