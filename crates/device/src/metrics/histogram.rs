//! Histograms of latencies.
//!
//! A bucket is an eighth of an octave, so a latency is known to 12.5 %. The bounds of the buckets are the
//! same in each histogram: buckets can be added up, over queues, devices and processes.

use std::fmt;

use crate::Count;
use crate::log_scale::LogScale;

/// The shortest latency that is told apart from shorter ones is 2^8 ns: a request to a disk in memory takes
/// 300 ns and more. From 2^34 ns on, 17 s, all share the last bucket: the longest bound that is exported is
/// 10 s. An octave has 2^3 buckets.
type Scale = LogScale<8, 34, 3>;

/// The number of buckets: one for shorter latencies, the octaves, and one for longer latencies.
pub const BUCKETS: usize = Scale::BUCKETS;

/// Returns the end of a bucket in nanoseconds: all its latencies are shorter. `None` for the last bucket.
pub fn bucket_end_ns(bucket: usize) -> Option<u64> {
    (bucket < BUCKETS - 1).then(|| Scale::start(bucket + 1))
}

/// A histogram that one thread at a time writes and any thread reads.
pub struct Histogram {
    buckets: [Count; BUCKETS],
    sum_ns: Count,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { buckets: [const { Count::new() }; BUCKETS], sum_ns: Count::new() }
    }
}

impl fmt::Debug for Histogram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Histogram").field("count", &self.read().count()).finish_non_exhaustive()
    }
}

impl Histogram {
    /// Adds `count` requests of one latency. Only the thread that owns the histogram may call this.
    pub fn record(&self, ns: u64, count: u64) {
        self.buckets[Scale::bucket(ns)].add(count);
        // 2^64 nanoseconds are 584 years.
        self.sum_ns.add(ns.wrapping_mul(count));
    }

    /// Returns the present counts. Counts that change meanwhile are old or new, each by itself.
    pub fn read(&self) -> Latencies {
        Latencies { counts: self.buckets.iter().map(Count::get).collect(), sum_ns: self.sum_ns.get() }
    }
}

/// The contents of one or more histograms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Latencies {
    /// The number of requests in each bucket.
    pub counts: Vec<u64>,
    /// The sum of their latencies in nanoseconds.
    pub sum_ns: u64,
}

impl Default for Latencies {
    fn default() -> Self {
        Self { counts: vec![0; BUCKETS], sum_ns: 0 }
    }
}

impl Latencies {
    /// Returns the number of requests.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Adds the contents of another histogram.
    pub fn add(&mut self, other: &Self) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(sum, more)| *sum += more);
        self.sum_ns += other.sum_ns;
    }

    /// Returns the number of requests that took less than `end_ns`, the end of a bucket. Rounds down to the
    /// next end for other times.
    pub fn count_below(&self, end_ns: u64) -> u64 {
        let ends = (0..).map_while(bucket_end_ns).take_while(|end| *end <= end_ns);
        ends.zip(&self.counts).map(|(_, count)| count).sum()
    }

    /// Returns the end of the bucket that has the latency which `thousandths` of the requests do not exceed.
    /// The last bucket counts as twice as long as the one before. `None` without any request.
    pub fn quantile_ns(&self, thousandths: u64) -> Option<u64> {
        let count = self.count();
        let rank = (u128::from(count) * u128::from(thousandths)).div_ceil(1000).max(1);
        let mut below = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            below += u128::from(*count);
            if below >= rank {
                return Some(bucket_end_ns(bucket).unwrap_or(2 * Scale::start(BUCKETS - 1)));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_latency_is_between_the_ends_of_its_bucket(ns: u64, shift in 0u32..64) {
            let ns = ns >> shift;
            let bucket = Scale::bucket(ns);
            prop_assert!(bucket_end_ns(bucket).is_none_or(|end| ns < end));
            prop_assert!(bucket == 0 || bucket_end_ns(bucket - 1).is_some_and(|end| ns >= end));
        }

        #[test]
        fn quantiles_are_within_an_eighth(mut all in prop::collection::vec(256u64..1 << 34, 1..200), thousandths in 0u64..=1000) {
            let histogram = Histogram::default();
            all.iter().for_each(|ns| histogram.record(*ns, 1));
            all.sort_unstable();
            let rank = (all.len() * thousandths as usize).div_ceil(1000).max(1);
            let (exact, said) = (all[rank - 1], histogram.read().quantile_ns(thousandths).unwrap());
            prop_assert!(said > exact && said - exact <= exact / 8 + 1, "{said} for {exact}");
        }
    }

    #[test]
    fn buckets_end_where_metrics_say() {
        let ends: Vec<u64> = (0..BUCKETS).map_while(bucket_end_ns).collect();
        assert_eq!((ends.len(), ends[0], ends[BUCKETS - 2]), (BUCKETS - 1, 256, 1 << 34));
    }

    #[test]
    fn counts_add_up() {
        let (one, other) = (Histogram::default(), Histogram::default());
        one.record(1000, 3);
        other.record(5_000_000, 2);
        let mut sum = one.read();
        sum.add(&other.read());
        assert_eq!((sum.count(), sum.sum_ns), (5, 10_003_000));
        assert_eq!((sum.count_below(1024), sum.count_below(1023), sum.count_below(u64::MAX)), (3, 0, 5));
        assert_eq!(Latencies::default().quantile_ns(500), None);
    }
}
