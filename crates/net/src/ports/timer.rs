//! The timer that paces test frames, and the one that ends a pause.

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

const NANOS_PER_SEC: u32 = 1_000_000_000;

/// A descriptor that becomes readable at a steady rate.
#[derive(Debug)]
pub(crate) struct Timer(OwnedFd);

impl Timer {
    /// Makes a timer that expires `rate` times per second, for the first time after one period. `rate` is not
    /// zero.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub(crate) fn new(rate: u32) -> io::Result<Self> {
        let timer =
            timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        let period = match rate {
            0 | 1 => Timespec { tv_sec: 1, tv_nsec: 0 },
            _ => Timespec { tv_sec: 0, tv_nsec: (NANOS_PER_SEC / rate).into() },
        };
        let when = Itimerspec { it_interval: period, it_value: period };
        timerfd_settime(&timer, TimerfdTimerFlags::empty(), &when)?;
        Ok(Self(timer))
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

/// A descriptor that becomes readable once, at the end of a pause.
#[derive(Debug)]
pub(crate) struct Pause(OwnedFd);

impl Pause {
    /// Makes a descriptor that is not readable.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub(crate) fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        Ok(Self(timerfd_create(TimerfdClockId::Monotonic, flags)?))
    }

    /// Makes the descriptor readable after this time, which is less than a second and not zero, and not
    /// before.
    pub(crate) fn begin(&self, time: Duration) {
        let once = Timespec { tv_sec: 0, tv_nsec: time.subsec_nanos().into() };
        let when = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value: once };
        // Such a time is valid, so the call cannot fail.
        let _ = timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &when);
    }
}

impl AsFd for Pause {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
