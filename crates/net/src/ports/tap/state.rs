//! A TAP, with all that the rings of a card share there.

use kickless_io::Waker;
use kickless_net_port::Tap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::{fmt, io};
use tracing::{Span, error, warn};

/// A TAP, and what makes it follow the rings.
///
/// Calls that attach queues or set offloads take a lock of the kernel's network configuration. A worker never
/// makes them: a thread of the card does, after the rings have changed what it looks at
/// (`follower.rs`).
#[derive(Debug)]
pub(crate) struct TapState {
    pub(crate) tap: Tap,
    /// Wakes the thread when the rings have changed. There is none before the first start.
    changed: OnceLock<Waker>,
    is_gone: AtomicBool,
    has_failed: AtomicBool,
    /// The span of log lines about the card.
    span: Span,
}

impl TapState {
    pub(crate) fn new(tap: Tap) -> Self {
        Self {
            tap,
            changed: OnceLock::new(),
            is_gone: AtomicBool::new(false),
            has_failed: AtomicBool::new(false),
            span: Span::current(),
        }
    }

    /// Makes the TAP follow the rings, which have changed. Does not wait for it.
    pub(crate) fn changed(&self) {
        if let Some(changed) = self.changed.get() {
            changed.wake();
        }
    }

    /// Returns the waker that [`TapState::changed`] signals.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub(crate) fn waker(&self) -> io::Result<&Waker> {
        let waker = Waker::new()?;
        Ok(self.changed.get_or_init(|| waker))
    }

    /// Logs that the TAP is gone, once. The card goes on without it.
    pub(crate) fn report_gone(&self) {
        if !self.is_gone.swap(true, Ordering::Relaxed) {
            let name = self.tap.name();
            error!(parent: &self.span, tap = name, "the TAP was deleted: the card has no network until its device is \
                opened again");
        }
    }

    /// Returns whether a ring has found that the TAP is gone.
    pub(crate) fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Relaxed)
    }

    /// Logs the first read that has failed.
    pub(crate) fn report_failed_read(&self, error: &dyn fmt::Display) {
        if !self.has_failed.swap(true, Ordering::Relaxed) {
            warn!(parent: &self.span, tap = self.tap.name(), %error, "a frame of the TAP could not be read; further ones are counted as dropped_unread");
        }
    }
}
