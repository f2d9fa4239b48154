//! A look at the ring without the lock that guards its completer: whether to take it at all.

use super::areas::Areas;
use kickless_spec::ring::RING_IDX;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Beside the used index up to which everything was taken: there is something to take, whatever the ring says.
const DUE: u32 = 1 << 16;

/// Where a completer is: up to which used index it has taken everything; [`super::Completer::position`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position(u32);

impl Position {
    /// There is something to take.
    pub const DUE: Self = Self(DUE);

    #[inline]
    pub(super) fn at(used: u16) -> Self {
        Self(used.into())
    }
}

/// Tells threads that do not have the completer's lock whether it is worth taking.
///
/// It is a hint. What it reads may be older than what other threads have done since, so whoever gets the lock looks for
/// himself, and nobody goes to sleep for what is said here: that is for [`super::Completer::enable_calls`]. A thread that has
/// [`set`](Glimpse::set) the position itself, or has taken the lock since another did, is told of everything that the device
/// shows after that.
///
/// In a split ring the used index is a word that only the device writes. A packed ring has none, and there the answer is always that
/// there may be something.
#[derive(Debug)]
pub struct Glimpse {
    areas: Arc<Areas>,
    /// A [`Position`].
    position: AtomicU32,
}

impl Glimpse {
    pub(super) fn new(areas: Arc<Areas>) -> Self {
        Self { areas, position: AtomicU32::new(DUE) }
    }

    /// The completer is there now. To be called under its lock, whenever something was taken or the queue begins anew.
    #[inline]
    pub fn set(&self, position: Position) {
        self.position.store(position.0, Ordering::Relaxed);
    }

    /// Whether there may be something to take.
    #[inline]
    pub fn sees(&self) -> bool {
        let position = self.position.load(Ordering::Relaxed);
        // Relaxed: who pops loads it again, with acquire.
        position & DUE != 0 || self.areas.device.load_u16(RING_IDX, Ordering::Relaxed) != position as u16
    }
}
