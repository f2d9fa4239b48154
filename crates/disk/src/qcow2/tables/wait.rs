//! The wakers of requests that wait.

use kickless_io::Waker;
use std::os::fd::{AsFd, AsRawFd};

/// One waker for each worker. All are signalled at each progress.
#[derive(Debug, Default)]
pub(super) struct Wakers(Vec<Waker>);

impl Wakers {
    pub(super) fn add(&mut self, waker: &Waker) {
        let fd = |waker: &Waker| waker.as_fd().as_raw_fd();
        if !self.0.iter().any(|known| fd(known) == fd(waker)) {
            self.0.push(waker.clone());
        }
    }

    pub(super) fn wake(&mut self) {
        for waker in self.0.drain(..) {
            waker.wake();
        }
    }
}
