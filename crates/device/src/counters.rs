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

/// Makes the struct and, of the same list, what is logged.
macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The counters of one virtqueue, written by its worker. They go on from one start of the queue to the next.
        #[derive(Debug, Default)]
        pub struct Counters {
            $($(#[$doc])* pub $name: Count,)*
        }

        impl Counters {
            /// Each counter's name and value, in the order of the fields.
            pub fn each(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name.get()),)*].into_iter()
            }
        }
    };
}

counters! {
    /// Chains taken out of the ring.
    requests,
    /// Requests among them that an earlier process had taken out and not answered.
    resubmitted,
    /// Requests that were answered with an error.
    errors,
    /// Wake-ups by the driver's kick. Kicks that came while the queue was being served are folded into one.
    kicks,
    /// Kicks that came although there was nothing to do.
    kicks_in_vain,
    /// Waits for work that ended with a look at the ring, kicks being disabled: without polling each would have drawn a kick.
    kicks_avoided,
    /// Nanoseconds in which the queue waited for no notification: its worker looked at it, napped, or waited for room. Brought
    /// up to date when this changes, and each tenth of a second in which the worker is awake.
    polled_ns,
    /// Nanoseconds in which the queue waited for a notification: a kick, or, with kicks disabled, an event of the task's far
    /// side. Brought up to date at the same times.
    notified_ns,
    /// Times that the queue went from one worker to another.
    moves,
    /// Calls sent to the driver.
    calls,
    /// Batches of completions of which the driver did not want to be told.
    calls_suppressed,
    /// Looks at the ring that found work.
    polls_with_work,
    /// Looks at the ring that found none.
    polls_without_work,
}

/// `name=value` of each, with spaces between.
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
    fn all_of_them_are_shown() {
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
