//! The requests in flight, by id. The submitting thread puts them in, and the completing thread takes them
//! out.
//!
//! Neither needs the lock of the other. The ids come from a device that may be hostile, so nothing here
//! relies on the ring. Each slot has a flag of its own, and only the flag says which side owns the slot.

#![expect(unsafe_code, reason = "island: cells that two threads hand to one another")]

use std::mem::MaybeUninit;

use kickless_sync::atomic::{AtomicBool, Ordering};
use kickless_sync::{Arc, UnsafeCell};

struct Slot<T> {
    /// Set: the slot belongs to the taker. Clear: it belongs to the filler.
    full: AtomicBool,
    /// Initialised while the flag is set.
    value: UnsafeCell<MaybeUninit<T>>,
}

impl<T> Drop for Slot<T> {
    fn drop(&mut self) {
        // Acquire. Partner: the release in `fill`.
        if self.full.load(Ordering::Acquire) {
            // SAFETY: the flag is set, so the value is initialised; no other owner is left that could take
            // it.
            self.value.with_mut(|place| unsafe { (*place).assume_init_drop() });
        }
    }
}

struct Slots<T>(Box<[Slot<T>]>);

// SAFETY: `Filler` accesses a value while its flag is clear, and `Taker` while it is set. There is one of
// each, and each is borrowed mutably for the access. So values only move from thread to thread, for which `T:
// Send` is enough.
unsafe impl<T: Send> Sync for Slots<T> {}
// SAFETY: as above; it owns its values.
unsafe impl<T: Send> Send for Slots<T> {}

/// The end that fills slots. There is only one.
pub(crate) struct Filler<T>(Arc<Slots<T>>);

/// The end that takes values. There is only one.
pub(crate) struct Taker<T>(Arc<Slots<T>>);

/// Makes `size` empty slots, and their two ends.
pub(crate) fn slots<T>(size: usize) -> (Filler<T>, Taker<T>) {
    let empty = |_| Slot { full: AtomicBool::new(false), value: UnsafeCell::new(MaybeUninit::uninit()) };
    let slots = Arc::new(Slots((0..size).map(empty).collect()));
    (Filler(slots.clone()), Taker(slots))
}

impl<T> Filler<T> {
    /// Returns a slot to fill, or `None` if it does not exist or is full.
    #[inline]
    pub(crate) fn vacant(&mut self, id: u16) -> Option<Vacant<'_, T>> {
        let slot = self.0.0.get(usize::from(id))?;
        // Acquire. Partner: the release in `take`, after which the taker does not access the slot.
        (!slot.full.load(Ordering::Acquire)).then_some(Vacant(slot))
    }

    /// Fills a slot.
    ///
    /// # Errors
    /// The slot does not exist or is full; the value comes back.
    #[inline]
    pub(crate) fn fill(&mut self, id: u16, value: T) -> Result<(), T> {
        match self.vacant(id) {
            Some(slot) => {
                slot.fill(value);
                Ok(())
            }
            None => Err(value),
        }
    }
}

/// A slot that the filler owns.
pub(crate) struct Vacant<'a, T>(&'a Slot<T>);

impl<T> Vacant<'_, T> {
    #[inline]
    pub(crate) fn fill(self, value: T) {
        self.0.value.with_mut(|place| {
            // SAFETY:
            // - the flag was clear when `vacant` loaded it, so the taker does not access the slot; it was
            //   loaded with acquire, so the taker's last access has ended;
            // - there is no other filler. This one is borrowed mutably as long as `self`, so it has not
            //   filled the slot since.
            unsafe { (*place).write(value) };
        });
        // Release. Partner: the acquire in `take`.
        self.0.full.store(true, Ordering::Release);
    }
}

/// A slot that the taker owns.
pub(crate) struct Full<'a, T>(&'a Slot<T>);

impl<T> Full<'_, T> {
    /// Takes the value out.
    // Without an `Option` around the value, it is copied once.
    #[inline(always)]
    pub(crate) fn take(self) -> T {
        let value = self.0.value.with_mut(|place| {
            // SAFETY:
            // - the flag was set when `full` loaded it, so the filler does not access the slot; it was loaded
            //   with acquire, so the value is initialised;
            // - there is no other taker. This one is borrowed mutably as long as `self`;
            // - the flag is cleared below, and `self` is gone, so the value is read once.
            unsafe { (*place).assume_init_read() }
        });
        // Release. Partner: the acquire in `vacant`.
        self.0.full.store(false, Ordering::Release);
        value
    }
}

impl<T> Taker<T> {
    /// Returns a slot with a value, or `None` if there is none, even if the device says otherwise.
    #[inline]
    pub(crate) fn full(&mut self, id: u16) -> Option<Full<'_, T>> {
        let slot = self.0.0.get(usize::from(id))?;
        // Acquire. Partner: the release in `fill`.
        slot.full.load(Ordering::Acquire).then_some(Full(slot))
    }

    /// Takes a value out. Returns `None` if there is none.
    #[inline]
    pub(crate) fn take(&mut self, id: u16) -> Option<T> {
        self.full(id).map(Full::take)
    }

    /// Returns the number of slots.
    pub(crate) fn size(&self) -> u16 {
        u16::try_from(self.0.0.len()).unwrap_or(u16::MAX)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn each_value_is_taken_once() {
        let (mut filler, mut taker) = slots::<Box<u16>>(2);
        assert!(taker.take(0).is_none() && taker.take(2).is_none());
        filler.fill(0, Box::new(7)).unwrap();
        assert_eq!(*filler.fill(0, Box::new(8)).unwrap_err(), 8);
        assert_eq!(*filler.fill(2, Box::new(9)).unwrap_err(), 9);
        assert_eq!(taker.take(0).as_deref(), Some(&7));
        assert!(taker.take(0).is_none());
        filler.fill(1, Box::new(1)).unwrap();
        drop(filler);
        assert_eq!(taker.take(1).as_deref(), Some(&1));
    }
}
