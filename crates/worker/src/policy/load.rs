//! The rate of a queue's requests.

use super::Nanos;

/// The shortest span over which requests are counted.
const SPAN_MIN: Nanos = 1_000_000;
/// A longer span is a pause, and does not count: the rate is that of the active load.
const PAUSE: Nanos = 8_000_000;
/// The share of earlier counts that is left after each span.
const DECAY: f64 = 7.0 / 8.0;
/// A rate this many times as high or as low belongs to another load, if at least so many requests came or
/// were expected. By chance, a third of 32 is four standard deviations away.
const CHANGE_FACTOR: f64 = 3.0;
const COUNT_MIN: f64 = 32.0;

/// A moving average of a queue's request rate.
#[derive(Debug, Default)]
pub(super) struct Load {
    since: Nanos,
    counted: u64,
    /// Requests of the recent past, and the time in which they came. Sums, because a mean of rates would
    /// overvalue short gaps.
    recent: f64,
    time: f64,
}

impl Load {
    /// Returns the time at which the span can be closed.
    pub(super) fn until(&self) -> Nanos {
        self.since.saturating_add(SPAN_MIN)
    }

    /// Closes the span if it is long enough. `requests` is the number of all requests so far. Returns the
    /// time for which the load was active, and whether its rate is so much higher or lower than before that
    /// it probably belongs to another load.
    pub(super) fn close_span(&mut self, now: Nanos, requests: u64) -> Option<(Nanos, bool)> {
        let time = now.saturating_sub(self.since);
        if time < SPAN_MIN {
            return None;
        }
        let count = requests.wrapping_sub(std::mem::replace(&mut self.counted, requests)) as f64;
        self.since = now;
        if time > PAUSE {
            return Some((0, false));
        }
        let expected = if self.time > 0.0 { self.expected(time) } else { count };
        let (less, more) = (count.min(expected), count.max(expected));
        let changed = more >= COUNT_MIN && more > less * CHANGE_FACTOR;
        if changed {
            (self.recent, self.time) = (0.0, 0.0);
        }
        self.recent = self.recent * DECAY + count;
        self.time = self.time * DECAY + time as f64;
        Some((time, changed))
    }

    /// Returns the number of requests that come in `time`. 0 before the first span is over.
    pub(super) fn expected(&self, time: Nanos) -> f64 {
        time as f64 * self.recent / self.time.max(1.0)
    }

    /// Returns the time in which `count` requests come.
    pub(super) fn time_of(&self, count: f64) -> Nanos {
        (count * self.time.max(1.0) / self.recent) as Nanos
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the result of a span with `after` requests, after a hundred of a millisecond with `before`
    /// each.
    fn after(before: u64, after: u64, time: Nanos) -> (Load, Option<(Nanos, bool)>) {
        let mut load = Load::default();
        for span in 1..=100 {
            load.close_span(span * SPAN_MIN, span * before);
        }
        let span = load.close_span(100 * SPAN_MIN + time, 100 * before + after);
        (load, span)
    }

    #[test]
    fn a_steady_rate_is_known_and_a_pause_does_not_change_it() {
        let (load, span) = after(100, 1, 900 * SPAN_MIN);
        assert_eq!(span, Some((0, false)));
        assert!(load.time_of(10.0).abs_diff(100_000) < 3_000);
        assert_eq!(load.expected(SPAN_MIN).round(), 100.0);
        assert_eq!(after(100, 1, SPAN_MIN - 1).1, None);
    }

    #[test]
    fn a_change_is_more_than_chance_makes_of_few() {
        let changed = |before, count| after(before, count, SPAN_MIN).1.is_some_and(|(_, changed)| changed);
        assert_eq!([31, 33].map(|count| changed(8, count)), [false, true]);
        assert_eq!([10, 50, 290, 310].map(|count| changed(100, count)), [true, false, false, true]);
        assert!(!changed(20, 0));
    }
}
