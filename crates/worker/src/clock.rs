//! Time in nanoseconds.

use std::time::{Duration, Instant};

/// A duration, or a point in time on one clock that never goes back: nanoseconds.
pub type Nanos = u64;

/// The clock of a pool.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock(Instant);

impl Clock {
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }

    #[inline]
    pub(crate) fn now(self) -> Nanos {
        nanos(self.0.elapsed())
    }
}

/// Converts a duration to nanoseconds, at most `u64::MAX`.
#[inline]
pub(crate) fn nanos(duration: Duration) -> Nanos {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
