//! The limits of a device, which its queues share.

use std::iter;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use kickless_handover::Amounts;

use super::bucket::{Bucket, Rate};
use super::{Direction, Traffic};

/// The longest time for which a throttled task is not polled. A changed limit is in force after it.
const THROTTLE_NS_MAX: u64 = 100_000_000;

/// The shortest time for which a throttled task is not polled. Tokens gather meanwhile, so that a worker
/// wakes a thousand times a second at most for them, whatever the rate is. Nothing is lost, because a bucket
/// holds the tokens of a tenth of a second.
const THROTTLE_NS_MIN: u64 = 1_000_000;

/// The bytes of a request that cost as much as a request ([`QueueTask::poll`](crate::QueueTask::poll)).
const BYTES_PER_COST: u64 = 4096;

/// The limit of one quantity: of requests, or of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limit {
    /// The rate in the long run.
    pub sustained: Rate,
    /// The rate during a burst. 0 units in a second stand for no limit of bursts.
    pub peak: Rate,
}

/// The limits of requests and bytes, each for all requests, for reads and for writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Limits of requests: all, reads, writes.
    pub requests: [Limit; 3],
    /// Limits of bytes: all, reads, writes.
    pub bytes: [Limit; 3],
    /// A request counts as one for each of this number of bytes. 0: each request counts as one.
    pub request_size: u64,
}

/// Both rates of a [`Limit`].
#[derive(Debug, Default)]
struct Buckets([Bucket; 2]);

/// Limits the requests or frames of a device. Its queues share the limiter, on all workers.
///
/// The worker asks before it polls a task, and charges the requests of the poll afterwards
/// ([`Limiter::poll`]). So requests wait in the ring, and a task that stops waits for none of them. Workers
/// that poll tasks of one limiter at the same time may all use the tokens that are there. Each request is
/// charged, so only the moment differs.
#[derive(Debug)]
pub struct Limiter {
    /// The beginning of the clock of the buckets.
    start: Instant,
    is_on: AtomicBool,
    request_size: AtomicU64,
    requests: [Buckets; 3],
    bytes: [Buckets; 3],
}

/// Returns a limiter without limits.
impl Default for Limiter {
    fn default() -> Self {
        Self {
            start: Instant::now(),
            is_on: AtomicBool::default(),
            request_size: AtomicU64::default(),
            requests: Default::default(),
            bytes: Default::default(),
        }
    }
}

impl Limiter {
    /// Returns the time in nanoseconds on the clock of this limiter, if there is any limit.
    pub(super) fn now_if_on(&self) -> Option<u64> {
        if !self.is_on() {
            return None;
        }
        Some(u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    /// Returns whether there is any limit.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    /// Changes the limits. Debts are forgiven. Throttled tasks notice it within a tenth of a second.
    pub fn set(&self, limits: &Limits) {
        let all = [(&self.requests, &limits.requests), (&self.bytes, &limits.bytes)];
        for (Buckets([sustained, peak]), limit) in all.into_iter().flat_map(|(to, from)| to.iter().zip(from))
        {
            sustained.set(limit.sustained);
            peak.set(limit.peak);
        }
        self.request_size.store(limits.request_size, Ordering::Relaxed);
        self.is_on.store(*limits != Limits::default(), Ordering::Relaxed);
    }

    /// Returns the buckets with the names that they have for another process.
    fn named(&self) -> impl Iterator<Item = (String, &Bucket)> {
        let all = [("requests", &self.requests), ("bytes", &self.bytes)];
        let of_directions = all
            .into_iter()
            .flat_map(|(name, of)| iter::zip(["all", "reads", "writes"], of).map(move |at| (name, at)));
        of_directions.flat_map(|(name, (direction, Buckets([sustained, peak])))| {
            let rates = [("sustained", sustained), ("peak", peak)];
            rates.map(|(rate, bucket)| (format!("{name}-{direction}-{rate}"), bucket))
        })
    }

    /// Returns the nanoseconds after which each bucket is full, for another process. Leaves out full ones.
    pub fn until_full(&self) -> Amounts {
        let Some(now_ns) = self.now_if_on() else { return Amounts::new() };
        let all = self.named().map(|(name, bucket)| (name, bucket.until_full(now_ns)));
        all.filter(|(_, ns)| *ns > 0).collect()
    }

    /// Makes each bucket full after these nanoseconds, which another process has returned. The limits are
    /// set before.
    pub fn set_until_full(&self, of: &Amounts) {
        let Some(now_ns) = self.now_if_on() else { return };
        for (name, bucket) in self.named() {
            bucket.set_until_full(of.get(&name).copied().unwrap_or_default(), now_ns);
        }
    }

    /// Returns the nanoseconds for which nothing of this traffic may be popped. `None`: it may be popped now.
    pub(super) fn wait_ns(&self, traffic: Traffic, now_ns: u64) -> Option<u64> {
        let held =
            traffic.places().iter().flat_map(|at| self.requests[*at].0.iter().chain(&self.bytes[*at].0));
        let until = held.filter_map(|bucket| bucket.wait_until(now_ns)).max()?;
        Some((until - now_ns).clamp(THROTTLE_NS_MIN, THROTTLE_NS_MAX))
    }

    /// Returns the budget of a poll that uses up the tokens for this traffic, at least 1. The debt that it
    /// leaves is that of its last request, unless requests cost less than their bytes: those that run in
    /// steps report the cost of each step later.
    pub(super) fn budget(&self, traffic: Traffic, now_ns: u64) -> u32 {
        let units = |of: &[Buckets; 3]| {
            let buckets = traffic.places().iter().flat_map(|at| &of[*at].0);
            buckets.map(|bucket| bucket.units(now_ns)).min().unwrap_or(u64::MAX)
        };
        let requests = match self.request_size() {
            size @ 1..BYTES_PER_COST => units(&self.requests).saturating_mul(size) / BYTES_PER_COST,
            _ => units(&self.requests),
        };
        let budget = requests.min(units(&self.bytes) / BYTES_PER_COST);
        u32::try_from(budget).unwrap_or(u32::MAX).max(1)
    }

    /// Returns the number of bytes for which a request counts as one more. 0: each request counts as one.
    pub(super) fn request_size(&self) -> u64 {
        self.request_size.load(Ordering::Relaxed)
    }

    /// Takes the tokens of requests with this number of bytes together.
    pub(super) fn charge(&self, direction: Direction, requests: u64, bytes: u64, now_ns: u64) {
        for at in direction.places() {
            self.requests[*at].0.iter().for_each(|bucket| bucket.charge(requests, now_ns));
            self.bytes[*at].0.iter().for_each(|bucket| bucket.charge(bytes, now_ns));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::Allowance;

    const SECOND: u64 = 1_000_000_000;

    fn limit(per_second: u64, burst: u64) -> Limit {
        Limit { sustained: Rate { per_second, burst }, peak: Rate::default() }
    }

    /// Runs polls of requests of this length for a time, each until it has cost its budget. Returns their
    /// number.
    fn run(limiter: &Limiter, direction: Direction, bytes: u64, from: u64, to: u64) -> u64 {
        let (mut now, mut done) = (from, 0);
        while now < to {
            if let Some(wait_ns) = limiter.wait_ns(Traffic::Requests, now) {
                now += wait_ns;
                continue;
            }
            let allowance = Allowance::new(None, limiter.request_size());
            let (budget, mut cost) = (limiter.budget(Traffic::Requests, now).min(64), 0);
            while cost < u64::from(budget) {
                allowance.charge_request(direction, bytes);
                (cost, done) = (cost + 1 + bytes / BYTES_PER_COST, done + 1);
            }
            for (direction, requests, bytes) in allowance.carried() {
                limiter.charge(direction, requests, bytes, now);
            }
        }
        done
    }

    fn set(limiter: &Limiter, requests: [Limit; 3]) {
        limiter.set(&Limits { requests, ..Limits::default() });
    }

    #[test]
    fn another_process_goes_on_with_the_debts() {
        let limits = Limits { bytes: [limit(1000, 100); 3], ..Limits::default() };
        let (old, new) = (Limiter::default(), Limiter::default());
        old.set(&limits);
        new.set(&limits);
        assert_eq!(old.until_full(), Amounts::new());
        let now = || old.now_if_on().unwrap();
        // A full bucket, and a debt of 59.9 s.
        old.charge(Direction::Write, 1, 60_000, now());
        let debts = old.until_full();
        let names: Vec<_> = debts.keys().map(String::as_str).collect();
        assert_eq!(names, ["bytes-all-sustained", "bytes-writes-sustained"]);
        new.set_until_full(&debts);
        let waits = |limiter: &Limiter| {
            limiter.bytes[0].0[0].wait_until(limiter.now_if_on().unwrap()).unwrap()
                - limiter.now_if_on().unwrap()
        };
        assert!(waits(&old).abs_diff(waits(&new)) < SECOND);
        new.set_until_full(&Amounts::new());
        assert_eq!(new.until_full(), Amounts::new());
        new.set_until_full(&[("bytes-all-sustained".to_owned(), u64::MAX)].into());
        assert!(new.until_full()["bytes-all-sustained"] > 60 * SECOND);
    }

    #[test]
    fn reads_and_writes_have_limits_of_their_own() {
        let limiter = Limiter::default();
        assert!(limiter.now_if_on().is_none() && limiter.wait_ns(Traffic::Requests, 0).is_none());
        set(&limiter, [Limit::default(), limit(1000, 100), limit(10, 1)]);
        assert!(limiter.now_if_on().is_some());
        // A full bucket at the start.
        assert!(run(&limiter, Direction::Read, 512, 0, SECOND).abs_diff(1100) <= 2);
        assert!(run(&limiter, Direction::Write, 512, SECOND, 11 * SECOND).abs_diff(100) <= 2);
        limiter.set(&Limits::default());
        assert!(limiter.now_if_on().is_none());
        assert_eq!(limiter.budget(Traffic::Requests, SECOND), u32::MAX);
    }

    #[test]
    fn a_direction_waits_for_its_own_limits_only() {
        let limiter = Limiter::default();
        let [read, write] = [Direction::Read, Direction::Write].map(Traffic::Frames);
        set(&limiter, [Limit::default(), limit(1000, 100), Limit::default()]);
        assert_eq!(limiter.budget(write, SECOND), u32::MAX);
        assert_eq!([read, Traffic::Requests].map(|of| limiter.budget(of, SECOND)), [100; 2]);
        limiter.charge(Direction::Read, 40, 0, SECOND);
        assert_eq!((limiter.budget(read, SECOND), limiter.wait_ns(read, SECOND)), (60, None));
        limiter.charge(Direction::Read, 160, 0, SECOND);
        assert_eq!(limiter.budget(read, SECOND), 1, "a poll makes progress");
        assert!([read, Traffic::Requests].iter().all(|of| limiter.wait_ns(*of, SECOND).is_some()));
        assert_eq!(limiter.wait_ns(write, SECOND), None);
    }

    #[test]
    fn large_requests_count_as_several() {
        let limiter = Limiter::default();
        let limits = Limits { requests: [limit(1000, 100); 3], request_size: 4096, ..Limits::default() };
        limiter.set(&limits);
        assert!(run(&limiter, Direction::Read, 16384, 0, SECOND).abs_diff(275) <= 2);
        assert!(run(&limiter, Direction::Read, 0, SECOND, 2 * SECOND).abs_diff(1000) <= 6);
    }

    /// The debt is never more than one request leaves, whatever counts.
    #[test]
    fn a_poll_takes_no_more_than_there_is() {
        for (request_size, bytes) in
            [(0u64, 512u64), (512, 4096), (512, 4095), (4096, 9000), (65536, 1 << 20)]
        {
            for of_bytes in [false, true] {
                let limiter = Limiter::default();
                let unit = if request_size == 0 { 1 } else { bytes.div_ceil(request_size).max(1) };
                let (none, some) = ([Limit::default(); 3], |burst| [limit(1, burst); 3]);
                let (requests, bytes_max) =
                    if of_bytes { (none, some(10 * bytes)) } else { (some(10 * unit), none) };
                limiter.set(&Limits { requests, bytes: bytes_max, request_size });
                let served = run(&limiter, Direction::Write, bytes, SECOND, SECOND + 1);
                assert_eq!(served, 11, "{request_size} {bytes} {of_bytes}");
            }
        }
    }

    #[test]
    fn a_burst_has_its_own_rate_and_its_length() {
        let limiter = Limiter::default();
        // 1000 a second, and 5000 a second for two seconds.
        let burst = Limit {
            sustained: Rate { per_second: 1000, burst: 8000 },
            peak: Rate { per_second: 5000, burst: 500 },
        };
        limiter.set(&Limits { requests: [burst, Limit::default(), Limit::default()], ..Limits::default() });
        let second = |n: u64| run(&limiter, Direction::Read, 512, n * SECOND, (n + 1) * SECOND);
        let done: Vec<u64> = (0..4).map(second).collect();
        for (done, expected) in done.iter().zip([5500, 4500, 1000, 1000]) {
            assert!(done.abs_diff(expected) <= expected / 50, "{done} of {expected}");
        }
    }
}
