//! Hands submissions to a thread beside the worker, so that submission and completion run in parallel.
//!
//! # What goes to the other thread
//! Of the time that a request takes of a processor here, nearly all goes into the system call that submits
//! it: the kernel's way down to the device, and for a device in RAM the I/O itself. While a worker is in that
//! call for a batch, what has been done of the batch is not shown to the driver, other queues are not looked
//! at, and a device that has no tags left holds up all of them.
//!
//! Two threads can share this work along two lines. A thread that only completes would have to push used
//! elements, release slots and write the log of a queue from which the worker pops at the same time: a lock,
//! or a split, of all that a ring is made of (memory that changes, order, the state that a stop has to give
//! back), for some tens of nanoseconds of work a request. A thread that only takes completions from the
//! kernel and hands them to the worker is simple and shows nobody anything any sooner, for the worker is
//! still in its call. So it is the other half that goes: the thread makes the calls that submit, and nothing
//! else; rings, slots and completions stay with their one owner, the worker, which reaps while the thread is
//! in the kernel. That is as parallel, and what the two share is one call and its result.
//!
//! io_uring has the same thread in the kernel (`IORING_SETUP_SQPOLL`), which looks for submissions for some
//! time before it sleeps; this one is woken for each batch. What the kernel puts off until the thread that
//! submitted is at hand (task work, by which completions of a ring come) happens on this thread too.
//!
//! # What is shared
//! The two ends share room for one submission. The worker puts it there and goes on; operations that it
//! stages meanwhile are the next batch. The thread takes the submission, runs it, puts the result there, and
//! only then wakes the worker. The worker clears the waker before it looks for the result, so it finds the
//! result or is woken for it. A worker that looks first and clears then loses nothing either:
//! [`WorkerEnd::is_busy`] says that there is a result, and the worker does not sleep. `handover/model.rs` has
//! both in every order.

#[cfg(all(test, loom))]
mod model;

use crate::waker::Waker;
use kickless_sync::{Condvar, Mutex, MutexGuard};
use std::sync::{Arc, PoisonError};

/// A system call that submits operations and takes its time.
pub(crate) trait Submission: Send + 'static {
    /// The result of the system call.
    type Result: Send;

    /// Makes the system call. Runs on the thread.
    fn run(&mut self) -> Self::Result;
}

/// The submission that the two ends share.
enum Work<S: Submission> {
    Nothing,
    Handed(S),
    Underway,
    Done(S, S::Result),
}

struct State<S: Submission> {
    work: Work<S>,
    /// Nothing more will be handed over.
    end: bool,
}

struct Shared<S: Submission> {
    state: Mutex<State<S>>,
    /// There is something for the thread.
    handed: Condvar,
    /// Wakes the worker.
    waker: Waker,
}

impl<S: Submission> Shared<S> {
    fn lock(&self) -> MutexGuard<'_, State<S>> {
        // Nothing is left half done by a thread that panics: none can, under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The worker's end.
pub(crate) struct WorkerEnd<S: Submission>(Arc<Shared<S>>);

/// The thread's end.
pub(crate) struct ThreadEnd<S: Submission>(Arc<Shared<S>>);

/// Makes the two ends. The thread's end signals `waker` when a submission has come back.
pub(crate) fn handover<S: Submission>(waker: Waker) -> (WorkerEnd<S>, ThreadEnd<S>) {
    let state = Mutex::new(State { work: Work::Nothing, end: false });
    let shared = Arc::new(Shared { state, handed: Condvar::new(), waker });
    (WorkerEnd(shared.clone()), ThreadEnd(shared))
}

impl<S: Submission> WorkerEnd<S> {
    /// Hands a submission to the thread. The caller has looked whether this end is clear.
    pub(crate) fn hand_over(&self, submission: S) {
        let mut state = self.0.lock();
        debug_assert!(matches!(state.work, Work::Nothing), "a result would be lost");
        state.work = Work::Handed(submission);
        drop(state);
        self.0.handed.notify_one();
    }

    /// Returns whether a submission can be handed over: there is none, and no result of one. Only the worker
    /// changes that, so it stays so until the worker hands one over. A worker that has looked for a result in
    /// vain and then finds this end not busy has missed one.
    pub(crate) fn is_clear(&self) -> bool {
        matches!(self.0.lock().work, Work::Nothing)
    }

    /// Returns whether a submission is still to come back. The worker is woken when it has.
    pub(crate) fn is_busy(&self) -> bool {
        matches!(self.0.lock().work, Work::Handed(_) | Work::Underway)
    }

    /// Takes the submission that has come back, with its result.
    pub(crate) fn take(&self) -> Option<(S, S::Result)> {
        let work = &mut self.0.lock().work;
        match std::mem::replace(work, Work::Nothing) {
            Work::Done(submission, result) => Some((submission, result)),
            other => {
                *work = other;
                None
            }
        }
    }

    /// Lets the thread end, once it has run the submission that was handed over.
    pub(crate) fn close(&self) {
        self.0.lock().end = true;
        self.0.handed.notify_one();
    }
}

impl<S: Submission> ThreadEnd<S> {
    /// Runs the submissions, one after the other, until the worker closes its end.
    pub(crate) fn serve(&self) {
        while let Some(mut submission) = self.next() {
            let result = submission.run();
            self.0.lock().work = Work::Done(submission, result);
            // After the result is there: see the module.
            self.0.waker.wake();
        }
    }

    /// Waits for a submission; `None` when there will be none.
    fn next(&self) -> Option<S> {
        let mut state = self.0.lock();
        loop {
            match std::mem::replace(&mut state.work, Work::Nothing) {
                Work::Handed(submission) => {
                    state.work = Work::Underway;
                    return Some(submission);
                }
                other => state.work = other,
            }
            if state.end {
                return None;
            }
            state = self.0.handed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
