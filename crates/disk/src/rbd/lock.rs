//! The lock of an image, which the cluster keeps.
//!
//! librbd takes the lock of an image at its first write, and gives it to any client that asks. So two writing
//! clients take turns, which destroys a file system on the image. This program takes the lock and keeps it as
//! long as a guest uses the disk; librbd then refuses other clients. It does not take the lock from a client
//! that is alive, although that client would have to give it up. QEMU, for example, does not keep its lock.
//!
//! The cluster sees a dead client as one that has the image open, until its watch expires (30 s by default).
//! If the lock is taken after that, the cluster blocks the dead client: its writes in flight never arrive.

use super::control::Outcome;
use super::ffi::Image;
use crate::lock::{LOCK_WAIT_MAX, LockError};
use rustix::io::Errno;
use std::ffi::CStr;
use std::io;
use std::thread;
use std::time::{Duration, Instant};

/// The time to wait for an owner that may be dead.
const DEAD_AFTER: Duration = Duration::from_secs(40);
/// The pause between two checks of the owner.
const CHECK_EVERY: Duration = Duration::from_millis(250);
/// The time in milliseconds in which a live client answers.
const ANSWER_MS: u64 = 2000;

/// The longest time of [`acquire`] if the cluster answers, plus a margin.
pub(super) const ACQUIRE_WITHIN: Duration = Duration::from_secs(50);

/// Takes the lock as soon as no live client has it.
pub(super) fn acquire(image: &Image, header: &CStr) -> Outcome {
    if image.owns_lock().map_err(failed)? {
        return Ok(());
    }
    wait(image, header, DEAD_AFTER)?;
    match image.acquire_lock() {
        // Another client has taken it first.
        Err(error) if error.raw_os_error() == Some(Errno::ROFS.raw_os_error()) => {
            Err(LockError::Owned(owner(image).map_err(failed)?.unwrap_or_else(|| "unknown".into())))
        }
        taken => taken.map_err(failed),
    }
}

/// Checks that no live client has the lock. A client that may be dead does not count.
pub(super) fn check(image: &Image, header: &CStr) -> Outcome {
    wait(image, header, Duration::ZERO)
}

pub(super) fn release(image: &Image) -> Outcome {
    if image.owns_lock().map_err(failed)? { image.release_lock().map_err(failed) } else { Ok(()) }
}

/// Waits until no client has the lock. `dead_after` is the limit if the owner does not answer.
fn wait(image: &Image, header: &CStr, dead_after: Duration) -> Outcome {
    let start = Instant::now();
    let (mut logged, mut answers_since) = (false, None);
    while let Some(owner) = owner(image).map_err(failed)? {
        let answers = image.all_answer(header, ANSWER_MS);
        if !answers && dead_after.is_zero() {
            return Ok(());
        }
        // A single answer is not conclusive. The owner's watch may have expired after the check, and then all
        // remaining clients answer.
        answers_since = answers.then(|| answers_since.unwrap_or_else(Instant::now));
        let in_vain = match answers_since {
            Some(since) => since.elapsed() >= LOCK_WAIT_MAX,
            None => start.elapsed() >= dead_after,
        };
        if in_vain {
            return Err(LockError::Owned(owner));
        }
        if !std::mem::replace(&mut logged, true) {
            tracing::info!(owner, answers, "waiting for the lock of a Ceph image");
        }
        thread::sleep(CHECK_EVERY);
    }
    Ok(())
}

/// Returns the client that has both the lock and the image open, as far as the cluster knows.
fn owner(image: &Image) -> io::Result<Option<String>> {
    let owners = image.lock_owners()?;
    if owners.is_empty() {
        return Ok(None);
    }
    let watchers = image.watchers()?;
    Ok(owners.into_iter().find(|owner| watchers.contains(owner)))
}

/// Makes an error of the cluster's reason.
pub(super) fn failed(error: io::Error) -> LockError {
    LockError::Failed(explained(error))
}

/// Explains the one error for which the C library has no helpful text.
fn explained(error: io::Error) -> io::Error {
    if error.raw_os_error() == Some(Errno::SHUTDOWN.raw_os_error()) {
        io::Error::other(
            "the cluster has blocked this client because another one took its lock: restart the daemon",
        )
    } else {
        error
    }
}
