//! Calls for discards and zeroes that the kernel lacks for a file.

use kickless_io::RangeCall;
use std::sync::atomic::{AtomicU8, Ordering};

/// Calls that are not to be tried again.
#[derive(Debug, Default)]
pub(super) struct Lacks(AtomicU8);

impl Lacks {
    fn bit(call: RangeCall) -> u8 {
        1 << call as u8
    }

    /// Relaxed: who does not know yet finds out.
    pub(super) fn has(&self, call: RangeCall) -> bool {
        self.0.load(Ordering::Relaxed) & Self::bit(call) == 0
    }

    pub(super) fn forget(&self, call: RangeCall) {
        self.0.fetch_or(Self::bit(call), Ordering::Relaxed);
    }
}
