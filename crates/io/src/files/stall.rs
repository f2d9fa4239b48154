//! Pausing when the kernel has no room.

use std::time::{Duration, Instant};

/// So long at most, where nothing completes before.
const PAUSE: Duration = Duration::from_millis(1);

/// A pause of an owner or of an engine: the kernel has said "again". It ends when something has completed, or after a moment.
#[derive(Debug, Default)]
pub(crate) struct Stall(Option<Instant>);

impl Stall {
    pub(crate) fn begin(&mut self) {
        self.0 = Some(Instant::now() + PAUSE);
    }

    /// Ends the pause because something has completed; whether there was one.
    #[inline]
    pub(crate) fn end(&mut self) -> bool {
        self.0.take().is_some()
    }

    /// Ends the pause if it has been long enough; whether it has.
    #[inline]
    pub(crate) fn look(&mut self) -> bool {
        self.0.take_if(|until| Instant::now() >= *until).is_some()
    }

    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.0.is_some()
    }
}
