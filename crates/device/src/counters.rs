//! Counters of a virtqueue.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// A count that one thread writes and any thread reads.
#[derive(Debug, Default)]
pub struct Count(AtomicU64);

impl Count {
    /// Makes a count of 0.
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Adds `n`. Only the thread that owns the count may call this, because the load and the store are two
    /// steps.
    pub fn add(&self, n: u64) {
        self.0.store(self.0.load(Ordering::Relaxed) + n, Ordering::Relaxed);
    }

    /// Sets the count, on the condition of [`Count::add`].
    pub fn set(&self, n: u64) {
        self.0.store(n, Ordering::Relaxed);
    }

    /// Returns the count as last written.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Makes the struct and its list of names for the log from one list of fields.
macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The counters of one virtqueue, written by its worker. A restart of the queue does not reset them.
        #[derive(Debug, Default)]
        pub struct Counters {
            $($(#[$doc])* pub $name: Count,)*
        }

        impl Counters {
            /// Returns each counter's name and value, in the order of the fields.
            pub fn each(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name.get()),)*].into_iter()
            }

            /// Sets the counter of this name, as another process has counted. Does nothing for a name that is
            /// not known. The queue does not run.
            pub fn set(&self, name: &str, value: u64) {
                match name {
                    $(stringify!($name) => self.$name.set(value),)*
                    _ => {}
                }
            }
        }
    };
}

counters! {
    /// Chains taken out of the ring.
    requests,
    /// The part of these that an earlier process had taken out and not answered.
    resubmitted,
    /// Requests that were answered with an error.
    errors,
    /// Wake-ups by the driver's kick. Kicks that come while the worker serves the queue count as one.
    kicks,
    /// Kicks after which the worker found nothing to do.
    kicks_in_vain,
    /// Waits for work that polling ended while kicks were disabled. Without polling, each would have caused a
    /// kick.
    kicks_avoided,
    /// Nanoseconds in which the queue waited for no notification: its worker polled it, napped, or waited for
    /// room. Updated when this state changes, and ten times a second while the worker is awake.
    polled_ns,
    /// Nanoseconds in which the queue waited for a notification: a kick, or, with kicks disabled, an event of
    /// the task's far side. Updated at the same times.
    notified_ns,
    /// Nanoseconds in which requests waited in the ring because a limit was reached.
    throttled_ns,
    /// Moves of the queue from one worker to another.
    moves,
    /// Visits of this queue in which the kernel blocked the worker for long, as far as the worker watched.
    stalls,
    /// Calls sent to the driver.
    calls,
    /// Batches of completions for which the driver wanted no call.
    calls_suppressed,
    /// Times that the ring broke, because of its driver or because its memory was taken away.
    broken,
    /// Polls of the ring that found work.
    polls_with_work,
    /// Polls of the ring that found none.
    polls_without_work,
}

/// Writes `name=value` for each counter, separated by spaces.
impl fmt::Display for Counters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, (name, value)) in self.each().enumerate() {
            let space = if n == 0 { "" } else { " " };
            write!(f, "{space}{name}={value}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_shows_all_counters() {
        let counters = Counters::default();
        counters.requests.add(7);
        counters.polls_without_work.add(9);
        let shown = counters.to_string();
        assert!(
            shown.starts_with("requests=7 resubmitted=0 errors=0 ")
                && shown.ends_with(" polls_without_work=9"),
            "{shown}"
        );
        assert_eq!(shown.split(' ').count(), counters.each().count());
    }
}
