//! The part of an eventfd that a model sees.

#[cfg(loom)]
use crate::{Condvar, Mutex, lock};

/// A flag that goes with an eventfd: set when that is signalled, cleared when that is read. A model sees nothing of what goes
/// through the kernel, so its threads sleep on this instead. Without loom it is empty, and does nothing.
#[derive(Debug, Default)]
pub struct Latch {
    #[cfg(loom)]
    flags: Mutex<u32>,
    #[cfg(loom)]
    changed: Condvar,
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
    /// The flag itself. The others are a model's: of what else its thread sleeps on.
    pub const SET: u32 = 1;

    /// Sets it, and wakes the thread that waits for it.
    pub fn set(&self) {
        self.set_flag(Self::SET);
    }

    /// Clears it.
    pub fn clear(&self) {
        self.with(|flags| *flags &= !Self::SET);
    }

    /// Sets another flag, and wakes the thread that waits for it.
    pub fn set_flag(&self, flag: u32) {
        self.with(|flags| *flags |= flag);
        self.changed.notify_one();
    }

    /// Looks at all flags, and changes them.
    pub fn with<T>(&self, look: impl FnOnce(&mut u32) -> T) -> T {
        look(&mut lock(&self.flags))
    }

    /// Waits until it is set, and leaves it so.
    pub fn wait(&self) {
        self.wait_for(|flags| (*flags & Self::SET != 0).then_some(()));
    }

    /// Looks at all flags, and changes them, until `look` returns something.
    pub fn wait_for<T>(&self, mut look: impl FnMut(&mut u32) -> Option<T>) -> T {
        let mut flags = lock(&self.flags);
        loop {
            match look(&mut flags) {
                Some(found) => return found,
                None => flags = self.changed.wait(flags).unwrap_or_else(std::sync::PoisonError::into_inner),
            }
        }
    }
}
