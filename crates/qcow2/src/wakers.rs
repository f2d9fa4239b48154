//! The wakers of requests that wait.

use super::runtime::Runtime;
use std::sync::{Arc, Mutex, PoisonError};

/// One waker for each queue. All are signalled at each progress. Clones are the same list.
#[derive(Debug)]
pub(crate) struct Wakers<R: Runtime>(Arc<Mutex<Vec<R::Waker>>>);

impl<R: Runtime> Wakers<R> {
    pub(crate) fn new() -> Self {
        Self(Arc::default())
    }

    pub(crate) fn add(&self, waker: &R::Waker) {
        let mut list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !list.iter().any(|known| R::is_same(known, waker)) {
            list.push(waker.clone());
        }
    }

    pub(crate) fn wake(&self) {
        for waker in self.0.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            R::wake(&waker);
        }
    }
}

impl<R: Runtime> Clone for Wakers<R> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}
