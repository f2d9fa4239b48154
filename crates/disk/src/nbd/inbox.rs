//! Passes operations from the workers to the thread of the connection.

use super::job::{Answer, Caller, Counts, Job};
use crate::offload::OffloadOp;
use kickless_io::Waker;
use kickless_sync::lock;
use std::collections::VecDeque;
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::Duration;

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
    pub(super) state: Mutex<InboxState>,
    /// Wakes the thread.
    waker: Waker,
    /// The size of the export when the disk was last opened or taken over.
    export_size: AtomicU64,
    /// The number of connections that were made or lost.
    changes: AtomicU64,
}

/// The way to go on after [`Job::Suspend`], or in a new process.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Resume {
    /// The counts of the process that was suspended. `None`: it is this one.
    pub(super) counts: Option<Counts>,
    /// A guest uses the disk.
    pub(super) is_taken: bool,
}

#[derive(Debug, Default)]
pub(super) struct InboxState {
    pub(super) ops: VecDeque<QueuedOp>,
    pub(super) next: u64,
    /// The thread waits, or is about to.
    pub(super) asleep: bool,
    pub(super) limit_waits: bool,
    pub(super) restart_wait: bool,
    /// The job to begin, and its caller.
    pub(super) job: Option<(Job, Caller)>,
    pub(super) resume: Option<Resume>,
    pub(super) stop: bool,
}

impl Inbox {
    pub(super) fn new() -> std::io::Result<Self> {
        let (export_size, changes) = Default::default();
        Ok(Self { state: Mutex::default(), waker: Waker::new()?, export_size, changes })
    }

    pub(super) fn waker(&self) -> &Waker {
        &self.waker
    }

    /// Returns whether the thread must not wait for a server that it connects to.
    pub(super) fn is_urgent(&self) -> bool {
        let state = lock(&self.state);
        state.stop || state.job.is_some()
    }

    pub(super) fn export_size(&self) -> u64 {
        self.export_size.load(Ordering::Relaxed)
    }

    pub(super) fn set_export_size(&self, size: u64) {
        self.export_size.store(size, Ordering::Relaxed);
    }

    pub(super) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Relaxed)
    }

    /// Counts a connection that was made or lost.
    pub(super) fn count_change(&self) {
        self.changes.fetch_add(1, Ordering::Relaxed);
    }

    /// Passes an operation to the thread.
    pub(super) fn submit(&self, op: OffloadOp) {
        let mut state = lock(&self.state);
        let queued = state.number(op);
        state.ops.push_back(queued);
        if std::mem::take(&mut state.asleep) {
            drop(state);
            self.waker.wake();
        }
    }

    /// Numbers an operation of the thread itself.
    pub(super) fn number(&self, op: OffloadOp) -> QueuedOp {
        lock(&self.state).number(op)
    }

    /// Has the thread do a job, and waits for it. One thread at a time calls this.
    ///
    /// # Errors
    /// The job fails, or the thread does not answer in time.
    pub(super) fn request(&self, job: Job, within: Duration) -> io::Result<Answer> {
        let (caller, answers) = sync_channel(0);
        lock(&self.state).job = Some((job, caller));
        self.waker.wake();
        let answer = match answers.recv_timeout(within) {
            // The result comes at once.
            Ok(None) => answers.recv().ok().flatten(),
            Ok(result) => result,
            Err(_) => None,
        };
        answer.unwrap_or_else(|| Err(io::ErrorKind::TimedOut.into()))
    }

    /// Ends all submitted operations within a limited time.
    pub(super) fn limit_remote_waits(&self) {
        lock(&self.state).limit_waits = true;
        self.waker.wake();
    }

    /// Restarts the time to wait for a lost server, because another front-end uses the disk.
    pub(super) fn restart_wait(&self) {
        lock(&self.state).restart_wait = true;
        self.waker.wake();
    }

    /// Lets the thread go on after [`Job::Suspend`], or begin in a new process.
    pub(super) fn resume(&self, resume: Resume) {
        lock(&self.state).resume = Some(resume);
        self.waker.wake();
    }

    /// Stops the thread.
    pub(super) fn stop(&self) {
        lock(&self.state).stop = true;
        self.waker.wake();
    }

    /// Returns whether the thread may wait. A later `submit` wakes it then. The other methods always wake it.
    pub(super) fn sleep(&self) -> bool {
        let mut state = lock(&self.state);
        state.asleep = state.ops.is_empty();
        state.asleep
    }
}

impl InboxState {
    fn number(&mut self, op: OffloadOp) -> QueuedOp {
        let number = self.next;
        self.next += 1;
        QueuedOp { number, op, losses: 0 }
    }
}
