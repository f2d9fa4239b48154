//! The wakers of requests that wait.

use super::runtime::Runtime;
use kickless_sync::lock;
use std::sync::{Arc, Mutex};

/// One waker for each queue. All are signalled at each progress. Clones are the same list.
#[derive(Debug)]
pub(crate) struct Wakers<R: Runtime>(Arc<Mutex<Vec<R::Waker>>>);

impl<R: Runtime> Wakers<R> {
    pub(crate) fn new() -> Self {
        Self(Arc::default())
    }

    pub(crate) fn add(&self, waker: &R::Waker) {
        let mut list = lock(&self.0);
        if !list.iter().any(|known| R::is_same(known, waker)) {
            list.push(waker.clone());
        }
    }

    pub(crate) fn wake(&self) {
        for waker in lock(&self.0).drain(..) {
            R::wake(&waker);
        }
    }
}

impl<R: Runtime> Clone for Wakers<R> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}
