//! A thread or a future that waits for one request.

use std::sync::{Arc, PoisonError};
use std::task::Waker;
use std::time::{Duration, Instant};

use kickless_sync::{Condvar, Mutex, MutexGuard, lock};

use crate::buffer::Data;
use crate::error::Failure;
use crate::event::Event;

/// The result of a request, and its memory.
pub(crate) type Outcome = (Result<(), Failure>, Data);

/// The state of one wait. It is reused for one request after another.
#[derive(Debug, Default)]
pub(crate) struct Waiter {
    state: Mutex<WaiterState>,
    woken: Condvar,
}

#[derive(Debug, Default)]
struct WaiterState {
    outcome: Option<Outcome>,
    /// The waiter must check its state again.
    notified: bool,
    wake_by: WakeBy,
}

/// The way to wake the thread or the future.
#[derive(Debug, Default)]
enum WakeBy {
    /// A thread that is awake, or waits for the condition variable.
    #[default]
    Condvar,
    /// A leader, which sleeps on the queue's events.
    Event(Arc<Event>),
    /// A future.
    Waker(Waker),
}

impl Waiter {
    fn state(&self) -> MutexGuard<'_, WaiterState> {
        lock(&self.state)
    }

    /// Resets the waiter for the next request.
    pub(crate) fn clear(&self) {
        *self.state() = WaiterState::default();
    }

    /// Stores the result of the request and wakes the owner.
    pub(crate) fn complete(&self, outcome: Outcome) {
        let mut state = self.state();
        state.outcome = Some(outcome);
        self.wake(state);
    }

    /// Wakes the owner, because something else has changed.
    pub(crate) fn notify(&self) {
        let mut state = self.state();
        state.notified = true;
        self.wake(state);
    }

    fn wake(&self, mut state: MutexGuard<'_, WaiterState>) {
        let wake_by = std::mem::take(&mut state.wake_by);
        // A waker may run any code, so the lock is dropped first.
        drop(state);
        match wake_by {
            WakeBy::Condvar => self.woken.notify_one(),
            WakeBy::Event(event) => event.signal(),
            WakeBy::Waker(waker) => waker.wake(),
        }
    }

    /// Takes the result of the request, if it is done.
    pub(crate) fn take(&self) -> Option<Outcome> {
        self.state().outcome.take()
    }

    /// Returns whether the request is done or the waiter was notified. Clears the notification.
    pub(crate) fn take_notified(&self) -> bool {
        let mut state = self.state();
        std::mem::take(&mut state.notified) || state.outcome.is_some()
    }

    /// Returns whether the request is done or the waiter was notified. Clears nothing.
    pub(crate) fn is_notified(&self) -> bool {
        let state = self.state();
        state.notified || state.outcome.is_some()
    }

    /// Sleeps until the request is done, the waiter is notified, or the deadline has passed.
    pub(crate) fn wait(&self, deadline: Option<Instant>) {
        let mut state = self.state();
        while !std::mem::take(&mut state.notified) && state.outcome.is_none() {
            state = match deadline.map(|deadline| deadline.saturating_duration_since(Instant::now())) {
                None => self.woken.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => return,
                Some(left) => self.woken.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
    }

    /// Lets `event` wake the owner. Returns `false` if the request is done or the waiter was notified
    /// already.
    pub(crate) fn wake_by_event(&self, event: &Arc<Event>) -> bool {
        let mut state = self.state();
        if state.notified || state.outcome.is_some() {
            return false;
        }
        state.wake_by = WakeBy::Event(event.clone());
        true
    }

    /// Lets the condition variable wake the owner again.
    pub(crate) fn wake_by_condvar(&self) {
        self.state().wake_by = WakeBy::Condvar;
    }

    /// Takes the result, or stores a waker for it.
    pub(crate) fn poll(&self, waker: &Waker) -> Option<Outcome> {
        let mut state = self.state();
        let outcome = state.outcome.take();
        if outcome.is_none() {
            match &mut state.wake_by {
                WakeBy::Waker(known) => known.clone_from(waker),
                wake_by => *wake_by = WakeBy::Waker(waker.clone()),
            }
        }
        outcome
    }
}

/// Waiters for reuse.
#[derive(Debug, Default)]
pub(crate) struct FreeWaiters(Mutex<Vec<Arc<Waiter>>>);

/// The largest number of waiters that are kept.
const KEPT_MAX: usize = 1024;

impl FreeWaiters {
    fn free(&self) -> MutexGuard<'_, Vec<Arc<Waiter>>> {
        lock(&self.0)
    }

    /// Returns a waiter for one request.
    pub(crate) fn take(&self) -> Arc<Waiter> {
        let waiter = self.free().pop();
        waiter.unwrap_or_default()
    }

    /// Returns a waiter for reuse. Its request is done, so the completing thread does not use it any more.
    pub(crate) fn give_back(&self, waiter: Arc<Waiter>) {
        waiter.clear();
        let mut free = self.free();
        if free.len() < KEPT_MAX {
            free.push(waiter);
        }
    }
}
