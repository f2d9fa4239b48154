//! Hints, without the lock of a completer, whether there may be something to pop.

use super::areas::Areas;
use kickless_spec::ring::RING_IDX;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// A bit above the used index. It means that there may be something to pop, even if the ring shows nothing
/// new.
const DUE: u32 = 1 << 16;

/// The used index up to which a completer has popped everything: see [`super::Completer::position`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position(u32);

impl Position {
    /// There may be something to pop.
    pub const DUE: Self = Self(DUE);

    #[inline]
    pub(super) fn at(used: u16) -> Self {
        Self(used.into())
    }
}

/// Tells threads without the completer's lock whether there may be something to pop.
///
/// The hint may be older than the latest actions of other threads. So a thread that gets the lock checks the
/// ring again, and no thread may sleep because of this hint. To sleep, use
/// [`super::Completer::enable_calls`]. A thread that has [`set`](CompletionHint::set) the position itself, or
/// has taken the lock after another thread did, sees everything that the device shows after that.
///
/// In a split ring, the used index is a word that only the device writes. A packed ring has no such word, so
/// the answer is always that there may be something.
#[derive(Debug)]
pub struct CompletionHint {
    areas: Arc<Areas>,
    /// A [`Position`].
    position: AtomicU32,
}

impl CompletionHint {
    pub(super) fn new(areas: Arc<Areas>) -> Self {
        Self { areas, position: AtomicU32::new(DUE) }
    }

    /// Stores the completer's position. Call it under the completer's lock, whenever a chain is popped or the
    /// queue starts again.
    #[inline]
    pub fn set(&self, position: Position) {
        self.position.store(position.0, Ordering::Relaxed);
    }

    /// Returns whether there may be something to pop.
    #[inline]
    pub fn may_have_completions(&self) -> bool {
        let position = self.position.load(Ordering::Relaxed);
        // Relaxed: the thread that pops loads the index again, with acquire.
        position & DUE != 0 || self.areas.device.load_u16(RING_IDX, Ordering::Relaxed) != position as u16
    }
}
