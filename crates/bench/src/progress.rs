//! The progress line of a running benchmark.

use std::io::{IsTerminal, Write, stderr};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::layout::rate;

/// The time between two updates of the line.
const PAUSE: Duration = Duration::from_millis(200);

/// Shows the progress on standard error, if that is a terminal.
#[derive(Debug)]
pub(crate) struct Progress {
    shown: bool,
    state: Mutex<ProgressState>,
}

#[derive(Debug, Default)]
struct ProgressState {
    what: String,
    last: Option<Instant>,
}

impl Progress {
    pub(crate) fn new() -> Progress {
        Progress { shown: stderr().is_terminal(), state: Mutex::default() }
    }

    /// Sets the text before the figures.
    pub(crate) fn begin(&self, what: String) {
        if let Ok(mut state) = self.state.lock() {
            *state = ProgressState { what, last: None };
        }
    }

    /// Shows the time passed, and the rate.
    pub(crate) fn show(&self, now: Duration, of: Duration, fast: Option<f64>) {
        let Ok(mut state) = self.state.lock() else { return };
        if !self.shown || state.last.is_some_and(|last| last.elapsed() < PAUSE) {
            return;
        }
        state.last = Some(Instant::now());
        let fast = fast.map_or("warming up".into(), |fast| format!("{}/s", rate(fast)));
        let (now, of) = (now.as_secs_f64(), of.as_secs_f64());
        // Progress is optional: a failed write does not matter.
        let _ = write!(stderr(), "\r\x1b[K{}: {now:.1} of {of:.1} s, {fast}", state.what);
    }

    /// Clears the line.
    pub(crate) fn clear(&self) {
        if self.shown {
            let _ = write!(stderr(), "\r\x1b[K");
        }
    }
}
