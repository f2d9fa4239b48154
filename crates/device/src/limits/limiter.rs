//! The limits of a device, which its queues share.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use super::bucket::{Bucket, Rate};

/// The longest time for which a throttled task is not polled. A changed limit is in force after it.
const THROTTLE_NS_MAX: u64 = 100_000_000;

/// The shortest time for which a throttled task is not polled. Tokens gather meanwhile, so that a worker
/// wakes a thousand times a second at most for them, whatever the rate is. Nothing is lost, because a bucket
/// holds the tokens of a tenth of a second.
const THROTTLE_NS_MIN: u64 = 1_000_000;

/// The kinds of requests that are limited together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Data from the device to the driver.
    Read,
    /// Data from the driver to the device, and all other requests.
    Write,
}

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

/// Limits the requests of a device. Its queues share the limiter, on all workers.
///
/// A task asks before it pops a request, and charges the request afterwards. So requests wait in the ring,
/// and a task that stops waits for none of them. The type of a request is not known before it is popped. Any
/// bucket in debt therefore holds all requests of a queue.
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
    /// Returns the time in nanoseconds on the clock of this limiter, if there is any limit. A task asks once
    /// for each batch.
    #[inline]
    pub fn now_if_on(&self) -> Option<u64> {
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

    /// Returns the nanoseconds for which no request may be popped. `None`: one may be popped now.
    pub fn wait_ns(&self, now_ns: u64) -> Option<u64> {
        let all = self.requests.iter().chain(&self.bytes).flat_map(|Buckets(both)| both);
        let until = all.filter_map(|bucket| bucket.wait_until(now_ns)).max()?;
        Some((until - now_ns).clamp(THROTTLE_NS_MIN, THROTTLE_NS_MAX))
    }

    /// Returns the nanoseconds for which nothing may be carried in this direction. `None`: something may now.
    pub fn wait_ns_of(&self, direction: Direction, now_ns: u64) -> Option<u64> {
        let until = self.of(direction).filter_map(|bucket| bucket.wait_until(now_ns)).max()?;
        Some((until - now_ns).clamp(THROTTLE_NS_MIN, THROTTLE_NS_MAX))
    }

    /// Returns the number of units that may be carried in this direction without a debt of requests. At most
    /// `u32::MAX`.
    pub fn tokens(&self, direction: Direction, now_ns: u64) -> u32 {
        let requests = places(direction).into_iter().flat_map(|at| &self.requests[at].0);
        let tokens = requests.map(|bucket| bucket.units(now_ns)).min();
        tokens.map_or(u32::MAX, |tokens| u32::try_from(tokens).unwrap_or(u32::MAX))
    }

    /// Takes the tokens of a request that was popped.
    pub fn charge(&self, direction: Direction, bytes: u64, now_ns: u64) {
        let size = self.request_size.load(Ordering::Relaxed);
        let requests = bytes.checked_div(size).map_or(1, |_| bytes.div_ceil(size).max(1));
        self.charge_all(direction, requests, bytes, now_ns);
    }

    /// Takes the tokens of several requests with this number of bytes together.
    pub fn charge_all(&self, direction: Direction, requests: u64, bytes: u64, now_ns: u64) {
        for at in places(direction) {
            self.requests[at].0.iter().for_each(|bucket| bucket.charge(requests, now_ns));
            self.bytes[at].0.iter().for_each(|bucket| bucket.charge(bytes, now_ns));
        }
    }

    /// Returns the buckets of a direction.
    fn of(&self, direction: Direction) -> impl Iterator<Item = &Bucket> {
        let places = places(direction).into_iter();
        places.flat_map(|at| self.requests[at].0.iter().chain(&self.bytes[at].0))
    }
}

/// Returns the places of the limits of a direction: that of all requests, and its own.
fn places(direction: Direction) -> [usize; 2] {
    [0, if direction == Direction::Read { 1 } else { 2 }]
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn limit(per_second: u64, burst: u64) -> Limit {
        Limit { sustained: Rate { per_second, burst }, peak: Rate::default() }
    }

    /// Runs requests for a time, and returns their number.
    fn run(limiter: &Limiter, direction: Direction, bytes: u64, from: u64, to: u64) -> u64 {
        let (mut now, mut done) = (from, 0);
        while now < to {
            match limiter.wait_ns(now) {
                Some(wait_ns) => now += wait_ns,
                None => {
                    limiter.charge(direction, bytes, now);
                    done += 1;
                }
            }
        }
        done
    }

    #[test]
    fn reads_and_writes_have_limits_of_their_own() {
        let limiter = Limiter::default();
        assert!(limiter.now_if_on().is_none() && limiter.wait_ns(0).is_none());
        let requests = [Limit::default(), limit(1000, 100), limit(10, 1)];
        limiter.set(&Limits { requests, ..Limits::default() });
        assert!(limiter.now_if_on().is_some());
        // A full bucket at the beginning.
        assert!(run(&limiter, Direction::Read, 512, 0, SECOND).abs_diff(1100) <= 2);
        assert!(run(&limiter, Direction::Write, 512, SECOND, 11 * SECOND).abs_diff(100) <= 2);
        limiter.set(&Limits::default());
        assert!(limiter.now_if_on().is_none());
    }

    #[test]
    fn a_direction_waits_for_its_own_limits_only() {
        let limiter = Limiter::default();
        let requests = [Limit::default(), limit(1000, 100), Limit::default()];
        limiter.set(&Limits { requests, ..Limits::default() });
        assert_eq!(limiter.tokens(Direction::Write, SECOND), u32::MAX);
        assert_eq!(limiter.tokens(Direction::Read, SECOND), 100);
        limiter.charge_all(Direction::Read, 40, 0, SECOND);
        assert_eq!(
            (limiter.tokens(Direction::Read, SECOND), limiter.wait_ns_of(Direction::Read, SECOND)),
            (60, None)
        );
        limiter.charge_all(Direction::Read, 160, 0, SECOND);
        assert_eq!(limiter.tokens(Direction::Read, SECOND), 0);
        assert!(limiter.wait_ns_of(Direction::Read, SECOND).is_some());
        assert_eq!(limiter.wait_ns_of(Direction::Write, SECOND), None);
    }

    #[test]
    fn large_requests_count_as_several() {
        let limiter = Limiter::default();
        let limits = Limits { requests: [limit(1000, 100); 3], request_size: 4096, ..Limits::default() };
        limiter.set(&limits);
        assert!(run(&limiter, Direction::Read, 16384, 0, SECOND).abs_diff(275) <= 2);
        assert!(run(&limiter, Direction::Read, 0, SECOND, 2 * SECOND).abs_diff(1000) <= 6);
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
