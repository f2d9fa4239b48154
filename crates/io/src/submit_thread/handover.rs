//! The handover of submissions to a thread beside the worker, so that submission and completion run in
//! parallel.
//!
//! # Why submission moves to the other thread
//! Nearly all processor time of a request here goes into the system call that submits it: the kernel's path
//! to the device and, for a device in RAM, the I/O itself. During that call for a batch, the worker shows no
//! completions of the batch to the driver, and polls no other queues. A device without free tags delays all
//! queues.
//!
//! The work could be divided in two ways.
//! - A thread that only completes would push used elements, release slots and write the log of a queue while
//!   the worker pops from it. This needs a lock on a whole ring, or a split of it: changing memory, order,
//!   the state that a stop returns. The gain is some tens of nanoseconds of work per request. A thread that
//!   only takes completions from the kernel for the worker is simple. But the driver sees them no sooner,
//!   because the worker is still in its call.
//! - A thread that only makes the submitting calls leaves rings, slots and completions to the worker. The
//!   worker reaps while the thread is in the kernel. This is equally parallel, and the two share only one
//!   call and its result. So this is done.
//!
//! io_uring has the same thread in the kernel (`IORING_SETUP_SQPOLL`). It polls for submissions for some time
//! before it sleeps. This one is woken for each batch. The kernel defers some work until the submitting
//! thread can run it (task work, by which completions of a ring come). This also happens on this thread.
//!
//! # What is shared
//! The two ends share room for one submission. The worker puts it there and goes on. Operations that it
//! stages meanwhile form the next batch. The thread takes the submission, runs it, puts the result there, and
//! only then wakes the worker. The worker clears the waker before it checks for the result, so it finds the
//! result or is woken for it. A worker that checks first and clears then loses nothing either:
//! [`WorkerEnd::is_busy`] says that there is a result, and the worker does not sleep. `handover/model.rs`
//! checks both in every order.

#[cfg(all(test, loom))]
mod model;

use crate::waker::Waker;
use kickless_sync::{Condvar, Mutex, MutexGuard};
use std::sync::{Arc, PoisonError};

/// A system call that submits operations and may take long.
pub(crate) trait Submission: Send + 'static {
    /// The result of the system call.
    type Result: Send;

    /// Makes the system call. Runs on the thread.
    fn run(&mut self) -> Self::Result;
}

/// The stages of the submission that the two ends share.
enum HandoverState<S: Submission> {
    Nothing,
    Handed(S),
    Underway,
    Done(S, S::Result),
}

struct Handover<S: Submission> {
    state: HandoverState<S>,
    /// The worker hands over nothing more.
    end: bool,
}

struct SharedHandover<S: Submission> {
    state: Mutex<Handover<S>>,
    /// Signalled when there is something for the thread.
    submission_ready: Condvar,
    /// Wakes the worker.
    waker: Waker,
}

impl<S: Submission> SharedHandover<S> {
    fn lock(&self) -> MutexGuard<'_, Handover<S>> {
        // A panic cannot leave a partial change: no thread panics under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The worker's end.
pub(crate) struct WorkerEnd<S: Submission>(Arc<SharedHandover<S>>);

/// The thread's end.
pub(crate) struct ThreadEnd<S: Submission>(Arc<SharedHandover<S>>);

/// Makes the two ends. The thread's end signals `waker` when a submission has come back.
pub(crate) fn handover<S: Submission>(waker: Waker) -> (WorkerEnd<S>, ThreadEnd<S>) {
    let state = Mutex::new(Handover { state: HandoverState::Nothing, end: false });
    let shared = Arc::new(SharedHandover { state, submission_ready: Condvar::new(), waker });
    (WorkerEnd(shared.clone()), ThreadEnd(shared))
}

impl<S: Submission> WorkerEnd<S> {
    /// Hands a submission to the thread. The caller has checked that this end is clear.
    pub(crate) fn hand_over(&self, submission: S) {
        let mut state = self.0.lock();
        debug_assert!(matches!(state.state, HandoverState::Nothing), "a result would be lost");
        state.state = HandoverState::Handed(submission);
        drop(state);
        self.0.submission_ready.notify_one();
    }

    /// Returns whether a submission can be handed over: there is none, and no result of one. Only the worker
    /// changes that, so it holds until the worker hands one over. If a worker finds no result and then finds
    /// this end not busy, it has missed a result.
    pub(crate) fn is_clear(&self) -> bool {
        matches!(self.0.lock().state, HandoverState::Nothing)
    }

    /// Returns whether the thread still has a submission. The worker is woken when it has returned.
    pub(crate) fn is_busy(&self) -> bool {
        matches!(self.0.lock().state, HandoverState::Handed(_) | HandoverState::Underway)
    }

    /// Takes the returned submission, with its result.
    pub(crate) fn take(&self) -> Option<(S, S::Result)> {
        let state = &mut self.0.lock().state;
        match std::mem::replace(state, HandoverState::Nothing) {
            HandoverState::Done(submission, result) => Some((submission, result)),
            other => {
                *state = other;
                None
            }
        }
    }

    /// Ends the thread, once it has run the submission that was handed over.
    pub(crate) fn close(&self) {
        self.0.lock().end = true;
        self.0.submission_ready.notify_one();
    }
}

impl<S: Submission> ThreadEnd<S> {
    /// Runs the submissions, one after the other, until the worker closes its end.
    pub(crate) fn serve(&self) {
        while let Some(mut submission) = self.next() {
            let result = submission.run();
            self.0.lock().state = HandoverState::Done(submission, result);
            // After the result is in place: see the module.
            self.0.waker.wake();
        }
    }

    /// Waits for a submission. Returns `None` when there will be none.
    fn next(&self) -> Option<S> {
        let mut state = self.0.lock();
        loop {
            match std::mem::replace(&mut state.state, HandoverState::Nothing) {
                HandoverState::Handed(submission) => {
                    state.state = HandoverState::Underway;
                    return Some(submission);
                }
                other => state.state = other,
            }
            if state.end {
                return None;
            }
            state = self.0.submission_ready.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
