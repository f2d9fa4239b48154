//! Passes operations from the workers to the thread of the connection.

use crate::offload::OffloadOp;
use kickless_io::Waker;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// An operation in the queue.
#[derive(Debug)]
pub(super) struct QueuedOp {
    /// The number in the order of submission.
    pub(super) number: u64,
    pub(super) op: OffloadOp,
    /// The number of connections that were lost with it.
    pub(super) losses: u8,
}

/// The state that workers and the thread share. No other lock is taken under its lock.
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
    pub(super) limit_waits: bool,
    pub(super) restart_wait: bool,
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

    /// Passes an operation to the thread.
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

    /// Ends all submitted operations within a limited time.
    pub(super) fn limit_remote_waits(&self) {
        self.lock().limit_waits = true;
        self.waker.wake();
    }

    /// Restarts the time to wait for a lost server, because another front-end uses the disk.
    pub(super) fn restart_wait(&self) {
        self.lock().restart_wait = true;
        self.waker.wake();
    }

    /// Stops the thread.
    pub(super) fn stop(&self) {
        self.lock().stop = true;
        self.waker.wake();
    }

    /// Returns whether the thread may wait. A later `submit` wakes it then. The other methods always wake it.
    pub(super) fn sleep(&self) -> bool {
        let mut state = self.lock();
        state.asleep = state.ops.is_empty();
        state.asleep
    }
}
