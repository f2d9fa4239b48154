//! A subscriber of one thread that misses no line of that thread.

use std::sync::OnceLock;
use tracing::level_filters::LevelFilter;
use tracing::{Dispatch, Subscriber};

/// Runs `f` with `subscriber` as the subscriber of this thread.
///
/// `tracing` registers each call site once, when a thread reaches it first, and caches the answer for all
/// threads. While a process has one subscriber, the only subscriber that is asked is the one of the thread
/// that is first. A thread without a subscriber thus disables the call site for the thread that has one. With
/// two subscribers in the process, `tracing` asks both. The second one here lives as long as the process and
/// wants nothing.
///
/// The second one is registered first. It allows no level, so no thread registers a call site before both are
/// there.
pub fn with_subscriber<T>(subscriber: impl Subscriber + Send + Sync + 'static, f: impl FnOnce() -> T) -> T {
    static SECOND: OnceLock<Dispatch> = OnceLock::new();
    SECOND.get_or_init(|| Dispatch::new(tracing_subscriber::fmt().with_max_level(LevelFilter::OFF).finish()));
    tracing::subscriber::with_default(subscriber, f)
}
