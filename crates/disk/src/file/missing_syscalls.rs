//! The calls for discards and zeroes that the kernel does not support for a file.

use kickless_io::RangeSyscall;
use std::sync::atomic::{AtomicU8, Ordering};

/// The calls that must not be tried again.
#[derive(Debug, Default)]
pub(super) struct MissingSyscalls(AtomicU8);

impl MissingSyscalls {
    fn bit(syscall: RangeSyscall) -> u8 {
        1 << syscall as u8
    }

    /// Returns whether a call may be tried. The order is relaxed: a worker that does not know yet finds out
    /// by itself.
    pub(super) fn may_try(&self, syscall: RangeSyscall) -> bool {
        self.0.load(Ordering::Relaxed) & Self::bit(syscall) == 0
    }

    pub(super) fn add(&self, syscall: RangeSyscall) {
        self.0.fetch_or(Self::bit(syscall), Ordering::Relaxed);
    }
}
