//! The clock of a pool of workers.

use std::time::Instant;

/// A clock that never goes back. It counts nanoseconds since it was started.
#[derive(Clone, Copy, Debug)]
pub struct Clock(Instant);

impl Clock {
    /// Starts a clock at 0.
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Returns the time, at most `u64::MAX`.
    #[inline]
    pub fn now(self) -> u64 {
        u64::try_from(self.0.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}
