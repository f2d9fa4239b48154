//! A stand-in for an eventfd in models.

#[cfg(loom)]
use crate::{Condvar, Mutex, lock};

/// A flag that goes with an eventfd: set when the eventfd is signalled, cleared when it is read.
///
/// loom does not see system calls, so the threads of a model sleep on this flag instead of the eventfd.
/// Without loom the type is empty and its methods do nothing.
#[derive(Debug, Default)]
pub struct Latch {
    #[cfg(loom)]
    flags: Mutex<u32>,
    #[cfg(loom)]
    changed: Condvar,
}

#[cfg(not(loom))]
impl Latch {
    /// Sets the flag.
    #[inline]
    pub fn set(&self) {}

    /// Clears the flag.
    #[inline]
    pub fn clear(&self) {}
}

#[cfg(loom)]
impl Latch {
    /// The bit of the flag. A model may use the other bits for further events that its thread waits for.
    pub const SET: u32 = 1;

    /// Sets the flag and wakes the thread that waits for it.
    pub fn set(&self) {
        self.set_flag(Self::SET);
    }

    /// Clears the flag.
    pub fn clear(&self) {
        self.with(|flags| *flags &= !Self::SET);
    }

    /// Sets the bits `flag` and wakes the thread that waits for them.
    pub fn set_flag(&self, flag: u32) {
        self.with(|flags| *flags |= flag);
        self.changed.notify_one();
    }

    /// Calls `access` with all flags, which it may change.
    pub fn with<T>(&self, access: impl FnOnce(&mut u32) -> T) -> T {
        access(&mut lock(&self.flags))
    }

    /// Waits until the flag is set, and leaves it set.
    pub fn wait(&self) {
        self.wait_for(|flags| (*flags & Self::SET != 0).then_some(()));
    }

    /// Waits until `access` returns a value, and returns that value.
    ///
    /// Calls `access` with all flags, first at once and then after each change. `access` may change the
    /// flags.
    pub fn wait_for<T>(&self, mut access: impl FnMut(&mut u32) -> Option<T>) -> T {
        let mut flags = lock(&self.flags);
        loop {
            match access(&mut flags) {
                Some(found) => return found,
                None => flags = self.changed.wait(flags).unwrap_or_else(std::sync::PoisonError::into_inner),
            }
        }
    }
}
