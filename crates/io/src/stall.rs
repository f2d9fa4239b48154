//! Pausing when the kernel has no room.

use std::time::{Duration, Instant};

/// So long at most, where nothing completes before.
const PAUSE: Duration = Duration::from_millis(1);

/// The kernel has said "again": what is more is taken once something has completed, or after a moment.
#[derive(Debug, Default)]
pub(crate) struct Stall(Option<Instant>);

impl Stall {
    pub(crate) fn begin(&mut self) {
        self.0 = Some(Instant::now() + PAUSE);
    }

    /// To be called when something has completed.
    #[inline]
    pub(crate) fn end(&mut self) {
        self.0 = None;
    }

    /// Ends it if it is over.
    #[inline]
    pub(crate) fn look(&mut self) {
        if self.0.is_some_and(|until| Instant::now() >= until) {
            self.0 = None;
        }
    }

    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.0.is_some()
    }
}
