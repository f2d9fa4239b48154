//! Pauses while the kernel has no room.

use std::time::{Duration, Instant};

/// The longest pause, if nothing completes before.
const PAUSE: Duration = Duration::from_millis(1);

/// A pause of an owner or of an engine, because the kernel has answered `EAGAIN`. It ends when an operation
/// has completed, or after a moment.
#[derive(Debug, Default)]
pub(crate) struct EagainPause(Option<Instant>);

impl EagainPause {
    pub(crate) fn begin(&mut self) {
        self.0 = Some(Instant::now() + PAUSE);
    }

    /// Ends the pause because an operation has completed. Returns whether there was one.
    #[inline]
    pub(crate) fn end(&mut self) -> bool {
        self.0.take().is_some()
    }

    /// Ends the pause if it has been long enough. Returns whether it has.
    #[inline]
    pub(crate) fn end_if_over(&mut self) -> bool {
        self.0.take_if(|until| Instant::now() >= *until).is_some()
    }

    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.0.is_some()
    }
}
