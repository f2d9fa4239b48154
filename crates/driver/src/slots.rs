//! What is in flight under each id: put in by whoever submits, taken out by whoever completes.
//!
//! The two never hold one another's lock, and what they hand over goes past a device that may lie about it. So nothing
//! here relies on the ring: each place has a flag of its own, and only the flag says whose it is.

#![expect(unsafe_code, reason = "island: cells that two threads hand to one another")]

use std::mem::MaybeUninit;

use kickless_sync::atomic::{AtomicBool, Ordering};
use kickless_sync::{Arc, UnsafeCell};

struct Slot<T> {
    /// Set: it is the taker's. Clear: it is the filler's.
    full: AtomicBool,
    /// Whole while the flag is set.
    value: UnsafeCell<MaybeUninit<T>>,
}

impl<T> Drop for Slot<T> {
    fn drop(&mut self) {
        // Acquire, whose partner is the release in `fill`.
        if self.full.load(Ordering::Acquire) {
            // SAFETY: the flag is set, so the value is whole; nobody else is left who could take it.
            self.value.with_mut(|place| unsafe { (*place).assume_init_drop() });
        }
    }
}

struct Slots<T>(Box<[Slot<T>]>);

// SAFETY: a value is reached by `Filler` while its flag is clear and by `Taker` while it is set, each of which there is one
// of and which are borrowed mutably for it; so values only move from thread to thread, for which `T: Send` is enough.
unsafe impl<T: Send> Sync for Slots<T> {}
// SAFETY: as above; it owns its values.
unsafe impl<T: Send> Send for Slots<T> {}

/// The end that fills. There is one.
pub(crate) struct Filler<T>(Arc<Slots<T>>);

/// The end that takes. There is one.
pub(crate) struct Taker<T>(Arc<Slots<T>>);

/// Places for `size` values, all empty, and their two ends.
pub(crate) fn slots<T>(size: usize) -> (Filler<T>, Taker<T>) {
    let empty = |_| Slot { full: AtomicBool::new(false), value: UnsafeCell::new(MaybeUninit::uninit()) };
    let slots = Arc::new(Slots((0..size).map(empty).collect()));
    (Filler(slots.clone()), Taker(slots))
}

impl<T> Filler<T> {
    /// Puts a value in.
    ///
    /// # Errors
    /// There is no such place, or it is full; the value comes back.
    #[inline]
    pub(crate) fn fill(&mut self, id: u16, value: T) -> Result<(), T> {
        let Some(slot) = self.0.0.get(usize::from(id)) else { return Err(value) };
        // Acquire, whose partner is the release in `take`: the taker is done with it.
        if slot.full.load(Ordering::Acquire) {
            return Err(value);
        }
        slot.value.with_mut(|place| {
            // SAFETY:
            // - the flag is clear, so the taker keeps away; it was seen with acquire, so what the taker did is over;
            // - there is no other filler, and this one is borrowed mutably.
            unsafe { (*place).write(value) };
        });
        // Release, whose partner is the acquire in `take`.
        slot.full.store(true, Ordering::Release);
        Ok(())
    }
}

impl<T> Taker<T> {
    /// Takes a value out; `None` if there is none, whatever the device says.
    #[inline]
    pub(crate) fn take(&mut self, id: u16) -> Option<T> {
        let slot = self.0.0.get(usize::from(id))?;
        // Acquire, whose partner is the release in `fill`.
        if !slot.full.load(Ordering::Acquire) {
            return None;
        }
        let value = slot.value.with_mut(|place| {
            // SAFETY:
            // - the flag is set, so the filler keeps away; it was seen with acquire, so the value is whole;
            // - there is no other taker, and this one is borrowed mutably;
            // - the flag is cleared below, so the value is read once.
            unsafe { (*place).assume_init_read() }
        });
        // Release, whose partner is the acquire in `fill`.
        slot.full.store(false, Ordering::Release);
        Some(value)
    }

    /// How many places there are.
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
