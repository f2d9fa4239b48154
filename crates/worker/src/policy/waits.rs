//! The lengths of recent waits, and the time worth spinning for them.
//!
//! Spinning costs time as long as it lasts, and a sleep has a fixed cost. This is the ski-rental problem.
//! Without any knowledge, a good limit for spinning is the cost of a sleep. It never costs more than twice as
//! much as the best choice in hindsight, and no deterministic rule does better (Karlin, Manasse, Rudolph and
//! Sleator 1988). With a known
//! distribution of waits W, the best limit is the t that makes E\[min(W, t)\] + P(W > t) C smallest. C is the
//! cost of a sleep (Karlin, Manasse, McGeoch and Owicki, "Competitive randomized algorithms for non-uniform
//! problems", SODA 1990, Algorithmica 1994). The distribution of the recent past comes close to this, as
//! Karlin, Li, Manasse and Owicki measured for locks ("Empirical studies of competitive spinning for a
//! shared-memory multiprocessor", SOSP 1991).

use super::Nanos;
use kickless_device::LogScale;

/// The first bucket ends at 2^9 ns, half a microsecond: one or two polls of a ring. The last one begins at
/// 2^21 ns, two milliseconds, which is more than any sleep costs. There are 2^2 for each doubling.
type Scale = LogScale<9, 21, 2>;
/// The total at which all counts are halved, so that the last few hundred waits count most.
const TOTAL_MAX: u32 = 256;
/// The number of waits below which the history is too short to use.
const WAITS_MIN: u32 = 4;

/// A histogram of recent waits on a logarithmic scale.
#[derive(Debug)]
pub(super) struct Waits {
    counts: [u16; Scale::BUCKETS],
    total: u32,
}

impl Default for Waits {
    fn default() -> Self {
        Self { counts: [0; Scale::BUCKETS], total: 0 }
    }
}

impl Waits {
    pub(super) fn record(&mut self, wait: Nanos) {
        if self.total >= TOTAL_MAX {
            self.counts.iter_mut().for_each(|count| *count /= 2);
            self.total = self.counts.iter().map(|&count| u32::from(count)).sum();
        }
        self.counts[Scale::bucket(wait)] += 1;
        self.total += 1;
    }

    /// Returns the cheapest way to wait if a sleep costs `cost` and then adds `wake` to the wait: the time to
    /// spin before the sleep, and the cost of this way as a share of all waiting time.
    pub(super) fn best(&self, cost: Nanos, wake: Nanos) -> (Nanos, f64) {
        if self.total < WAITS_MIN {
            return (cost, 0.0);
        }
        // No sum overflows: there are 256 waits of at most 2 ms, and a cost and a wake of at most a second.
        let total = Nanos::from(self.total);
        let (mut limit, mut least, mut sleeps) = (0, total * cost, total);
        // The waits that have ended by the end of the bucket, and the time spun for them.
        let (mut ended, mut spun) = (0, 0);
        let buckets = self.counts[..Scale::BUCKETS - 1].iter().enumerate();
        for (number, &count) in buckets.filter(|(_, count)| **count > 0) {
            let (begin, end) = (Scale::start(number), Scale::start(number + 1));
            ended += Nanos::from(count);
            spun += Nanos::from(count) * (begin + end) / 2;
            let longer = total - ended;
            let all = spun + longer * (end + cost);
            if all < least {
                (limit, least, sleeps) = (end, all, longer);
                // The history says nothing about waits longer than nearly all of it. From there on, spin as
                // without history.
                if longer < Nanos::from(WAITS_MIN) {
                    limit += cost;
                }
            }
        }
        let waited = spun + (total - ended) * Scale::start(Scale::BUCKETS - 1);
        (limit, least as f64 / (waited + sleeps * wake).max(1) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(waits: &[(Nanos, u32)]) -> Waits {
        let mut all = Waits::default();
        for &(wait, times) in waits {
            (0..times).for_each(|_| all.record(wait));
        }
        all
    }

    #[test]
    fn without_history_as_long_as_sleeping_costs() {
        assert_eq!(Waits::default().best(40_000, 0).0, 40_000);
        assert_eq!(of(&[(1_000_000, WAITS_MIN - 1)]).best(40_000, 0).0, 40_000);
        assert_ne!(of(&[(1_000_000, WAITS_MIN)]).best(40_000, 0).0, 40_000);
    }

    #[test]
    fn spins_through_short_waits_and_not_for_long_ones() {
        let short = of(&[(10_000, 90), (500_000, WAITS_MIN)]).best(40_000, 0).0;
        assert!((10_001..=13_000).contains(&short), "{short}");
        // With hardly any longer wait, spin longer by the cost of a sleep.
        assert_eq!(of(&[(10_000, 90), (Nanos::MAX, WAITS_MIN - 1)]).best(40_000, 0).0, short + 40_000);
        assert_eq!(of(&[(10_000, 100)]).best(40_000, 0).0, short + 40_000);
        assert_eq!(of(&[(60_000, 100)]).best(40_000, 0).0, 0);
        assert_eq!(of(&[(Nanos::MAX, 100)]).best(40_000, 0).0, 0);
        // One long wait in ten changes nothing. Nine change it.
        assert_eq!(of(&[(10_000, 90), (5_000_000, 10)]).best(40_000, 0).0, short);
        assert_eq!(of(&[(10_000, 10), (5_000_000, 90)]).best(40_000, 0).0, 0);
    }

    #[test]
    fn the_limit_costs_least_of_all_limits() {
        let kinds: [&[(Nanos, u32)]; 4] = [
            &[(3_000, 50), (30_000, 60), (300_000, 20)],
            &[(20_000, 20), (35_000, 70), (41_000, 30)],
            &[(600, 10), (900_000, 100)],
            &[(50_000, 40), (75_000, 40), (119_000, 40)],
        ];
        for waits in kinds {
            for cost in [8_000, 40_000, 130_000, 250_000] {
                let spent = |limit: Nanos| -> Nanos {
                    let each = |wait: Nanos| if wait < limit { wait } else { limit + cost };
                    waits.iter().map(|&(wait, times)| each(wait) * Nanos::from(times)).sum()
                };
                let best = (0..2_000).map(|limit| spent(limit * 1_000)).min().unwrap();
                let ours = spent(of(waits).best(cost, 0).0);
                assert!(ours <= best + best / 8, "{waits:?} at {cost}: {ours} against {best}");
            }
        }
    }

    #[test]
    fn old_waits_are_forgotten() {
        let mut waits = of(&[(Nanos::MAX, 10_000)]);
        (0..4 * TOTAL_MAX).for_each(|_| waits.record(5_000));
        assert!(waits.best(40_000, 0).0 > 5_000);
        assert!(waits.total <= TOTAL_MAX);
    }
}
