//! The signals that end a benchmark early.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::{flag, low_level};

/// A benchmark that a signal has ended early. The figures so far were printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interrupted {
    signal: i32,
}

impl Interrupted {
    /// Ends this process by the signal, so that its parent sees the reason. Returns only if that fails.
    pub fn end(self) {
        // If the signal cannot be sent, the caller ends the process in its own way.
        let _ = low_level::emulate_default_handler(self.signal);
    }
}

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

/// Notes SIGINT and SIGTERM.
#[derive(Debug)]
pub(crate) struct Interrupts {
    /// Set by a signal: turns end early.
    pub(crate) stop: Arc<AtomicBool>,
    signal: Arc<AtomicUsize>,
}

impl Interrupts {
    /// Begins to note signals.
    ///
    /// # Errors
    /// The handlers cannot be installed.
    pub(crate) fn note() -> Result<Self> {
        let noted = Self { stop: Arc::default(), signal: Arc::default() };
        for signal in [SIGINT, SIGTERM] {
            // The number comes first: it is there when the flag is set.
            flag::register_usize(signal, noted.signal.clone(), signal as usize)
                .and_then(|_| flag::register(signal, noted.stop.clone()))
                .context("the handler of SIGINT and SIGTERM cannot be installed")?;
        }
        Ok(noted)
    }

    /// Returns the signal, if one has come.
    pub(crate) fn came(&self) -> Option<Interrupted> {
        let signal = i32::try_from(self.signal.load(Ordering::Relaxed)).unwrap_or(SIGTERM);
        self.stop.load(Ordering::Relaxed).then_some(Interrupted { signal })
    }
}
