//! The timer that paces test frames, or ends a pause.

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// A descriptor that becomes readable when a time is over.
#[derive(Debug)]
pub(crate) struct Timer(OwnedFd);

impl Timer {
    /// Makes a timer that does not expire.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub(crate) fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        Ok(Self(timerfd_create(TimerfdClockId::Monotonic, flags)?))
    }

    /// Makes the timer expire `rate` times per second, for the first time after one period. `rate` is not
    /// zero.
    pub(crate) fn repeat(&self, rate: u32) {
        let period = Duration::from_secs(1) / rate;
        self.set(period, period);
    }

    /// Makes the timer expire once, after this time and not before. The time is not zero.
    pub(crate) fn begin(&self, time: Duration) {
        self.set(time, Duration::ZERO);
    }

    fn set(&self, time: Duration, period: Duration) {
        let [it_value, it_interval] = [time, period].map(|time| Timespec {
            // Lossless, because no caller has a time of more than a second.
            tv_sec: time.as_secs() as i64,
            tv_nsec: time.subsec_nanos().into(),
        });
        let when = Itimerspec { it_interval, it_value };
        // Such a time is valid, so the call cannot fail.
        let _ = timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &when);
    }

    /// Returns the number of expirations since the last call. The descriptor is not readable afterwards.
    pub(crate) fn take(&self) -> u64 {
        let mut count = [0; 8];
        match rustix::io::read(&self.0, &mut count) {
            Ok(8) => u64::from_ne_bytes(count),
            _ => 0,
        }
    }
}

impl AsFd for Timer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
