//! The lock of an image, which the cluster keeps.
//!
//! librbd takes the lock of an image when it first writes, and gives it to whoever asks: two clients that write take turns, and a
//! file system between them is lost. We take it for as long as a guest uses the disk, and then librbd refuses others. Nor do we take
//! it from a client that is alive, which would have to give it to us: QEMU, for one, does not insist on it.
//!
//! A client that has died is known to the cluster as somebody who has the image open until its watch has run out (30 s, unless the
//! cluster has been told otherwise), and is shut out when its lock is taken after that: whatever it had on the way does not arrive.

use super::control::Outcome;
use super::ffi::Image;
use crate::lock::{LockError, PATIENCE};
use rustix::io::Errno;
use std::ffi::CStr;
use std::io;
use std::thread;
use std::time::{Duration, Instant};

/// How long an owner is waited for that may have died.
const DEAD_AFTER: Duration = Duration::from_secs(40);
/// Between two looks at who has it.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Who is alive answers within so many milliseconds.
const ANSWER_MS: u64 = 2000;

/// How long [`acquire`] may take where the cluster answers, and some more.
pub(super) const ACQUIRE_WITHIN: Duration = Duration::from_secs(50);

/// Takes the lock, once nobody has it who is alive.
pub(super) fn acquire(image: &Image, header: &CStr) -> Outcome {
    if image.owns_lock().map_err(failed)? {
        return Ok(());
    }
    wait(image, header, DEAD_AFTER)?;
    match image.acquire_lock() {
        // Another one was there first.
        Err(error) if error.raw_os_error() == Some(Errno::ROFS.raw_os_error()) => {
            Err(LockError::Owned(owner(image).map_err(failed)?.unwrap_or_else(|| "unknown".into())))
        }
        taken => taken.map_err(failed),
    }
}

/// Whether somebody who is alive keeps the lock. One who may have died does not count.
pub(super) fn check(image: &Image, header: &CStr) -> Outcome {
    wait(image, header, Duration::ZERO)
}

pub(super) fn release(image: &Image) -> Outcome {
    if image.owns_lock().map_err(failed)? { image.release_lock().map_err(failed) } else { Ok(()) }
}

/// Waits until nobody has the lock, for as long as it is worth: `dead_after` where the owner does not answer.
fn wait(image: &Image, header: &CStr, dead_after: Duration) -> Outcome {
    let start = Instant::now();
    let (mut told, mut answers_since) = (false, None);
    while let Some(owner) = owner(image).map_err(failed)? {
        let answers = image.all_answer(header, ANSWER_MS);
        if !answers && dead_after.is_zero() {
            return Ok(());
        }
        // One answer says little: the owner's watch may have run out after the look at who has it, and then the others answer.
        answers_since = answers.then(|| answers_since.unwrap_or_else(Instant::now));
        let in_vain = match answers_since {
            Some(since) => since.elapsed() >= PATIENCE,
            None => start.elapsed() >= dead_after,
        };
        if in_vain {
            return Err(LockError::Owned(owner));
        }
        if !std::mem::replace(&mut told, true) {
            tracing::info!(owner, answers, "waiting for the lock of a Ceph image");
        }
        thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

/// The client that has the lock and the image open, as far as the cluster knows.
fn owner(image: &Image) -> io::Result<Option<String>> {
    let owners = image.lock_owners()?;
    if owners.is_empty() {
        return Ok(None);
    }
    let watchers = image.watchers()?;
    Ok(owners.into_iter().find(|owner| watchers.contains(owner)))
}

/// What the cluster has against it.
pub(super) fn failed(error: io::Error) -> LockError {
    LockError::Failed(explained(error))
}

/// The one reason that the C library has no good words for.
fn explained(error: io::Error) -> io::Error {
    if error.raw_os_error() == Some(Errno::SHUTDOWN.raw_os_error()) {
        io::Error::other(
            "the cluster has shut this client out, as it does when another takes its lock; start the daemon again",
        )
    } else {
        error
    }
}
