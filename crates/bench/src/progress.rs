//! The progress line of a running benchmark.

use std::io::{IsTerminal, Write, stderr};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::layout::{left, rate};
use super::terminal;

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
    /// The parts of the line before the figures.
    parts: Vec<Part>,
    /// The time that the turns after this one take.
    later: Duration,
    last: Option<Instant>,
}

/// A part of the line, and its rank. Parts of a high rank are left out if the line is too long.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) text: String,
    pub(crate) rank: u8,
}

/// The rank of the figures, which are left out last.
const RANK_FIGURES: u8 = 0;

impl Part {
    /// Makes a part.
    pub(crate) fn new(rank: u8, text: impl Into<String>) -> Self {
        Self { text: text.into(), rank }
    }
}

impl Progress {
    pub(crate) fn new() -> Progress {
        Progress { shown: stderr().is_terminal(), state: Mutex::default() }
    }

    /// Begins a turn. `parts` stand before the figures, and the turns after this one take the time `later`.
    pub(crate) fn begin(&self, parts: Vec<Part>, later: Duration) {
        if let Ok(mut state) = self.state.lock() {
            *state = ProgressState { parts, later, last: None };
        }
    }

    /// Shows the rate and the time left. The turn has taken `now` of the time `of`.
    pub(crate) fn show(&self, now: Duration, of: Duration, fast: Option<f64>) {
        let Ok(mut state) = self.state.lock() else { return };
        if !self.shown || state.last.is_some_and(|last| last.elapsed() < PAUSE) {
            return;
        }
        state.last = Some(Instant::now());
        let fast = fast.map_or("warming up".into(), |fast| format!("{}/s", rate(fast.round())));
        let left = format!("{} left", left(of.saturating_sub(now) + state.later));
        let parts = [fast, left].map(|text| Part::new(RANK_FIGURES, text));
        let parts: Vec<Part> = state.parts.iter().cloned().chain(parts).collect();
        // A line as long as the terminal would move the cursor to the next one.
        let line = line(parts, terminal::width(stderr()).saturating_sub(1));
        // Progress is optional: a failed write does not matter.
        let _ = write!(stderr(), "\r\x1b[K{line}");
    }

    /// Clears the line.
    pub(crate) fn clear(&self) {
        if self.shown {
            let _ = write!(stderr(), "\r\x1b[K");
        }
    }
}

/// Joins the parts. Leaves out parts of the highest rank until the line has at most `width` characters.
fn line(mut parts: Vec<Part>, width: usize) -> String {
    loop {
        let line = parts.iter().map(|part| part.text.as_str()).collect::<Vec<_>>().join(", ");
        match parts.iter().map(|part| part.rank).max() {
            Some(rank) if rank > RANK_FIGURES && line.chars().count() > width => {
                parts.retain(|part| part.rank < rank);
            }
            _ => return line,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_line_loses_whole_parts() {
        let parts =
            || vec![Part::new(1, "load 2 of 3"), Part::new(2, "random reads"), Part::new(0, "5 s left")];
        assert_eq!(line(parts(), 80), "load 2 of 3, random reads, 5 s left");
        assert_eq!(line(parts(), 34), "load 2 of 3, 5 s left");
        assert_eq!(line(parts(), 20), "5 s left");
        assert_eq!(line(parts(), 1), "5 s left");
    }
}
