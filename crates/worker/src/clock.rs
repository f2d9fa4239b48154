//! Time in nanoseconds.

use std::time::Duration;

pub(crate) use kickless_device::Clock;

/// A duration, or a point in time on one clock that never goes back: nanoseconds.
pub type Nanos = u64;

/// Converts a duration to nanoseconds, at most `u64::MAX`.
#[inline]
pub(crate) fn nanos(duration: Duration) -> Nanos {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
