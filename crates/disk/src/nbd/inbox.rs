//! Operations on their way from the workers to the thread that speaks to the server.

use crate::offload::OffloadOp;
use kickless_io::Waker;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// An operation, and what is known of it.
#[derive(Debug)]
pub(super) struct QueuedOp {
    /// Its number in the order of submission.
    pub(super) number: u64,
    pub(super) op: OffloadOp,
    /// Connections that were lost with it.
    pub(super) losses: u8,
}

/// What workers and the thread share. Nothing is locked inside.
#[derive(Debug)]
pub(super) struct Inbox {
    state: Mutex<InboxState>,
    /// Wakes the thread.
    waker: Waker,
}

#[derive(Debug, Default)]
pub(super) struct InboxState {
    pub(super) ops: VecDeque<QueuedOp>,
    pub(super) next: u64,
    /// The thread waits, or is about to.
    pub(super) asleep: bool,
    pub(super) hurry: bool,
    pub(super) renew: bool,
    pub(super) stop: bool,
}

impl Inbox {
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self { state: Mutex::default(), waker: Waker::new()? })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, InboxState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn waker(&self) -> &Waker {
        &self.waker
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.lock().stop
    }

    /// Hands an operation to the thread.
    pub(super) fn submit(&self, op: OffloadOp) {
        let mut state = self.lock();
        let number = state.next;
        state.next += 1;
        state.ops.push_back(QueuedOp { number, op, losses: 0 });
        if std::mem::take(&mut state.asleep) {
            drop(state);
            self.waker.wake();
        }
    }

    /// Has all operations that were submitted end within a bounded time.
    pub(super) fn hurry(&self) {
        self.lock().hurry = true;
        self.waker.wake();
    }

    /// Has the thread wait for a lost server anew, because another front-end uses the disk.
    pub(super) fn renew(&self) {
        self.lock().renew = true;
        self.waker.wake();
    }

    /// Ends the thread.
    pub(super) fn stop(&self) {
        self.lock().stop = true;
        self.waker.wake();
    }

    /// Returns whether the thread may wait. An operation that is submitted after this wakes it; the other methods always do.
    pub(super) fn sleep(&self) -> bool {
        let mut state = self.lock();
        state.asleep = state.ops.is_empty();
        state.asleep
    }
}
