//! The times of a worker, for other threads.

use crate::clock::Nanos;
use kickless_device::Count;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The times that a worker has spent on work and on looking for work. The worker writes them.
#[derive(Debug)]
pub(crate) struct Times {
    /// The time at which the worker was made.
    start: Nanos,
    work: Count,
    looking: Count,
    /// The time up to which the others account for the time of the worker.
    until: AtomicU64,
    is_asleep: AtomicBool,
    /// The longest time asleep that a reader was told. It is for readers alone.
    told_asleep: AtomicU64,
}

/// The times of a worker in nanoseconds. They never decrease, and add up to its age.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerTimes {
    /// The time in which it served requests or completions.
    pub work_ns: u64,
    /// The time in which it polled and found nothing.
    pub looking_ns: u64,
    /// The time in which it slept.
    pub asleep_ns: u64,
}

impl Times {
    pub(crate) fn new(start: Nanos) -> Self {
        Self {
            start,
            work: Count::default(),
            looking: Count::default(),
            until: AtomicU64::new(start),
            is_asleep: AtomicBool::new(false),
            told_asleep: AtomicU64::new(0),
        }
    }

    /// Adds time that ends at `until`. Only the worker calls this.
    #[inline]
    pub(crate) fn account(&self, work: Nanos, looking: Nanos, until: Nanos) {
        self.work.add(work);
        self.looking.add(looking);
        self.until.store(until, Ordering::Relaxed);
    }

    /// Notes that the worker sleeps from now on, or not any more. Only the worker calls this.
    pub(crate) fn set_asleep(&self, is_asleep: bool) {
        self.is_asleep.store(is_asleep, Ordering::Relaxed);
    }

    /// Returns the times up to `now`, for a worker that sleeps, or up to its last turn.
    ///
    /// The values are read one after the other, and may be of different turns. The time asleep is what the
    /// others leave. So it can come out longer than it is by the length of a turn. It then stays the same
    /// until that is true.
    pub(crate) fn read(&self, now: Nanos) -> WorkerTimes {
        let is_asleep = self.is_asleep.load(Ordering::Relaxed);
        let until = if is_asleep { now } else { self.until.load(Ordering::Relaxed) };
        let (work_ns, looking_ns) = (self.work.get(), self.looking.get());
        let asleep_ns = until.saturating_sub(self.start).saturating_sub(work_ns + looking_ns);
        let asleep_ns = self.told_asleep.fetch_max(asleep_ns, Ordering::Relaxed).max(asleep_ns);
        WorkerTimes { work_ns, looking_ns, asleep_ns }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_times_add_up_and_never_decrease() {
        let times = Times::new(100);
        times.account(30, 20, 150);
        assert_eq!(times.read(1000), WorkerTimes { work_ns: 30, looking_ns: 20, asleep_ns: 0 });
        times.set_asleep(true);
        assert_eq!(times.read(1000), WorkerTimes { work_ns: 30, looking_ns: 20, asleep_ns: 850 });
        times.set_asleep(false);
        // The end of the sleep is not accounted for yet.
        assert_eq!(times.read(1100).asleep_ns, 850);
        times.account(0, 0, 1200);
        assert_eq!(times.read(1200), WorkerTimes { work_ns: 30, looking_ns: 20, asleep_ns: 1050 });
    }
}
