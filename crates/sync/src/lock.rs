//! Locks a mutex, even if it is poisoned.

#[cfg(not(loom))]
use crate::{Mutex, MutexGuard};
use std::sync::PoisonError;

/// Locks `mutex`, even if a thread panicked while it held the lock.
///
/// Use it for values that are consistent at every point where a panic is possible.
#[cfg(not(loom))]
#[inline]
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks `mutex`, even if a thread panicked while it held the lock. Code that no model runs can have a mutex
/// of the standard library.
#[cfg(loom)]
pub fn lock<M: Lock>(mutex: &M) -> M::Guard<'_> {
    mutex.guard()
}

/// A mutex of loom or of the standard library.
#[cfg(loom)]
pub trait Lock {
    /// The guard of a mutex that is locked.
    type Guard<'g>
    where
        Self: 'g;

    /// Locks the mutex.
    fn guard(&self) -> Self::Guard<'_>;
}

#[cfg(loom)]
impl<T> Lock for loom::sync::Mutex<T> {
    type Guard<'g>
        = loom::sync::MutexGuard<'g, T>
    where
        Self: 'g;

    fn guard(&self) -> Self::Guard<'_> {
        self.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(loom)]
impl<T> Lock for std::sync::Mutex<T> {
    type Guard<'g>
        = std::sync::MutexGuard<'g, T>
    where
        Self: 'g;

    fn guard(&self) -> Self::Guard<'_> {
        self.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(loom)]
impl<M: Lock> Lock for loom::sync::Arc<M> {
    type Guard<'g>
        = M::Guard<'g>
    where
        Self: 'g;

    fn guard(&self) -> Self::Guard<'_> {
        (**self).guard()
    }
}

#[cfg(loom)]
impl<M: Lock> Lock for std::sync::Arc<M> {
    type Guard<'g>
        = M::Guard<'g>
    where
        Self: 'g;

    fn guard(&self) -> Self::Guard<'_> {
        (**self).guard()
    }
}
