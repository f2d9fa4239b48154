//! What a queue counts.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// A count that one thread writes and any thread reads.
#[derive(Debug, Default)]
pub struct Count(AtomicU64);

impl Count {
    /// Adds `n`. Only the one thread that owns the count may: the load and the store are no atomic step.
    #[inline]
    pub fn add(&self, n: u64) {
        self.0.store(self.0.load(Ordering::Relaxed) + n, Ordering::Relaxed);
    }

    /// The count as last written.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The counters of one virtqueue, written by its worker. They go on from one start of the queue to the next.
#[derive(Debug, Default)]
pub struct Counters {
    /// Chains taken out of the ring.
    pub requests: Count,
    /// Wake-ups by the driver's kick. Kicks that came while the queue was being served are folded into one.
    pub kicks: Count,
    /// Kicks that came although there was nothing to do.
    pub kicks_in_vain: Count,
    /// Waits for work that ended with a look at the ring, kicks being disabled: without polling each would have drawn a kick.
    pub kicks_avoided: Count,
    /// Nanoseconds with kicks disabled, as of the last time that they were enabled or, if later, of the last tenth of a second in
    /// which the worker was awake.
    pub polled_ns: Count,
    /// Nanoseconds with kicks enabled, as of the same time.
    pub notified_ns: Count,
    /// Times that the queue went from one worker to another.
    pub moves: Count,
    /// Calls sent to the driver.
    pub calls: Count,
    /// Batches of completions of which the driver did not want to be told.
    pub calls_suppressed: Count,
    /// Looks at the ring that found work.
    pub polls_with_work: Count,
    /// Looks at the ring that found none.
    pub polls_without_work: Count,
    /// Requests that were answered with an error.
    pub errors: Count,
}

impl fmt::Display for Counters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "requests={} kicks={} kicks_in_vain={} kicks_avoided={} polled_ns={} notified_ns={} moves={} calls={} \
             calls_suppressed={} polls_with_work={} polls_without_work={} errors={}",
            self.requests.get(),
            self.kicks.get(),
            self.kicks_in_vain.get(),
            self.kicks_avoided.get(),
            self.polled_ns.get(),
            self.notified_ns.get(),
            self.moves.get(),
            self.calls.get(),
            self.calls_suppressed.get(),
            self.polls_with_work.get(),
            self.polls_without_work.get(),
            self.errors.get()
        )
    }
}
