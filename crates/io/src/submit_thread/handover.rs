//! Calls that submit, made by a thread beside the worker, so that submission and completion run in parallel.
//!
//! # What goes to the other thread
//! Of the time that a request takes of a processor here, nearly all goes into the system call that submits it: the kernel's way down to
//! the device, and for a device in RAM the I/O itself. While a worker is in that call for a batch, what has been done of the batch
//! is not shown to the driver, other queues are not looked at, and a device that has no tags left holds up all of them.
//!
//! Two threads can share this work along two lines. A thread that only completes would have to push used elements, release slots
//! and write the log of a queue from which the worker pops at the same time: a lock, or a split, of all that a ring is
//! made of (memory that changes, order, the state that a stop has to give back), for some tens of nanoseconds of work a request. A
//! thread that only takes completions from the kernel and hands them to the worker is simple and shows nobody anything
//! any sooner, for the worker is still in its call. So it is the other half that goes: the thread makes the calls that submit, and
//! nothing else; rings, slots and completions stay with their one owner, the worker, which reaps while the thread is in the kernel.
//! That is as parallel, and what the two share is one call and its result.
//!
//! io_uring has the same thread in the kernel (`IORING_SETUP_SQPOLL`), which looks for submissions for some time before it sleeps;
//! this one is woken for each batch. What the kernel puts off until the thread that submitted is at hand (task
//! work, by which completions of a ring come) happens on this thread too.
//!
//! # What is shared
//! A [`Desk`] has room for one call. The worker lays it there and goes on; what comes to be submitted meanwhile is the next batch.
//! The thread takes the call, makes it, lays the result there, and only then wakes the worker. The worker clears the waker before it looks
//! at the desk, so it finds the result or is woken for it; a worker that looks first and clears then ([`Desk::is_busy`] says that
//! there is a result, and the worker does not sleep) loses nothing either. `tests/submit_thread_loom.rs` has both in every order.

use crate::primitive::{Condvar, Mutex, MutexGuard, Waker};
use std::sync::{Arc, PoisonError};

/// A call that takes its time.
pub(crate) trait Call: Send + 'static {
    /// What comes of it.
    type Result: Send;

    /// Makes it. On the thread.
    fn make(&mut self) -> Self::Result;
}

/// What lies on the desk.
enum Work<C: Call> {
    Nothing,
    Asked(C),
    Underway,
    Done(C, C::Result),
}

struct State<C: Call> {
    work: Work<C>,
    /// Nothing more will be asked.
    end: bool,
}

struct Shared<C: Call> {
    state: Mutex<State<C>>,
    /// There is something for the thread.
    asked: Condvar,
    /// Wakes the worker.
    waker: Waker,
}

impl<C: Call> Shared<C> {
    fn lock(&self) -> MutexGuard<'_, State<C>> {
        // Nothing is left half done by a thread that panics: none can, under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The worker's side.
pub(crate) struct Desk<C: Call>(Arc<Shared<C>>);

/// The thread's side.
pub(crate) struct Clerk<C: Call>(Arc<Shared<C>>);

/// The two sides of a desk; `waker` is signalled when a call has come back.
pub(crate) fn desk<C: Call>(waker: Waker) -> (Desk<C>, Clerk<C>) {
    let state = Mutex::new(State { work: Work::Nothing, end: false });
    let shared = Arc::new(Shared { state, asked: Condvar::new(), waker });
    (Desk(shared.clone()), Clerk(shared))
}

impl<C: Call> Desk<C> {
    /// Asks for a call. The desk is clear.
    pub(crate) fn ask(&self, call: C) {
        let mut state = self.0.lock();
        debug_assert!(matches!(state.work, Work::Nothing), "a result would be lost");
        state.work = Work::Asked(call);
        drop(state);
        self.0.asked.notify_one();
    }

    /// Whether a call can be asked for: there is none, and no result of one. Only the worker changes that, so it stays so until it asks. A
    /// worker that has looked for a result in vain and then finds the desk not busy has missed one.
    pub(crate) fn is_clear(&self) -> bool {
        matches!(self.0.lock().work, Work::Nothing)
    }

    /// Whether a call is still to come back. The worker is woken when it has.
    pub(crate) fn is_busy(&self) -> bool {
        matches!(self.0.lock().work, Work::Asked(_) | Work::Underway)
    }

    /// Takes the call that has come back, with what came of it.
    pub(crate) fn take(&self) -> Option<(C, C::Result)> {
        let work = &mut self.0.lock().work;
        match std::mem::replace(work, Work::Nothing) {
            Work::Done(call, result) => Some((call, result)),
            other => {
                *work = other;
                None
            }
        }
    }

    /// Lets the thread end, once it has made the call that it has been asked for.
    pub(crate) fn close(&self) {
        self.0.lock().end = true;
        self.0.asked.notify_one();
    }
}

impl<C: Call> Clerk<C> {
    /// Makes the calls, one after the other, until the desk is closed.
    pub(crate) fn serve(&self) {
        while let Some(mut call) = self.next() {
            let result = call.make();
            self.0.lock().work = Work::Done(call, result);
            // After the result is there: see the module.
            self.0.waker.wake();
        }
    }

    /// Waits for a call; `None` when there will be none.
    fn next(&self) -> Option<C> {
        let mut state = self.0.lock();
        loop {
            match std::mem::replace(&mut state.work, Work::Nothing) {
                Work::Asked(call) => {
                    state.work = Work::Underway;
                    return Some(call);
                }
                other => state.work = other,
            }
            if state.end {
                return None;
            }
            state = self.0.asked.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
