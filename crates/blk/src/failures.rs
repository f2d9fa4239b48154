//! Logs failed requests.
//!
//! A broken disk can fail a million requests a second. The first failure of each kind of request is logged at
//! once. After that, one failure in [`PAUSE`] is logged, with the number of failures since the last line.

use crate::operation::Operation;
use kickless_disk::IoError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tracing::{Span, warn};

/// The shortest time between two lines of a kind.
const PAUSE: Duration = Duration::from_secs(10);

/// The failed requests of all queues of a device, by operation.
#[derive(Debug)]
pub(crate) struct Failures {
    since: Instant,
    logs: [FailureLog; Operation::ALL.len()],
}

#[derive(Debug, Default)]
struct FailureLog {
    /// The time of the next line, in milliseconds since `since`.
    next_ms: AtomicU64,
    suppressed: AtomicU64,
}

impl Default for Failures {
    fn default() -> Self {
        Self { since: Instant::now(), logs: Default::default() }
    }
}

/// Returns whether a guest can cause this error at will, so that it does not mean a broken disk.
pub(crate) fn is_caused_by_guest(error: IoError) -> bool {
    matches!(error, IoError::Range | IoError::ReadOnly | IoError::Damaged | IoError::Unsupported)
}

impl Failures {
    /// Logs a failed request, or only counts it.
    #[cold]
    pub(crate) fn log(&self, span: &Span, queue: u16, of: Operation, error: IoError) {
        if let Some(suppressed) = self.may_log(of, self.since.elapsed()) {
            warn!(parent: span, queue, operation = of.name(), %error, suppressed, "a request failed");
        }
    }

    /// Returns the number of suppressed failures if a line may be logged now. The orders are relaxed, because
    /// no other data depend on these numbers.
    fn may_log(&self, of: Operation, now: Duration) -> Option<u64> {
        let (log, now_ms) = (&self.logs[of as usize], now.as_millis() as u64);
        let next_ms = log.next_ms.load(Ordering::Relaxed);
        let after = now_ms + PAUSE.as_millis() as u64;
        // Of several workers, only the one that sets the next time logs.
        let mine = now_ms >= next_ms
            && log.next_ms.compare_exchange(next_ms, after, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if mine {
            return Some(log.suppressed.swap(0, Ordering::Relaxed));
        }
        log.suppressed.fetch_add(1, Ordering::Relaxed);
        None
    }

    /// Logs the number of failures that are not logged yet. Called when a queue stops.
    pub(crate) fn log_suppressed(&self, span: &Span) {
        for ((of, _), log) in Operation::ALL.into_iter().zip(&self.logs) {
            let suppressed = log.suppressed.swap(0, Ordering::Relaxed);
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
        assert_eq!(failures.may_log(Operation::Read, ms(0)), Some(0));
        for now in [0, 1, 9_999] {
            assert_eq!(failures.may_log(Operation::Read, ms(now)), None);
        }
        assert_eq!(failures.may_log(Operation::Write, ms(5)), Some(0));
        assert_eq!(failures.may_log(Operation::Read, ms(10_000)), Some(3));
        assert_eq!(failures.may_log(Operation::Read, ms(19_999)), None);
        assert_eq!(failures.may_log(Operation::Read, ms(20_000)), Some(1));
        assert_eq!(failures.may_log(Operation::WriteZeroes, ms(20_000)), Some(0));
    }
}
