//! Failed requests in the log.
//!
//! A disk that fails can fail a million requests a second. Of each kind of request, the first that fails is logged at
//! once, and then one in [`PAUSE`], with the number of those between.

use crate::request::{Kind, Purpose};
use kickless_disk::IoError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tracing::{Span, warn};

/// How long a kind is silent after a line.
const PAUSE: Duration = Duration::from_secs(10);

/// The kinds of requests that the disk carries out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    Read,
    Write,
    Flush,
    Discard,
    WriteZeroes,
    SecureErase,
}

impl Operation {
    const ALL: [(Self, &'static str); 6] = [
        (Self::Read, "read"),
        (Self::Write, "write"),
        (Self::Flush, "flush"),
        (Self::Discard, "discard"),
        (Self::WriteZeroes, "write-zeroes"),
        (Self::SecureErase, "secure-erase"),
    ];

    pub(crate) fn of(kind: Kind) -> Self {
        match kind {
            Kind::Write { .. } => Self::Write,
            Kind::Flush => Self::Flush,
            Kind::Extents(Purpose::Discard) => Self::Discard,
            Kind::Extents(Purpose::WriteZeroes) => Self::WriteZeroes,
            Kind::Extents(Purpose::SecureErase) => Self::SecureErase,
            // The others are answered without the disk.
            Kind::Read { .. } | Kind::GetId | Kind::GetLifetime => Self::Read,
        }
    }

    fn name(self) -> &'static str {
        Self::ALL[self as usize].1
    }
}

/// The failed operations of a device, on all its queues.
#[derive(Debug)]
pub(crate) struct Failures {
    since: Instant,
    kinds: [Failed; Operation::ALL.len()],
}

#[derive(Debug, Default)]
struct Failed {
    /// From when on a line may come, in milliseconds.
    next_ms: AtomicU64,
    suppressed: AtomicU64,
}

impl Default for Failures {
    fn default() -> Self {
        Self { since: Instant::now(), kinds: Default::default() }
    }
}

/// Whether a guest alone can cause it, as often as it likes: it is not the disk's.
pub(crate) fn is_guests(error: IoError) -> bool {
    matches!(error, IoError::Range | IoError::ReadOnly | IoError::Damaged | IoError::Unsupported)
}

impl Failures {
    /// Logs a failed request, or counts it.
    #[cold]
    pub(crate) fn note(&self, span: &Span, queue: u16, of: Operation, error: IoError) {
        if let Some(suppressed) = self.turn(of, self.since.elapsed()) {
            warn!(parent: span, queue, operation = of.name(), %error, suppressed, "a request failed");
        }
    }

    /// Whether a line comes now: after so many that did not. Relaxed: only numbers.
    fn turn(&self, of: Operation, now: Duration) -> Option<u64> {
        let (failed, now_ms) = (&self.kinds[of as usize], now.as_millis() as u64);
        let next_ms = failed.next_ms.load(Ordering::Relaxed);
        let after = now_ms + PAUSE.as_millis() as u64;
        // Of several workers, the one that sets the next time logs.
        let mine = now_ms >= next_ms
            && failed.next_ms.compare_exchange(next_ms, after, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if mine {
            return Some(failed.suppressed.swap(0, Ordering::Relaxed));
        }
        failed.suppressed.fetch_add(1, Ordering::Relaxed);
        None
    }

    /// Logs what was counted and has not been told: a queue stops.
    pub(crate) fn tell_rest(&self, span: &Span) {
        for ((of, _), failed) in Operation::ALL.into_iter().zip(&self.kinds) {
            let suppressed = failed.suppressed.swap(0, Ordering::Relaxed);
            if suppressed > 0 {
                warn!(parent: span, operation = of.name(), suppressed, "more requests failed");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_and_then_one_in_a_while() {
        let (failures, ms) = (Failures::default(), Duration::from_millis);
        assert_eq!(failures.turn(Operation::Read, ms(0)), Some(0));
        for now in [0, 1, 9_999] {
            assert_eq!(failures.turn(Operation::Read, ms(now)), None);
        }
        assert_eq!(failures.turn(Operation::Write, ms(5)), Some(0));
        assert_eq!(failures.turn(Operation::Read, ms(10_000)), Some(3));
        assert_eq!(failures.turn(Operation::Read, ms(19_999)), None);
        assert_eq!(failures.turn(Operation::Read, ms(20_000)), Some(1));
        assert_eq!(failures.turn(Operation::SecureErase, ms(20_000)), Some(0));
    }

    #[test]
    fn names_in_their_places() {
        for (place, (operation, _)) in Operation::ALL.into_iter().enumerate() {
            assert_eq!(operation as usize, place);
        }
    }
}
