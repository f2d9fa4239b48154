//! The log: structured lines on standard error, which never hold up the thread that logs.
//!
//! [`queue`] says why, [`limit`] how many lines a front-end can cause.

mod filter;
mod format;
mod limit;
mod queue;

use std::io::{self, IsTerminal, Write, stderr};
use std::os::fd::AsFd;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use rustix::event::{PollFd, PollFlags, poll};
use tracing::Subscriber;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::{Format, Writer};
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

use crate::cli::LogLevel;
pub(crate) use format::in_full;
use queue::Queue;

/// How long the process waits at its end for the last lines to be written.
const END_WAIT: Duration = Duration::from_secs(1);

/// The queue that the threads log to, once [`start`] has been called.
static LOG: OnceLock<Arc<Queue>> = OnceLock::new();

/// Starts logging what `level` lets through, or `but`, which goes before it, where `level` says nothing more exact.
///
/// # Errors
/// `level` is no filter: one sentence that names the option or the variable. Or the thread that writes cannot be started.
pub(crate) fn start(but: &str, level: &LogLevel) -> Result<()> {
    let filter = filter::parse(but, &level.filter).map_err(|why| anyhow!("{level}: {why}"))?;
    let queue = Arc::new(Queue::default());
    let writers = queue.clone();
    thread::Builder::new()
        .name("log".into())
        .spawn(move || writers.write_to(Stderr, lost_lines))
        .context("no threads can be started")?;
    let subscriber = subscriber(&queue, filter, stderr().is_terminal());
    tracing::subscriber::set_global_default(subscriber).context("logging cannot be started")?;
    // The subscriber was the first, so this is.
    let _ = LOG.set(queue);
    Ok(())
}

/// Returns the subscriber that hands lines to the queue.
fn subscriber(queue: &Arc<Queue>, filter: EnvFilter, colours: bool) -> impl Subscriber + Send + Sync {
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(queue.clone())
        .with_ansi(colours)
        // It would print to standard error, and panic where that fails.
        .log_internal_errors(false)
        .event_format(format::Limited { queue: queue.clone(), format: Format::default() })
        .finish()
}

/// Says a sentence on standard error, after all that was logged.
pub(crate) fn say(sentence: &str) {
    let line = format!("kickless: {sentence}\n");
    match LOG.get() {
        Some(queue) => {
            queue.put_held();
            queue.put_last(line.as_bytes());
        }
        // Nothing is served yet. If it cannot be said, the exit status still tells.
        None => drop(stderr().write_all(line.as_bytes())),
    }
}

/// Waits until everything is written, up to [`END_WAIT`]. To be called before the process ends.
pub(crate) fn end() {
    if let Some(queue) = LOG.get() {
        queue.put_held();
    }
    wait_until_written(Instant::now() + END_WAIT);
}

/// Waits until everything is written, up to `deadline`: so that a long report is not lost for want of room.
pub(crate) fn wait_until_written(deadline: Instant) {
    if let Some(queue) = LOG.get() {
        queue.wait_until_written(deadline);
    }
}

/// A line that says how many are missing before it.
fn lost_lines(count: u64) -> String {
    let mut line = String::new();
    // A time that cannot be formatted is left out.
    let _ = SystemTime.format_time(&mut Writer::new(&mut line));
    line + &format!(
        "  WARN kickless::log: lines lost, standard error could not be written to count={count}\n"
    )
}

/// Standard error without the lock that a `println!` of a library would wait for.
struct Stderr;

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let stderr = stderr();
        loop {
            match rustix::io::write(stderr.as_fd(), bytes) {
                // Another process has made it non-blocking: it shares the open file with us.
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
