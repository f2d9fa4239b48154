//! Writes structured log lines to standard error. A thread that logs never waits for standard error.
//!
//! [`mod@lines`] has the formats, and says what nobody can forge in them. [`queue`] explains why threads do
//! not wait. [`limit`] bounds the lines that a front-end can cause.

mod filter;
mod format;
mod limit;
mod lines;
mod queue;

use std::io::{self, IsTerminal, Write, stderr};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use kickless_sync::lock;
use rustix::event::{PollFd, PollFlags, poll};
use tracing::{Level, Subscriber};
use tracing_subscriber::{EnvFilter, reload};

use crate::cli::LogLevel;
pub(crate) use filter::check as check_filter;
pub(crate) use format::without_limits;
pub(crate) use lines::LogFormat;
use lines::{Lines, Said};
use queue::LineQueue;

/// The time that the process waits at its end until the last lines are written.
const END_WAIT: Duration = Duration::from_secs(1);

/// The format of the lines. Set by [`set_format`].
static FORMAT: OnceLock<Lines> = OnceLock::new();
/// The queue that the threads log to. Set by [`start`].
static LOG: OnceLock<Arc<LineQueue>> = OnceLock::new();
/// Changes the filter of the log. Set by [`start`].
static SET_FILTER: OnceLock<SetFilter> = OnceLock::new();
/// The filter that was set last, if one was.
static CHANGED_FILTER: Mutex<Option<String>> = Mutex::new(None);

/// Sets the format of all lines of this process. The first format stays.
pub(crate) fn set_format(format: LogFormat) {
    let _ = FORMAT.set(format.lines());
}

fn lines() -> Lines {
    *FORMAT.get_or_init(|| LogFormat::Auto.lines())
}

/// Starts the log. Prints the lines that `level` admits. The directives `base` apply where `level` is not
/// more specific.
///
/// # Errors
/// `level` is not a valid filter, or the thread that writes cannot be started. The error is one sentence. It
/// names the option or the variable of the filter.
pub(crate) fn start(base: &str, level: &LogLevel) -> Result<()> {
    let filter = filter::parse(base, &level.filter).map_err(|why| anyhow!("{level}: {why}"))?;
    let lines = lines();
    let queue = Arc::new(LineQueue::new(lines));
    let writers = queue.clone();
    thread::Builder::new()
        .name("log".into())
        .spawn(move || writers.write_to(Stderr, |count| lost_lines(lines, count)))
        .context("cannot start a thread")?;
    let (subscriber, set_filter) = subscriber(&queue, filter, lines == Lines::Text && stderr().is_terminal());
    tracing::subscriber::set_global_default(subscriber).context("logging cannot be started")?;
    // The subscriber above was the first one, so these are not set yet.
    let _ = LOG.set(queue);
    let _ = SET_FILTER.set(set_filter);
    Ok(())
}

/// Changes the lines that are printed from now on.
///
/// # Errors
/// `text` is not a valid filter. The error is one sentence.
pub(crate) fn set_filter(text: &str) -> Result<(), String> {
    let filter = filter::parse("", text).map_err(|why| format!("filter: {why}"))?;
    let Some(set) = SET_FILTER.get() else { return Err("the log has not started".into()) };
    set(filter).map_err(|error| format!("the filter cannot be changed: {error}"))?;
    *lock(&CHANGED_FILTER) = Some(text.to_owned());
    Ok(())
}

/// Returns the filter that was set last ([`set_filter`]), if one was.
pub(crate) fn changed_filter() -> Option<String> {
    lock(&CHANGED_FILTER).clone()
}

/// Changes the filter of a subscriber.
type SetFilter = Box<dyn Fn(EnvFilter) -> Result<(), reload::Error> + Send + Sync>;

/// Returns the subscriber that passes lines to the queue, and the function that changes its filter.
fn subscriber(
    queue: &Arc<LineQueue>,
    filter: EnvFilter,
    colours: bool,
) -> (impl Subscriber + Send + Sync + use<>, SetFilter) {
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(queue.clone())
        .with_ansi(colours)
        // The library would print these errors to standard error, and panic if that fails.
        .log_internal_errors(false)
        .fmt_fields(format::SpanValues)
        .event_format(format::Limited { queue: queue.clone() })
        .with_filter_reloading();
    let handle = builder.reload_handle();
    (builder.finish(), Box::new(move |filter| handle.reload(filter)))
}

/// Prints a sentence on standard error, after all lines that were logged.
pub(crate) fn print_sentence(sentence: &str) {
    print_last(&lines().sentence(sentence));
}

/// Prints a text of this program, which can have several lines, as [`print_sentence`] does.
pub(crate) fn print_text(text: &str) {
    print_last(&lines().text(text));
}

fn print_last(line: &str) {
    match LOG.get() {
        Some(queue) => {
            queue.put_held();
            queue.put_last(line.as_bytes());
        }
        // No device is served yet. If standard error fails, the exit status still shows the error.
        None => drop(stderr().write_all(line.as_bytes())),
    }
}

/// Waits up to [`END_WAIT`] until all lines are written. Called before the process ends.
pub(crate) fn end() {
    if let Some(queue) = LOG.get() {
        queue.put_held();
    }
    wait_until_written(Instant::now() + END_WAIT);
}

/// Waits up to `deadline` until all lines are written. A long report calls it between its parts, so that the
/// queue does not overflow.
pub(crate) fn wait_until_written(deadline: Instant) {
    if let Some(queue) = LOG.get() {
        queue.wait_until_written(deadline);
    }
}

/// Returns a line with the number of lines that are lost before it.
fn lost_lines(lines: Lines, count: u64) -> String {
    let mut said = Said::message("lines lost, standard error could not be written to");
    said.add_number("count", count);
    lines.line(Level::WARN, "kickless::log", &said)
}

/// Standard error. Writes hold no lock, so that a `println!` of a library does not wait for them.
struct Stderr;

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let stderr = stderr();
        loop {
            match rustix::io::write(stderr.as_fd(), bytes) {
                // Another process that shares the open file has made it non-blocking.
                Err(rustix::io::Errno::AGAIN) => {
                    poll(&mut [PollFd::new(&stderr.as_fd(), PollFlags::OUT)], None)?;
                }
                written => return Ok(written?),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
