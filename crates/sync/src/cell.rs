//! A cell that is accessed through a closure.

#[cfg(loom)]
pub use loom::cell::UnsafeCell;

/// `std::cell::UnsafeCell` with loom's methods.
#[cfg(not(loom))]
#[derive(Debug)]
pub struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    /// Makes a cell that holds `value`.
    pub const fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    /// Calls `access` with a pointer to the value. loom checks that nothing changes the value during the
    /// call.
    #[inline]
    pub fn with<R>(&self, access: impl FnOnce(*const T) -> R) -> R {
        access(self.0.get())
    }

    /// Calls `access` with a pointer to the value. loom checks that there is no other access during the call.
    #[inline]
    pub fn with_mut<R>(&self, access: impl FnOnce(*mut T) -> R) -> R {
        access(self.0.get())
    }
}
