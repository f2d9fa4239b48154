//! The part of an eventfd that a model sees.

#[cfg(loom)]
use crate::{Condvar, Mutex, lock};

/// A flag that goes with an eventfd: set when that is signalled, cleared when that is read. A model sees nothing of what goes
/// through the kernel, so its threads sleep on this instead. Without loom it is empty, and does nothing.
#[derive(Debug, Default)]
pub struct Latch {
    #[cfg(loom)]
    is_set: Mutex<bool>,
    #[cfg(loom)]
    set: Condvar,
}

#[cfg(not(loom))]
impl Latch {
    /// Sets it.
    #[inline]
    pub fn set(&self) {}

    /// Clears it.
    #[inline]
    pub fn clear(&self) {}
}

#[cfg(loom)]
impl Latch {
    /// Sets it, and wakes the thread that waits for it.
    pub fn set(&self) {
        *lock(&self.is_set) = true;
        self.set.notify_one();
    }

    /// Clears it.
    pub fn clear(&self) {
        *lock(&self.is_set) = false;
    }

    /// Waits until it is set, and leaves it so.
    pub fn wait(&self) {
        let mut is_set = lock(&self.is_set);
        while !*is_set {
            is_set = self.set.wait(is_set).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
    }
}
