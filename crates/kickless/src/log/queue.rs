//! A bounded queue of log text, and the thread that writes it.
//!
//! # Why the log cannot stop the data plane
//!
//! Standard error can block at any time and for any time: a pipe whose reader has stopped, a terminal with
//! ^S. It can also fail: a pipe whose reader has ended, a full file system.
//!
//! - Only the writer's thread makes the system call, and it holds no lock meanwhile. A thread that logs
//!   appends its line to [`QueueState::text`] under a mutex. Each holder releases the mutex after a bounded
//!   number of instructions.
//! - The text is bounded. At most [`BYTES_MAX`] bytes wait, and at most as many are being written. A line
//!   that does not fit is lost and counted. The lines after it are lost too, until the writer takes the
//!   count. The notice about lost lines therefore stands in the place of these lines.
//! - A write that fails loses the text that it could not write. The writer counts these lines and continues
//!   with the next ones. Before the first write that succeeds, it writes the number of lost lines.
//! - The functions here neither panic nor print, so a thread that logs always continues.
//! - At the end of the process, [`LineQueue::wait_until_written`] waits for the writer for a bounded time.
//!
//! `tracing-appender` has such a queue. But when its queue is full at the end of the process, its guard calls
//! `println!`, which blocks or panics in this case. It bounds lines and not bytes, and does not count failed
//! writes.

use std::io::{self, Write};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kickless_sync::lock;
use tracing::callsite::Identifier;

use super::limit::{Admission, Limits};
use super::lines::Lines;

/// Bytes that can wait to be written: some thousands of lines.
const BYTES_MAX: usize = 1 << 20;
/// The largest buffer that is kept after it is written. A larger one is freed, so that a burst does not keep
/// memory.
const KEPT_BYTES_MAX: usize = 64 << 10;

/// Text on its way to the writer's thread.
#[derive(Default)]
pub(super) struct LineQueue {
    lines: Lines,
    state: Mutex<QueueState>,
    /// Wakes the writer.
    filled: Condvar,
    /// Wakes threads that wait until all is written.
    written: Condvar,
}

#[derive(Default)]
struct QueueState {
    /// Whole lines that wait to be written.
    text: Vec<u8>,
    /// The number of lines after `text` that did not fit.
    lost: u64,
    /// The writer sleeps.
    idle: bool,
    /// The writer has text that it has not written yet.
    writing: bool,
    /// The limits of similar lines.
    limits: Limits<Identifier>,
}

impl LineQueue {
    /// Makes an empty queue for lines of this format.
    pub(super) fn new(lines: Lines) -> Self {
        Self { lines, ..Self::default() }
    }

    /// Returns the format of the lines.
    pub(super) fn lines(&self) -> Lines {
        self.lines
    }

    /// Appends a line, or counts it as lost. Never waits.
    pub(super) fn put(&self, line: &[u8]) {
        let mut state = lock(&self.state);
        if state.lost > 0 || state.text.len() + line.len() > BYTES_MAX {
            state.lost += 1;
        } else {
            self.append(state, line);
        }
    }

    /// Appends the last line of the process, even beyond [`BYTES_MAX`].
    pub(super) fn put_last(&self, line: &[u8]) {
        self.append(lock(&self.state), line);
    }

    fn append(&self, mut state: MutexGuard<'_, QueueState>, line: &[u8]) {
        state.text.extend_from_slice(line);
        if std::mem::replace(&mut state.idle, false) {
            self.filled.notify_one();
        }
    }

    /// Decides whether to print a line from `callsite` about `device`.
    pub(super) fn admit(&self, callsite: Identifier, device: &str) -> Admission {
        lock(&self.state).limits.admit(callsite, device, Instant::now())
    }

    /// Keeps a line for which [`LineQueue::admit`] returned [`Admission::Hold`].
    pub(super) fn hold(&self, callsite: Identifier, device: &str, line: String) {
        let mut state = lock(&self.state);
        state.limits.hold(callsite, device, line, Instant::now());
        // Wake the writer, because it may sleep without a timeout.
        if std::mem::replace(&mut state.idle, false) {
            self.filled.notify_one();
        }
    }

    /// Appends the held lines now, because the process is about to end.
    pub(super) fn put_held(&self) {
        let mut state = lock(&self.state);
        let mut lines = Vec::new();
        state.limits.report_all(self.lines, &mut lines);
        self.append(state, &lines);
    }

    /// Waits until all lines are written, or until `deadline`. Returns whether all lines are written.
    pub(super) fn wait_until_written(&self, deadline: Instant) -> bool {
        let mut state = lock(&self.state);
        loop {
            if state.text.is_empty() && state.lost == 0 && !state.writing {
                return true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.written.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Writes the lines of the queue to `sink`, until the process ends.
    pub(super) fn write_to(&self, sink: impl Write, notice: impl Fn(u64) -> String) -> ! {
        let mut writer = Writer { sink, notice, unwritten: 0, torn: false };
        let mut text = Vec::new();
        loop {
            let lost = self.take(&mut text);
            writer.write(&text, lost);
        }
    }

    /// Waits until text is queued, and swaps it with `written`. Returns the number of lines that are lost
    /// after it.
    fn take(&self, written: &mut Vec<u8>) -> u64 {
        written.clear();
        written.shrink_to(KEPT_BYTES_MAX);
        let mut state = lock(&self.state);
        state.writing = false;
        self.written.notify_all();
        loop {
            let now = Instant::now();
            let QueueState { text, limits, .. } = &mut *state;
            limits.report(now, self.lines, text);
            if !state.text.is_empty() || state.lost > 0 {
                break;
            }
            state.idle = true;
            let due = state.limits.due().map_or(Duration::MAX, |due| due.saturating_duration_since(now));
            let waited = self.filled.wait_timeout(state, due);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.idle = false;
        state.writing = true;
        std::mem::swap(written, &mut state.text);
        std::mem::take(&mut state.lost)
    }
}

/// Lets `tracing-subscriber` write to the queue. Each call has one whole line.
impl Write for &LineQueue {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.put(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The sink, and its state as far as the writer's thread knows it.
struct Writer<W, N> {
    sink: W,
    /// Returns a notice with the number of lost lines.
    notice: N,
    /// The number of lost lines that no notice has reported yet.
    unwritten: u64,
    /// The last write failed within a line.
    torn: bool,
}

impl<W: Write, N: Fn(u64) -> String> Writer<W, N> {
    /// Writes whole lines, and then a notice if `lost` lines are missing after them.
    fn write(&mut self, text: &[u8], lost: u64) {
        let left = if self.tell() { self.write_bytes(text) } else { text };
        self.unwritten += lines(left) + lost;
        self.tell();
    }

    /// Writes a notice if lines are lost. Returns `false` if the notice cannot be written.
    fn tell(&mut self) -> bool {
        if self.unwritten == 0 {
            return true;
        }
        let begin = if self.torn { "\n" } else { "" };
        let notice = format!("{begin}{}", (self.notice)(self.unwritten));
        let told = self.write_bytes(notice.as_bytes()).is_empty();
        if told {
            self.unwritten = 0;
        }
        told
    }

    /// Writes as much of the text as possible. Returns the rest.
    fn write_bytes<'t>(&mut self, mut text: &'t [u8]) -> &'t [u8] {
        while !text.is_empty() {
            match self.sink.write(text) {
                Ok(0) => break,
                Ok(written) => {
                    let (done, left) = text.split_at(written.min(text.len()));
                    self.torn = !done.ends_with(b"\n");
                    text = left;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        text
    }
}

fn lines(text: &[u8]) -> u64 {
    text.iter().filter(|&&byte| byte == b'\n').count() as u64
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;
    use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
    use std::thread;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    fn notice(lost: u64) -> String {
        format!("lost {lost}\n")
    }

    /// A sink that fails, or takes a number of bytes, as the test tells it before each write.
    struct Told {
        orders: Receiver<io::Result<usize>>,
        wrote: SyncSender<String>,
    }

    impl Write for Told {
        fn write(&mut self, text: &[u8]) -> io::Result<usize> {
            let Ok(order) = self.orders.recv() else {
                loop {
                    thread::park()
                }
            };
            let written = order?.min(text.len());
            self.wrote.send(String::from_utf8(text[..written].into()).unwrap()).unwrap();
            Ok(written)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    struct Bench {
        queue: Arc<LineQueue>,
        orders: SyncSender<io::Result<usize>>,
        written: Receiver<String>,
    }

    impl Bench {
        fn new() -> Self {
            let queue = Arc::new(LineQueue::default());
            let (orders, told) = sync_channel(0);
            let (wrote, written) = sync_channel(100);
            let theirs = queue.clone();
            thread::spawn(move || theirs.write_to(Told { orders: told, wrote }, notice));
            Self { queue, orders, written }
        }

        /// Waits until the writer has taken all text and is in a write.
        fn waits_in_write(&self) {
            let deadline = Instant::now() + LIMIT;
            let is_taken = || {
                let state = lock(&self.queue.state);
                state.writing && state.text.is_empty()
            };
            while !is_taken() {
                assert!(Instant::now() < deadline, "the writer takes nothing");
                thread::yield_now();
            }
        }

        /// Allows one write of at most `bytes` bytes. Returns the written text.
        fn writes(&self, bytes: usize) -> String {
            self.orders.send(Ok(bytes)).unwrap();
            self.written.recv_timeout(LIMIT).unwrap()
        }

        fn fails(&self) {
            self.orders.send(Err(io::ErrorKind::BrokenPipe.into())).unwrap();
        }
    }

    #[test]
    fn lines_are_written_in_order() {
        let bench = Bench::new();
        bench.queue.put(b"one\n");
        assert_eq!(bench.writes(1 << 20), "one\n");
        bench.queue.put(b"two\n");
        // The writer has taken the second line, or is about to take it.
        assert_eq!(bench.writes(2), "tw");
        bench.queue.put(b"three\n");
        assert_eq!(bench.writes(1 << 20), "o\n");
        assert_eq!(bench.writes(1 << 20), "three\n");
        assert!(bench.queue.wait_until_written(Instant::now() + LIMIT));
    }

    #[test]
    fn a_sink_that_blocks_stops_no_thread_and_lost_lines_are_counted() {
        let bench = Bench::new();
        let line = [b"x".repeat(1023), b"\n".into()].concat();
        let fits = BYTES_MAX / line.len();
        let flood = || {
            for _ in 0..2 * fits {
                bench.queue.put(&line);
            }
            assert_eq!(lock(&bench.queue.state).text.len(), BYTES_MAX);
        };
        // The writer holds a line when the flood begins, and the first flood when the second one does.
        bench.queue.put(&line);
        bench.waits_in_write();
        flood();
        assert_eq!(bench.writes(usize::MAX).len(), line.len());
        bench.waits_in_write();
        flood();
        assert!(!bench.queue.wait_until_written(Instant::now() + Duration::from_millis(1)));
        bench.queue.put_last(b"last words\n");
        let lost = format!("lost {fits}\n");
        assert_eq!(bench.writes(usize::MAX).len(), BYTES_MAX);
        assert_eq!(bench.writes(usize::MAX), lost);
        let rest = bench.writes(usize::MAX);
        assert_eq!(rest.len(), BYTES_MAX + "last words\n".len());
        assert!(rest.ends_with("x\nlast words\n"));
        assert_eq!(bench.writes(usize::MAX), lost);
        assert!(bench.queue.wait_until_written(Instant::now() + LIMIT));
        bench.queue.put(b"again\n");
        assert_eq!(bench.writes(usize::MAX), "again\n");
    }

    #[test]
    fn lines_lost_in_failed_writes_are_counted_when_the_sink_works_again() {
        let bench = Bench::new();
        bench.queue.put(b"one\n");
        // The line fails, and so does the notice after it.
        bench.fails();
        bench.fails();
        assert!(bench.queue.wait_until_written(Instant::now() + LIMIT));
        bench.queue.put(b"two\n");
        // The notice before the line fails, and so does the one after it.
        bench.fails();
        bench.fails();
        assert!(bench.queue.wait_until_written(Instant::now() + LIMIT));
        bench.queue.put(b"three\n");
        assert_eq!(bench.writes(usize::MAX), "lost 2\n");
        // Half of the line is written, and then the sink fails.
        assert_eq!(bench.writes(3), "thr");
        bench.fails();
        assert_eq!(bench.writes(usize::MAX), "\nlost 1\n");
        assert!(bench.queue.wait_until_written(Instant::now() + LIMIT));
    }

    #[test]
    fn a_pipe_without_a_reader_stops_no_thread() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let queue = Arc::new(LineQueue::default());
        let writers = queue.clone();
        thread::spawn(move || writers.write_to(ours, notice));
        let line = [b"x".repeat(1023), b"\n".into()].concat();
        for _ in 0..10 * BYTES_MAX / line.len() {
            queue.put(&line);
        }
        assert!(!queue.wait_until_written(Instant::now() + Duration::from_millis(10)));
        // Without a reader, the write ends with an error.
        drop(theirs);
        assert!(queue.wait_until_written(Instant::now() + LIMIT));
        queue.put(b"more\n");
        assert!(queue.wait_until_written(Instant::now() + LIMIT));
    }
}
