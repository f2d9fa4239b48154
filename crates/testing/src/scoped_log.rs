//! Sets the log subscriber of one thread so that it misses no line of that thread.

use std::io::Write;
use std::sync::{Arc, Mutex, OnceLock};
use tracing::level_filters::LevelFilter;
use tracing::{Dispatch, Subscriber};

/// Runs `f` with `subscriber` as the subscriber of this thread.
///
/// `tracing` registers each call site once, when a thread first reaches it, and caches the answer for all
/// threads. While a process has one subscriber, `tracing` asks only the subscriber of that first thread. If
/// that thread has none, the call site is disabled for the thread with the subscriber too.
///
/// With two subscribers in the process, `tracing` asks both. So this function makes a second subscriber,
/// which lives as long as the process and enables nothing. It makes this subscriber before it sets
/// `subscriber`. No thread registers a call site in between, because the second subscriber enables no level.
pub fn with_subscriber<T>(subscriber: impl Subscriber + Send + Sync + 'static, f: impl FnOnce() -> T) -> T {
    static SECOND: OnceLock<Dispatch> = OnceLock::new();
    SECOND.get_or_init(|| Dispatch::new(tracing_subscriber::fmt().with_max_level(LevelFilter::OFF).finish()));
    tracing::subscriber::with_default(subscriber, f)
}

/// Runs `f`. Returns its result, and the log of this thread during the call.
pub fn logged<T>(f: impl FnOnce() -> T) -> (T, String) {
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);
    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let lines = Lines::default();
    let writer = lines.clone();
    let log = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    let result = with_subscriber(log, f);
    let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
    (result, text)
}
