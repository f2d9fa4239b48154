//! Runs submissions on a thread beside the worker: see [`mod@handover`].

pub(crate) mod handover;

use crate::Waker;
use crate::submit_thread::handover::{Submission, WorkerEnd, handover};
use std::fmt;
use std::io;
use std::ops::Deref;
use std::thread::{Builder, JoinHandle};

/// The thread's stack. It only makes system calls, and needs little.
const STACK_BYTES: usize = 128 << 10;

/// The worker's end of a handover, with the thread at the other end.
pub(crate) struct SubmitThread<S: Submission> {
    end: WorkerEnd<S>,
    thread: Option<JoinHandle<()>>,
}

impl<S: Submission> SubmitThread<S> {
    /// Starts the thread. It signals `waker` when a submission has come back.
    pub(crate) fn start(waker: Waker) -> io::Result<Self> {
        let (end, thread_end) = handover(waker);
        let thread = Builder::new().name("submit".into()).stack_size(STACK_BYTES);
        let thread = thread.spawn(move || thread_end.serve())?;
        Ok(Self { end, thread: Some(thread) })
    }

    /// Waits for the submission that was handed over, and for the end of the thread. Returns the submission
    /// and its result.
    pub(crate) fn finish(&mut self) -> Option<(S, S::Result)> {
        self.end.close();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        self.end.take()
    }
}

impl<S: Submission> Deref for SubmitThread<S> {
    type Target = WorkerEnd<S>;

    fn deref(&self) -> &WorkerEnd<S> {
        &self.end
    }
}

impl<S: Submission> Drop for SubmitThread<S> {
    fn drop(&mut self) {
        self.finish();
    }
}

impl<S: Submission> fmt::Debug for SubmitThread<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SubmitThread").field("busy", &self.end.is_busy()).finish_non_exhaustive()
    }
}
