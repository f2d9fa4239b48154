//! The clock of a pool of workers.

use rustix::time::{ClockId, Timespec, clock_gettime};

/// A clock that never goes back. It counts nanoseconds since it was started.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// The time of the kernel's monotonic clock at the start.
    start_ns: u64,
}

impl Clock {
    /// Starts a clock at 0.
    pub fn start() -> Self {
        Self { start_ns: monotonic_ns() }
    }

    /// Returns the time.
    pub fn now(self) -> u64 {
        monotonic_ns().saturating_sub(self.start_ns)
    }
}

/// Returns the time of the kernel's monotonic clock. 2^64 nanoseconds are 584 years.
///
/// This takes half of the instructions of [`Instant::elapsed`](std::time::Instant::elapsed), which keeps
/// seconds and nanoseconds apart. A worker reads the clock in each turn.
fn monotonic_ns() -> u64 {
    let Timespec { tv_sec, tv_nsec } = clock_gettime(ClockId::Monotonic);
    (tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(tv_nsec as u64)
}
