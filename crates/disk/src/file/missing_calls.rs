//! The calls for discards and zeroes that the kernel does not support for a file.

use kickless_io::RangeCall;
use std::sync::atomic::{AtomicU8, Ordering};

/// The calls that must not be tried again.
#[derive(Debug, Default)]
pub(super) struct MissingCalls(AtomicU8);

impl MissingCalls {
    fn bit(call: RangeCall) -> u8 {
        1 << call as u8
    }

    /// Returns whether a call may be tried. The order is relaxed: a worker that does not know yet finds out
    /// by itself.
    pub(super) fn may_try(&self, call: RangeCall) -> bool {
        self.0.load(Ordering::Relaxed) & Self::bit(call) == 0
    }

    pub(super) fn add(&self, call: RangeCall) {
        self.0.fetch_or(Self::bit(call), Ordering::Relaxed);
    }
}
