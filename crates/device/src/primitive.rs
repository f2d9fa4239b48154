//! What queues and their transport wait with. A model puts what loom watches in its place.

pub(crate) use kickless_io::Waker;
pub(crate) use std::sync::Mutex;
