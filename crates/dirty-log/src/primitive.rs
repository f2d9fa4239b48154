//! What can be replaced by what loom watches, and the fan-out, which is small there.

#[cfg(loom)]
pub(crate) use loom::{
    sync::atomic::{AtomicPtr, AtomicU64, Ordering, fence},
    sync::{Mutex, MutexGuard},
    thread::yield_now,
};
#[cfg(not(loom))]
pub(crate) use std::{
    sync::atomic::{AtomicPtr, AtomicU64, Ordering, fence},
    sync::{Mutex, MutexGuard},
    thread::yield_now,
};

/// Bits of an address that choose an entry of a table.
pub(crate) const BITS: u32 = if cfg!(loom) { 1 } else { 9 };
/// Places in a block of the reverse map: with the link, one cache line.
pub(crate) const PLACES: usize = if cfg!(loom) { 2 } else { 7 };
/// Slots that there can be at once.
pub(crate) const SLOTS: usize = if cfg!(loom) { 2 } else { 512 };
/// Words of a piece of a dirty bitmap.
pub(crate) const WORDS: usize = if cfg!(loom) { 1 } else { 64 };

/// What a thread left behind when it panicked is whole: nothing here panics between two steps that belong together.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Waits a little for another thread, longer as `turns` grow.
pub(crate) fn relax(turns: &mut u32) {
    *turns = turns.saturating_add(1);
    if cfg!(loom) || *turns > 64 {
        // That thread may need this processor.
        yield_now();
    } else {
        std::hint::spin_loop();
    }
}
