//! Stops a device on errors that an operator can mend, instead of reporting them to the guest.
//!
//! The first such error stops the device. Its queues keep the failed requests ([`crate::queue`]) and take no
//! new ones. [`ErrorStop::resume`] lets them go on. The state of all queues together is under one lock, which
//! is taken only for failed requests and by callers of other threads.

use crate::halt::Halt;
use crate::operation::Operation;
use kickless_device::StoppedOnError;
use kickless_disk::IoError;
use kickless_io::Errno;
use kickless_sync::lock;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use tracing::{Span, error};

/// The errors of a device for which it has stopped.
#[derive(Debug, Default)]
pub(crate) struct ErrorStop {
    /// The device stops. Otherwise it reports all errors.
    pub(crate) is_on: bool,
    /// The number of times that the device was told to go on. A kept request starts again when this differs
    /// from the number at its last start. So each resume restarts each kept request once, whichever queue
    /// stops the device again meanwhile.
    resumes: AtomicU64,
    /// The number of calls of [`ErrorStop::limit`].
    limits: AtomicU64,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    /// The number of kept requests.
    requests: u64,
    /// The operation and the error that stopped the device.
    cause: Option<(Operation, IoError)>,
    /// The number of times that the device has stopped.
    stops: u64,
    /// The time at which the kept requests of stopping queues start one last time.
    stop_deadline: Option<u64>,
}

/// Returns whether an error goes away when an operator makes room, or a remote disk comes back. `is_remote`:
/// the disk is served over a network, not through a file.
///
/// A failed flush of a file has lost writes, and a second flush would succeed without them. So it is always
/// reported.
pub(crate) fn can_be_mended(error: IoError, operation: Operation, is_remote: bool) -> bool {
    let IoError::Os(errno) = error else { return false };
    match errno {
        Errno::NOSPC | Errno::DQUOT => operation != Operation::Flush,
        // The kernel reports NOLINK for a lost transport.
        Errno::TIMEDOUT | Errno::NOLINK => is_remote || operation != Operation::Flush,
        _ => false,
    }
}

impl ErrorStop {
    /// Returns the number of resumes so far. Relaxed: a queue that sees an old number looks again.
    pub(crate) fn resumes(&self) -> u64 {
        self.resumes.load(Ordering::Relaxed)
    }

    /// Returns the number of limits so far. Relaxed: as above, and the caller of `limit` repeats it.
    pub(crate) fn limits(&self) -> u64 {
        self.limits.load(Ordering::Relaxed)
    }

    /// Ends the waits of kept requests within a bounded time.
    pub(crate) fn limit(&self) {
        self.limits.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the time at which the kept requests of a stopping queue start one last time: `until`, or the
    /// time of a queue that has asked before. It holds until the device keeps no requests any more.
    pub(crate) fn stop_deadline(&self, until: u64) -> u64 {
        *lock(&self.kept).stop_deadline.get_or_insert(until)
    }

    /// Counts a request that a queue keeps, and stops the device. A request that began before the last resume
    /// stops nothing: it may have failed before the resume, so it is tried again.
    pub(crate) fn keep(&self, halt: &Halt, span: &Span, resumes: u64, cause: (Operation, IoError)) {
        let mut kept = lock(&self.kept);
        kept.requests += 1;
        if resumes != self.resumes() || !halt.set_stopped(true) {
            return;
        }
        kept.stops += 1;
        kept.cause = Some(cause);
        drop(kept);
        let (operation, error) = (cause.0.name(), cause.1);
        error!(parent: span, operation, %error, "the device has stopped: its requests wait until the cause is mended and device.resume is called");
    }

    /// Counts a request that starts again, or that its queue gives up. A device without kept requests has not
    /// stopped.
    pub(crate) fn release(&self, halt: &Halt) {
        let mut kept = lock(&self.kept);
        kept.requests = kept.requests.saturating_sub(1);
        if kept.requests == 0 {
            kept.stop_deadline = None;
            halt.set_stopped(false);
        }
    }

    /// Lets the device go on. Returns whether it had stopped.
    pub(crate) fn resume(&self, halt: &Halt) -> bool {
        let mut kept = lock(&self.kept);
        kept.stop_deadline = None;
        self.resumes.fetch_add(1, Ordering::Relaxed);
        halt.set_stopped(false)
    }

    /// Returns the error for which the device has stopped.
    pub(crate) fn stopped(&self, halt: &Halt) -> Option<StoppedOnError> {
        let kept = lock(&self.kept);
        let (operation, error) = kept.cause.filter(|_| halt.is_stopped())?;
        Some(StoppedOnError { error: format!("{}: {error}", operation.name()), requests: kept.requests })
    }

    /// Goes on with the number of another process, which is not believed if it is too large to count on.
    pub(crate) fn set_stops(&self, stops: u64) {
        lock(&self.kept).stops = stops.min(u64::MAX / 2);
    }

    /// Returns the number of times that the device has stopped.
    pub(crate) fn stops(&self) -> u64 {
        lock(&self.kept).stops
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FULL: (Operation, IoError) = (Operation::Write, IoError::Os(Errno::NOSPC));

    #[test]
    fn a_flush_of_a_file_is_not_tried_again() {
        let full = IoError::Os(Errno::NOSPC);
        assert!(can_be_mended(full, Operation::Write, false));
        assert!(
            !can_be_mended(full, Operation::Flush, false) && !can_be_mended(full, Operation::Flush, true)
        );
        let away = IoError::Os(Errno::TIMEDOUT);
        assert!(can_be_mended(away, Operation::Flush, true) && !can_be_mended(away, Operation::Flush, false));
        for error in [IoError::Os(Errno::IO), IoError::Range, IoError::Damaged] {
            assert!(!can_be_mended(error, Operation::Write, true));
        }
    }

    #[test]
    fn the_device_has_stopped_while_requests_are_kept() {
        let (stop, halt, span) = (ErrorStop::default(), Halt::default(), Span::none());
        stop.keep(&halt, &span, 0, FULL);
        stop.keep(&halt, &span, 0, FULL);
        let stopped = stop.stopped(&halt).unwrap();
        assert_eq!((stopped.requests, stop.stops()), (2, 1));
        assert!(stopped.error.starts_with("write: "), "{}", stopped.error);
        stop.release(&halt);
        assert!(stop.stopped(&halt).is_some() && halt.is_set());
        stop.release(&halt);
        assert!(stop.stopped(&halt).is_none() && !halt.is_set());
    }

    #[test]
    fn a_failure_from_before_a_resume_stops_nothing() {
        let (stop, halt, span) = (ErrorStop::default(), Halt::default(), Span::none());
        assert!(!stop.resume(&halt));
        stop.keep(&halt, &span, 0, FULL);
        assert!(stop.stopped(&halt).is_none());
        stop.keep(&halt, &span, 1, FULL);
        assert_eq!(stop.stopped(&halt).unwrap().requests, 2);
        assert!(stop.resume(&halt) && !stop.resume(&halt));
        assert_eq!(stop.resumes(), 3);
    }
}
