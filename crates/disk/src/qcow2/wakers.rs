//! The wakers of requests that wait.

use kickless_io::Waker;
use std::sync::{Arc, Mutex, PoisonError};

/// One waker for each task. All are signalled at each progress. Clones are the same list.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wakers(Arc<Mutex<Vec<Waker>>>);

impl Wakers {
    pub(crate) fn add(&self, waker: &Waker) {
        let mut list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !list.iter().any(|known| known.is_same(waker)) {
            list.push(waker.clone());
        }
    }

    pub(crate) fn wake(&self) {
        for waker in self.0.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            waker.wake();
        }
    }
}
