//! What a worker and the thread beside it share things with. `tests/submit_thread_loom.rs` runs the file that uses it over what loom
//! watches instead.

pub(crate) use crate::Waker;
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
