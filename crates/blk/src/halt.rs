//! The reasons for which a device takes no new requests.

use std::sync::atomic::{AtomicU8, Ordering};

/// The reasons for which new requests stay in the rings.
///
/// The orders are relaxed: a caller that must know that a change is in force lets each worker finish its
/// round, which orders the store before later polls.
#[derive(Debug, Default)]
pub(crate) struct Halt(AtomicU8);

impl Halt {
    const PAUSED: u8 = 1;
    const STOPPED: u8 = 2;

    #[inline]
    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed) != 0
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.0.load(Ordering::Relaxed) & Self::STOPPED != 0
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.0.load(Ordering::Relaxed) & Self::PAUSED != 0
    }

    /// Halts the device for an operator, or ends that.
    pub(crate) fn set_paused(&self, is_paused: bool) {
        self.set(Self::PAUSED, is_paused);
    }

    /// Halts the device for an error, or ends that. Returns whether this changed anything.
    pub(crate) fn set_stopped(&self, is_stopped: bool) -> bool {
        self.set(Self::STOPPED, is_stopped)
    }

    fn set(&self, reason: u8, is_on: bool) -> bool {
        let before = match is_on {
            true => self.0.fetch_or(reason, Ordering::Relaxed),
            false => self.0.fetch_and(!reason, Ordering::Relaxed),
        };
        (before & reason != 0) != is_on
    }
}
