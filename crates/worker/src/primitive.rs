//! What workers hand work over with. `tests/loom.rs` runs the files that use it over what loom watches instead.

pub(crate) use kickless_io::Waker;
pub(crate) use std::sync::{Mutex, mpsc::Sender};
