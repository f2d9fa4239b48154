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

    /// Returns whether at least half of all waits ended within `time`.
    pub(super) fn mostly_within(&self, time: Nanos) -> bool {
        let within: u32 = self.counts[..bucket(time)].iter().copied().map(u32::from).sum();
        within * 2 >= self.total
    }

    /// Returns the time to spin for a wait if a sleep costs `cost`. Of equally good limits, the shortest.
    pub(super) fn limit(&self, cost: Nanos) -> Nanos {
        if self.total < WAITS_MIN {
            return cost;
        }
        // No sum overflows: there are 256 waits of at most 2 ms, and a cost of at most a second.
        let cost = cost.min(1_000_000_000);
        let (mut best, mut least) = (0, Nanos::from(self.total) * cost);
        // The waits that have ended by the end of the bucket, and the time spun for them.
        let (mut ended, mut spun) = (0, 0);
        for (number, &count) in self.counts[..BUCKETS - 1].iter().enumerate() {
            if count == 0 {
                continue;
            }
            let (begin, end) = (start(number), start(number + 1));
            ended += Nanos::from(count);
            spun += Nanos::from(count) * (begin + end) / 2;
            let all = spun + (Nanos::from(self.total) - ended) * (end + cost);
            if all < least {
                (best, least) = (end, all);
                // The history says nothing about waits longer than nearly all of it. From there on, spin as
                // without history.
                if Nanos::from(self.total) - ended < Nanos::from(WAITS_MIN) {
                    best += cost;
                }
            }
        }
        best
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
        assert_eq!(Waits::default().limit(40_000), 40_000);
        assert_eq!(of(&[(1_000_000, WAITS_MIN - 1)]).limit(40_000), 40_000);
        assert_ne!(of(&[(1_000_000, WAITS_MIN)]).limit(40_000), 40_000);
    }

    #[test]
    fn spins_through_short_waits_and_not_for_long_ones() {
        let short = of(&[(10_000, 90), (500_000, WAITS_MIN)]).limit(40_000);
        assert!((10_001..=13_000).contains(&short), "{short}");
        // With hardly any longer wait, spin longer by the cost of a sleep.
        assert_eq!(of(&[(10_000, 90), (Nanos::MAX, WAITS_MIN - 1)]).limit(40_000), short + 40_000);
        assert_eq!(of(&[(10_000, 100)]).limit(40_000), short + 40_000);
        assert_eq!(of(&[(60_000, 100)]).limit(40_000), 0);
        assert_eq!(of(&[(Nanos::MAX, 100)]).limit(40_000), 0);
        // One long wait in ten changes nothing. Nine change it.
        assert_eq!(of(&[(10_000, 90), (5_000_000, 10)]).limit(40_000), short);
        assert_eq!(of(&[(10_000, 10), (5_000_000, 90)]).limit(40_000), 0);
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
                let ours = spent(of(waits).limit(cost));
                assert!(ours <= best + best / 8, "{waits:?} at {cost}: {ours} against {best}");
            }
        }
    }

    #[test]
    fn half_of_them_within_a_time() {
        let waits = of(&[(10_000, 50), (100_000, 50)]);
        assert!(waits.mostly_within(20_000));
        assert!(!waits.mostly_within(9_000));
        assert!(!of(&[(10_000, 49), (100_000, 50)]).mostly_within(20_000));
        assert!(of(&[(10_000, 49), (100_000, 50)]).mostly_within(200_000));
    }

    #[test]
    fn old_waits_are_forgotten() {
        let mut waits = of(&[(Nanos::MAX, 10_000)]);
        (0..4 * TOTAL_MAX).for_each(|_| waits.record(5_000));
        assert!(waits.limit(40_000) > 5_000);
        assert!(waits.total <= TOTAL_MAX);
    }
}
