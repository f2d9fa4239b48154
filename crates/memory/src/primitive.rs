//! What the registry of mappings is made of. `tests/fault_loom.rs` runs it over what loom watches instead.

pub(crate) use std::sync::Mutex;
pub(crate) use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
