//! Locks that survive a panic.

use crate::{Mutex, MutexGuard};
use std::sync::PoisonError;

/// Locks `mutex`, also after a thread panicked while it held the lock. For values that are whole whenever a panic is
/// possible.
#[inline]
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
