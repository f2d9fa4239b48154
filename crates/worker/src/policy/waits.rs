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

/// The first bucket ends at 2^9 ns, half a microsecond: one or two polls of a ring.
const FIRST_LOG2: u32 = 9;
/// The number of buckets for each doubling: 2^2.
const BUCKETS_LOG2: u32 = 2;
/// The last bucket but one ends at 2^21 ns, two milliseconds, which is more than any sleep costs.
const DOUBLINGS: u32 = 12;
/// Two more: the first, and one for all longer waits.
const BUCKETS: usize = (DOUBLINGS << BUCKETS_LOG2) as usize + 2;
/// The total at which all counts are halved, so that the last few hundred waits count most.
const TOTAL_MAX: u32 = 256;
/// The number of waits below which the history is too short to use.
const WAITS_MIN: u32 = 4;

/// The price of a way to wait that keeps the processor busy all the time.
pub(super) const PRICE_ONE: u64 = 1 << 20;
/// The highest cost of a sleep that is believed.
const COST_MAX: Nanos = 1_000_000_000;

/// The cheapest way to wait for the next event on one's own: spin for `limit`, and then sleep until a kick.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Notified {
    pub(super) limit: Nanos,
    /// The cost of this way: a share of all waiting time, of [`PRICE_ONE`].
    pub(super) price: u64,
}

/// A histogram of recent waits on a logarithmic scale.
#[derive(Debug)]
pub(super) struct Waits {
    counts: [u16; BUCKETS],
    total: u32,
}

impl Default for Waits {
    fn default() -> Self {
        Self { counts: [0; BUCKETS], total: 0 }
    }
}

/// Returns the bucket of a wait.
fn bucket(wait: Nanos) -> usize {
    if wait < 1 << FIRST_LOG2 {
        return 0;
    }
    let log = wait.ilog2();
    let part = (wait >> (log - BUCKETS_LOG2)) as u32 & ((1 << BUCKETS_LOG2) - 1);
    let number = 1 + ((log - FIRST_LOG2) << BUCKETS_LOG2) + part;
    (number as usize).min(BUCKETS - 1)
}

/// Returns the shortest wait of a bucket. The last bucket has no end.
fn start(bucket: usize) -> Nanos {
    let Some(number) = (bucket as u32).checked_sub(1) else { return 0 };
    let (log, part) = (FIRST_LOG2 + (number >> BUCKETS_LOG2), number & ((1 << BUCKETS_LOG2) - 1));
    (1 << log) + (Nanos::from(part) << (log - BUCKETS_LOG2))
}

impl Waits {
    pub(super) fn record(&mut self, wait: Nanos) {
        if self.total >= TOTAL_MAX {
            self.total = 0;
            for count in &mut self.counts {
                *count /= 2;
                self.total += u32::from(*count);
            }
        }
        if let Some(count) = self.counts.get_mut(bucket(wait)) {
            *count += 1;
            self.total += 1;
        }
    }

    /// Returns the cheapest way to wait if a sleep costs `cost` and then adds `wake` to the wait.
    pub(super) fn best(&self, cost: Nanos, wake: Nanos) -> Notified {
        if self.total < WAITS_MIN {
            return Notified { limit: cost, price: 0 };
        }
        // No sum overflows: there are 256 waits of at most 2 ms, and a cost and a wake of at most a second.
        let (cost, wake) = (cost.min(COST_MAX), wake.min(COST_MAX));
        let total = Nanos::from(self.total);
        let (mut limit, mut least, mut sleeps) = (0, total * cost, total);
        // The waits that have ended by the end of the bucket, and the time spun for them.
        let (mut ended, mut spun) = (0, 0);
        for (number, &count) in self.counts[..BUCKETS - 1].iter().enumerate() {
            if count == 0 {
                continue;
            }
            let (begin, end) = (start(number), start(number + 1));
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
        let waited = spun + (total - ended) * start(BUCKETS - 1);
        Notified { limit, price: least * PRICE_ONE / (waited + sleeps * wake).max(1) }
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
    fn buckets_cover_everything_in_order() {
        for number in 0..BUCKETS - 1 {
            assert!(start(number) < start(number + 1));
            assert_eq!(bucket(start(number)), number);
            assert_eq!(bucket(start(number + 1) - 1), number);
        }
        assert_eq!(start(BUCKETS - 1), 1 << 21);
        assert_eq!(bucket(Nanos::MAX), BUCKETS - 1);
    }

    #[test]
    fn without_history_as_long_as_sleeping_costs() {
        assert_eq!(Waits::default().best(40_000, 0).limit, 40_000);
        assert_eq!(of(&[(1_000_000, WAITS_MIN - 1)]).best(40_000, 0).limit, 40_000);
        assert_ne!(of(&[(1_000_000, WAITS_MIN)]).best(40_000, 0).limit, 40_000);
    }

    #[test]
    fn spins_through_short_waits_and_not_for_long_ones() {
        let short = of(&[(10_000, 90), (500_000, WAITS_MIN)]).best(40_000, 0).limit;
        assert!((10_001..=13_000).contains(&short), "{short}");
        // With hardly any longer wait, spin longer by the cost of a sleep.
        assert_eq!(of(&[(10_000, 90), (Nanos::MAX, WAITS_MIN - 1)]).best(40_000, 0).limit, short + 40_000);
        assert_eq!(of(&[(10_000, 100)]).best(40_000, 0).limit, short + 40_000);
        assert_eq!(of(&[(60_000, 100)]).best(40_000, 0).limit, 0);
        assert_eq!(of(&[(Nanos::MAX, 100)]).best(40_000, 0).limit, 0);
        // One long wait in ten changes nothing. Nine change it.
        assert_eq!(of(&[(10_000, 90), (5_000_000, 10)]).best(40_000, 0).limit, short);
        assert_eq!(of(&[(10_000, 10), (5_000_000, 90)]).best(40_000, 0).limit, 0);
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
                let ours = spent(of(waits).best(cost, 0).limit);
                assert!(ours <= best + best / 8, "{waits:?} at {cost}: {ours} against {best}");
            }
        }
    }

    #[test]
    fn old_waits_are_forgotten() {
        let mut waits = of(&[(Nanos::MAX, 10_000)]);
        (0..4 * TOTAL_MAX).for_each(|_| waits.record(5_000));
        assert!(waits.best(40_000, 0).limit > 5_000);
        assert!(waits.total <= TOTAL_MAX);
    }
}
