//! The line that moves while a benchmark runs.

use std::io::{IsTerminal, Write, stderr};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::layout::rate;

/// How often the line changes.
const PAUSE: Duration = Duration::from_millis(200);

/// Says on standard error how far it is, if that is a terminal.
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

    /// What is being done from now on.
    pub(crate) fn begin(&self, what: String) {
        if let Ok(mut state) = self.state.lock() {
            *state = ProgressState { what, last: None };
        }
    }

    /// How far it is, and how fast.
    pub(crate) fn show(&self, now: Duration, of: Duration, fast: Option<f64>) {
        let Ok(mut state) = self.state.lock() else { return };
        if !self.shown || state.last.is_some_and(|last| last.elapsed() < PAUSE) {
            return;
        }
        state.last = Some(Instant::now());
        let fast = fast.map_or("warming up".into(), |fast| format!("{}/s", rate(fast)));
        let (now, of) = (now.as_secs_f64(), of.as_secs_f64());
        // Who cannot write there goes without.
        let _ = write!(stderr(), "\r\x1b[K{}: {now:.1} of {of:.1} s, {fast}", state.what);
    }

    /// Makes the line empty.
    pub(crate) fn clear(&self) {
        if self.shown {
            let _ = write!(stderr(), "\r\x1b[K");
        }
    }
}
