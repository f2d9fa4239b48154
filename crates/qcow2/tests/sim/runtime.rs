//! A program around the tables for tests.

use kickless_qcow2::Runtime;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Buffers are vectors, and wakers set a flag.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SimRuntime {}

/// A flag that says that requests of a queue are to look again. Clones are the same flag.
#[derive(Clone, Debug, Default)]
pub(crate) struct SimWaker(Arc<AtomicBool>);

impl SimWaker {
    /// Clears the flag. Returns whether it was set.
    pub(crate) fn clear(&self) -> bool {
        self.0.swap(false, Ordering::SeqCst)
    }
}

impl Runtime for SimRuntime {
    type Buffer = Vec<u8>;
    type Waker = SimWaker;

    fn allocate(len: usize, _align: usize) -> Option<Vec<u8>> {
        Some(vec![0; len])
    }

    fn wake(waker: &SimWaker) {
        waker.0.store(true, Ordering::SeqCst);
    }

    fn is_same(one: &SimWaker, other: &SimWaker) -> bool {
        Arc::ptr_eq(&one.0, &other.0)
    }
}
