//! Locks a mutex, even if it is poisoned.

use crate::{Mutex, MutexGuard};
use std::sync::PoisonError;

/// Locks `mutex`, even if a thread panicked while it held the lock.
///
/// Use it for values that are consistent at every point where a panic is possible.
#[inline]
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
