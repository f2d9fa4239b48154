//! Collects the output of a child process line by line while it runs, so that a test can wait for a line.

use std::io::{BufRead, BufReader, Read};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// The lines of a stream so far. Clones share them.
#[derive(Clone)]
pub struct Transcript {
    name: String,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    lines: Vec<String>,
    /// Time of the last line.
    last: Option<Instant>,
    ended: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Transcript {
    /// Reads `stream` to its end on a thread. `name` is its name in error messages.
    pub fn of(name: &str, stream: impl Read + Send + 'static) -> Transcript {
        let transcript = Transcript { name: name.to_owned(), shared: Arc::default() };
        let shared = Arc::clone(&transcript.shared);
        thread::spawn(move || {
            let mut reader = BufReader::new(stream);
            let mut line = Vec::new();
            // A stream with an error has ended too. The threads that wait for a line learn of it below.
            while matches!(reader.read_until(b'\n', &mut line), Ok(length) if length > 0) {
                let text = String::from_utf8_lossy(&line).trim_end().to_owned();
                line.clear();
                let mut state = shared.lock();
                state.lines.push(text);
                state.last = Some(Instant::now());
                drop(state);
                shared.changed.notify_all();
            }
            shared.lock().ended = true;
            shared.changed.notify_all();
        });
        transcript
    }

    /// Waits for the line with this index, counted from 0. Returns `None` if the stream ends before it.
    ///
    /// # Errors
    /// The deadline has passed.
    pub fn line(&self, index: usize, deadline: Instant) -> Result<Option<String>> {
        let mut state = self.shared.lock();
        loop {
            if let Some(line) = state.lines.get(index) {
                return Ok(Some(line.clone()));
            }
            if state.ended {
                return Ok(None);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let quiet = state.last.map_or(Duration::MAX, |last| last.elapsed());
                bail!(
                    "{}: nothing more was printed in time, the last line {} s ago",
                    self.name,
                    quiet.as_secs()
                );
            }
            let (again, _) =
                self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
            state = again;
        }
    }

    /// Waits for the first line from index `start` on for which `pick` returns a value.
    ///
    /// # Errors
    /// The stream ends or `limit` passes without such a line. The message names `what`.
    pub fn wait_from<T>(
        &self,
        start: usize,
        what: &str,
        limit: Duration,
        mut pick: impl FnMut(&str) -> Option<T>,
    ) -> Result<T> {
        let deadline = Instant::now() + limit;
        for index in start.. {
            let Some(line) = self.line(index, deadline).map_err(|error| error.context(what.to_owned()))?
            else {
                break;
            };
            if let Some(found) = pick(&line) {
                return Ok(found);
            }
        }
        bail!("{}: ended without {what}", self.name)
    }

    /// Waits for a line as [`Transcript::wait_from`] does, from the first line on.
    ///
    /// # Errors
    /// The same as those of [`Transcript::wait_from`].
    pub fn wait_for<T>(&self, what: &str, limit: Duration, pick: impl FnMut(&str) -> Option<T>) -> Result<T> {
        self.wait_from(0, what, limit, pick)
    }

    /// Waits until the stream has ended and returns all its lines.
    ///
    /// # Errors
    /// The limit passes first.
    pub fn wait_for_end(&self, limit: Duration) -> Result<Vec<String>> {
        let deadline = Instant::now() + limit;
        let mut index = self.len();
        while self.line(index, deadline)?.is_some() {
            index += 1;
        }
        Ok(self.lines())
    }

    /// Returns the lines so far.
    pub fn lines(&self) -> Vec<String> {
        self.shared.lock().lines.clone()
    }

    /// Returns the number of lines so far.
    pub fn len(&self) -> usize {
        self.shared.lock().lines.len()
    }

    /// Returns whether there is no line yet.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the lines that contain `text`.
    pub fn grep(&self, text: &str) -> Vec<String> {
        self.lines().into_iter().filter(|line| line.contains(text)).collect()
    }

    /// Prints the lines under a heading, for the reader of a failed test.
    pub fn dump(&self) {
        eprintln!("---- {}", self.name);
        for line in self.lines() {
            eprintln!("{line}");
        }
    }
}
