//! A token bucket that several workers share.
//!
//! The bucket is kept as one point in time, the *horizon*: the time at which it would be full again. Each
//! unit moves the horizon by the time that the rate needs for one. The bucket holds tokens as long as the
//! horizon is not further ahead than the time that a full bucket stands for.
//!
//! A request is admitted while the bucket holds anything, and charged afterwards, when its size is known. The
//! bucket can then be in debt, which later requests wait for. So the rate is exact over time, whatever the
//! sizes are, and a request that is larger than the bucket is admitted too.
//!
//! A bucket that holds exactly nothing admits one more request, which is then its debt. So a burst has one
//! more request than the bucket has units. This happens once after a pause. It adds 0.1 % to ten seconds at
//! 100 requests a second, and less at higher rates.
//!
//! Several workers may admit a request each before they are charged. Each of these requests is charged, so
//! only the moment differs.

use std::sync::atomic::{AtomicU64, Ordering};

/// Ticks in a nanosecond. A unit of 333.3 ns is rounded by 0.01 % at most then, and the clock of ticks
/// overflows after 36 years.
const TICKS_PER_NS: u64 = 16;
const TICKS_PER_S: u128 = 1_000_000_000 * TICKS_PER_NS as u128;

/// A rate, and the units that can be taken at once after a pause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rate {
    /// Units in a second. 0 stands for no limit.
    pub per_second: u64,
    /// Units that a full bucket holds.
    pub burst: u64,
}

/// A token bucket. All times are nanoseconds of one clock.
#[derive(Debug, Default)]
pub(crate) struct Bucket {
    /// Units in a second, or 0 for no limit.
    per_second: AtomicU64,
    /// The ticks that a full bucket stands for.
    depth: AtomicU64,
    /// The time at which the bucket would be full again, in ticks.
    horizon: AtomicU64,
}

impl Bucket {
    /// Changes the rate. The bucket is full afterwards, so that no debt at an old rate lasts.
    pub(crate) fn set(&self, rate: Rate) {
        let depth = if rate.per_second == 0 { 0 } else { ticks(rate.burst, rate.per_second) };
        self.depth.store(depth, Ordering::Relaxed);
        self.horizon.store(0, Ordering::Relaxed);
        self.per_second.store(rate.per_second, Ordering::Relaxed);
    }

    /// Returns the time at which the bucket holds a unit, or `None` if it does now.
    pub(crate) fn wait_until(&self, now_ns: u64) -> Option<u64> {
        let latest = ticks_of(now_ns).saturating_add(self.depth.load(Ordering::Relaxed));
        let over = self.horizon.load(Ordering::Relaxed).saturating_sub(latest);
        // Rounded up: a task that is woken earlier would wait again.
        (over > 0).then(|| now_ns.saturating_add(over.div_ceil(TICKS_PER_NS)))
    }

    /// Returns the number of units that the bucket holds. `u64::MAX` without a limit.
    pub(crate) fn units(&self, now_ns: u64) -> u64 {
        let per_second = self.per_second.load(Ordering::Relaxed);
        if per_second == 0 {
            return u64::MAX;
        }
        let now = ticks_of(now_ns);
        let latest = now.saturating_add(self.depth.load(Ordering::Relaxed));
        let held = latest.saturating_sub(self.horizon.load(Ordering::Relaxed).max(now));
        u64::try_from(u128::from(held) * u128::from(per_second) / TICKS_PER_S).unwrap_or(u64::MAX)
    }

    /// Returns the nanoseconds after which the bucket is full. 0 without a limit.
    pub(crate) fn until_full(&self, now_ns: u64) -> u64 {
        match self.per_second.load(Ordering::Relaxed) {
            0 => 0,
            _ => self.horizon.load(Ordering::Relaxed).saturating_sub(ticks_of(now_ns)) / TICKS_PER_NS,
        }
    }

    /// Makes the bucket full after these nanoseconds.
    pub(crate) fn set_until_full(&self, ns: u64, now_ns: u64) {
        self.horizon.store(ticks_of(now_ns.saturating_add(ns)), Ordering::Relaxed);
    }

    /// Takes units, more than there are if need be.
    pub(crate) fn charge(&self, units: u64, now_ns: u64) {
        let per_second = self.per_second.load(Ordering::Relaxed);
        if per_second == 0 || units == 0 {
            return;
        }
        let (now, cost) = (ticks_of(now_ns), ticks(units, per_second));
        let add = |horizon: u64| Some(horizon.max(now).saturating_add(cost));
        // The closure always returns a value. No other data depends on the order.
        let _ = self.horizon.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }
}

fn ticks_of(ns: u64) -> u64 {
    ns.saturating_mul(TICKS_PER_NS)
}

/// Returns the ticks in which `per_second` yields `units`.
fn ticks(units: u64, per_second: u64) -> u64 {
    u64::try_from(u128::from(units) * TICKS_PER_S / u128::from(per_second)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn bucket(per_second: u64, burst: u64) -> Bucket {
        let bucket = Bucket::default();
        bucket.set(Rate { per_second, burst });
        bucket
    }

    /// Takes as much as the bucket admits, and returns the units until `end`. A task that waits is woken
    /// `late` nanoseconds after the computed time.
    fn taken(bucket: &Bucket, units: u64, end: u64, late: u64) -> u64 {
        let (mut now, mut sum) = (SECOND, 0);
        while now < SECOND + end {
            match bucket.wait_until(now) {
                Some(until) => {
                    assert!(until > now);
                    now = until + late;
                }
                None => {
                    bucket.charge(units, now);
                    sum += units;
                }
            }
        }
        sum
    }

    proptest! {
        #[test]
        fn the_rate_is_exact_over_ten_seconds(
            per_second in 100u64..20_000_000,
            units in 1u64..5000,
            late in 0u64..1_000_000,
        ) {
            // At most two million requests, which the test carries out one by one.
            let units = units.max(per_second / 200_000);
            let burst = per_second / 10;
            let sum = taken(&bucket(per_second, burst), units, 10 * SECOND, late);
            // A full bucket at the beginning, and a debt of one request at the end.
            let (least, most) = (10 * per_second, 10 * per_second + burst + units);
            // The cost of each request is rounded down, by less than a tick.
            let requests = u128::from(sum / units + 1);
            let rounded = u64::try_from(requests * u128::from(per_second) / TICKS_PER_S).unwrap() + 1;
            prop_assert!(sum + units + per_second / 500 >= least, "{sum} of {least}");
            prop_assert!(sum <= most + rounded, "{sum} of {most}");
        }

        #[test]
        fn a_wait_ends_when_it_says(per_second in 1u64..10_000_000, units in 1u64..100_000, now in 0u64..1 << 59) {
            let bucket = bucket(per_second, 1);
            bucket.charge(units, now);
            bucket.charge(units, now);
            if let Some(until) = bucket.wait_until(now) {
                prop_assert_eq!(bucket.wait_until(until), None);
                prop_assert!(bucket.wait_until(until - 1).is_some());
            }
        }

        #[test]
        fn nothing_overflows(per_second: u64, burst: u64, units: u64, now: u64) {
            let bucket = bucket(per_second, burst);
            for _ in 0..3 {
                bucket.charge(units, now);
                let _ = bucket.wait_until(now);
            }
        }
    }

    /// A burst is one request longer than the bucket is deep, and only the first one.
    #[test]
    fn a_burst_has_one_request_more() {
        let bucket = bucket(100, 10);
        assert_eq!(taken(&bucket, 1, 1, 0), 11);
        assert_eq!(taken(&bucket, 1, 10 * SECOND, 0), 999);
    }

    #[test]
    fn without_a_limit_nothing_waits() {
        let bucket = bucket(0, 0);
        bucket.charge(u64::MAX, 5);
        assert_eq!(bucket.wait_until(5), None);
    }

    #[test]
    fn a_changed_rate_forgives_the_debt() {
        let bucket = bucket(1, 1);
        bucket.charge(1000, 0);
        assert!(bucket.wait_until(0) > Some(900 * SECOND));
        bucket.set(Rate { per_second: 2, burst: 1 });
        assert_eq!(bucket.wait_until(0), None);
    }

    #[test]
    fn workers_that_charge_at_once_lose_nothing() {
        let bucket = &bucket(1000, 1);
        std::thread::scope(|scope| {
            (0..4).for_each(|_| drop(scope.spawn(|| (0..1000).for_each(|_| bucket.charge(1, 0)))));
        });
        // 4000 units at 1000 a second, of which one was there.
        assert_eq!(bucket.wait_until(0), Some(4 * SECOND - SECOND / 1000));
    }
}
