//! Atomics, locks and cells: the standard library's, or loom's in a build with `--cfg loom`.
//!
//! A file that depends on the order of its memory accesses takes its types from here. The file's model is a
//! test of the same crate, built with `--cfg loom`. loom runs the file itself in every order that the memory
//! model allows.
//!
//! All other files use the standard library, because values of loom's types can exist only while a model
//! runs. `tools/models` runs all models.
//!
//! ```
//! use kickless_sync::atomic::{AtomicU32, Ordering};
//! use kickless_sync::{Mutex, lock};
//!
//! kickless_sync::process_wide! {
//!     /// The number of tickets given out so far.
//!     static TICKETS: AtomicU32 = AtomicU32::new(0);
//! }
//!
//! # #[cfg(not(loom))] {
//! let taken = Mutex::new(Vec::new());
//! lock(&taken).push(TICKETS.fetch_add(1, Ordering::Relaxed));
//! # }
//! ```

mod cell;
mod latch;
mod lock;
pub mod mpsc;
mod statics;

/// Atomics and fences.
pub mod atomic {
    #[cfg(loom)]
    pub use loom::sync::atomic::{
        AtomicBool, AtomicPtr, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
    };
    #[cfg(not(loom))]
    pub use std::sync::atomic::{
        AtomicBool, AtomicPtr, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
    };
}

pub use cell::UnsafeCell;
pub use latch::Latch;
#[cfg(loom)]
pub use lock::Lock;
pub use lock::lock;
#[cfg(loom)]
#[doc(hidden)]
pub use loom;
#[cfg(loom)]
pub use loom::{
    sync::{Arc, Condvar, Mutex, MutexGuard},
    thread::yield_now,
};
#[cfg(not(loom))]
pub use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard},
    thread::yield_now,
};
