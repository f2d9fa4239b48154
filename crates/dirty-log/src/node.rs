//! A translation table: entries that change atomically.

use crate::level::FANOUT;
use kickless_sync::atomic::{AtomicU64, Ordering};

/// A table of one level.
#[repr(C, align(4096))]
pub(crate) struct Node {
    pub(crate) entries: [AtomicU64; FANOUT],
}

impl Node {
    pub(crate) fn new() -> Self {
        Self { entries: std::array::from_fn(|_| AtomicU64::new(0)) }
    }

    /// Returns whether nothing is mapped through it.
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.iter().all(|entry| entry.load(Ordering::Relaxed) == 0)
    }
}
