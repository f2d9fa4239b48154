//! How long waits have been, and how long it pays to spin for such.
//!
//! To spin is to rent, to sleep is to buy: the ski-rental problem. Without any knowledge, spinning for as long as sleeping
//! costs is never more than twice as bad as the best that hindsight could do, and nothing deterministic does better (Karlin,
//! Manasse, Rudolph and Sleator 1988). With the distribution of waits W known, the best limit is the t that makes
//! E\[min(W, t)\] + P(W > t) C smallest, C being what sleeping costs (Karlin, Manasse, McGeoch and Owicki, "Competitive
//! randomized algorithms for non-uniform problems", SODA 1990, Algorithmica 1994). That taking the distribution from the recent
//! past comes close to it was measured for locks by Karlin, Li, Manasse and Owicki ("Empirical studies of competitive spinning
//! for a shared-memory multiprocessor", SOSP 1991).

use super::Nanos;

/// The first bucket ends at 2^9 ns, half a microsecond: one look or two.
const FIRST: u32 = 9;
/// Buckets for each doubling: 2^2.
const FINE: u32 = 2;
/// The last bucket but one ends at 2^21 ns, two milliseconds, which is more than any sleep costs.
const DOUBLINGS: u32 = 12;
/// The first, and one more for what is longer than all.
const BUCKETS: usize = (DOUBLINGS << FINE) as usize + 2;
/// All are halved at so many, so that the last few hundred waits are what counts.
const FULL: u32 = 256;
/// So few say nothing.
const FEW: u32 = 4;

/// Waits of the recent past on a logarithmic scale.
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

/// Which bucket a wait belongs to.
fn bucket(wait: Nanos) -> usize {
    if wait < 1 << FIRST {
        return 0;
    }
    let log = wait.ilog2();
    let part = (wait >> (log - FINE)) as u32 & ((1 << FINE) - 1);
    let number = 1 + ((log - FIRST) << FINE) + part;
    (number as usize).min(BUCKETS - 1)
}

/// Where a bucket begins; the last has no end.
fn start(bucket: usize) -> Nanos {
    let Some(number) = (bucket as u32).checked_sub(1) else { return 0 };
    let (log, part) = (FIRST + (number >> FINE), number & ((1 << FINE) - 1));
    (1 << log) + (Nanos::from(part) << (log - FINE))
}

impl Waits {
    pub(super) fn record(&mut self, wait: Nanos) {
        if self.total >= FULL {
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

    /// At least half of all waits ended within `time`.
    pub(super) fn mostly_within(&self, time: Nanos) -> bool {
        let within: u32 = self.counts[..bucket(time)].iter().copied().map(u32::from).sum();
        within * 2 >= self.total
    }

    /// How long to spin for a wait if sleeping costs `cost`. The shortest of several equally good ones.
    pub(super) fn limit(&self, cost: Nanos) -> Nanos {
        if self.total < FEW {
            return cost;
        }
        // No sum overflows: 256 waits of at most 2 ms, and a cost of at most a second.
        let cost = cost.min(1_000_000_000);
        let (mut best, mut least) = (0, Nanos::from(self.total) * cost);
        // Waits that have ended by the end of the bucket, and the time spun for them.
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
                // Of what is longer than nearly all that was seen, nothing is known: from there on as without history.
                if Nanos::from(self.total) - ended < Nanos::from(FEW) {
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
        assert_eq!(of(&[(1_000_000, FEW - 1)]).limit(40_000), 40_000);
        assert_ne!(of(&[(1_000_000, FEW)]).limit(40_000), 40_000);
    }

    #[test]
    fn spins_through_short_waits_and_not_for_long_ones() {
        let short = of(&[(10_000, 90), (500_000, FEW)]).limit(40_000);
        assert!((10_001..=13_000).contains(&short), "{short}");
        // With hardly a longer one, as long again as sleeping costs.
        assert_eq!(of(&[(10_000, 90), (Nanos::MAX, FEW - 1)]).limit(40_000), short + 40_000);
        assert_eq!(of(&[(10_000, 100)]).limit(40_000), short + 40_000);
        assert_eq!(of(&[(60_000, 100)]).limit(40_000), 0);
        assert_eq!(of(&[(Nanos::MAX, 100)]).limit(40_000), 0);
        // One in ten that is long does not spoil it; nine do.
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
    fn what_was_long_ago_is_forgotten() {
        let mut waits = of(&[(Nanos::MAX, 10_000)]);
        (0..4 * FULL).for_each(|_| waits.record(5_000));
        assert!(waits.limit(40_000) > 5_000);
        assert!(waits.total <= FULL);
    }
}
