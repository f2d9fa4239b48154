//! Where somebody waits for one request: a thread that blocks, or a future.

use std::sync::{Arc, PoisonError};
use std::task::Waker;
use std::time::{Duration, Instant};

use kickless_sync::{Condvar, Mutex, MutexGuard, lock};

use crate::buffer::Data;
use crate::error::Failure;
use crate::event::Event;

/// What is waited for.
pub(crate) type Outcome = (Result<(), Failure>, Data);

/// A place to wait at. It is used for one request after the other.
#[derive(Debug, Default)]
pub(crate) struct Waiter {
    state: Mutex<WaiterState>,
    woken: Condvar,
}

#[derive(Debug, Default)]
struct WaiterState {
    outcome: Option<Outcome>,
    /// Somebody said: look again.
    notified: bool,
    wake_by: WakeBy,
}

/// Who sits there, and how to wake it.
#[derive(Debug, Default)]
enum WakeBy {
    /// Nobody, or a thread that is awake or waits for the condition variable.
    #[default]
    Condvar,
    /// A thread that sleeps on the queue's events for all others.
    Event(Arc<Event>),
    /// A future.
    Waker(Waker),
}

impl Waiter {
    fn state(&self) -> MutexGuard<'_, WaiterState> {
        lock(&self.state)
    }

    /// As if it were new.
    pub(crate) fn clear(&self) {
        *self.state() = WaiterState::default();
    }

    /// The request is done.
    pub(crate) fn complete(&self, outcome: Outcome) {
        let mut state = self.state();
        state.outcome = Some(outcome);
        self.wake(state);
    }

    /// Something else has changed.
    pub(crate) fn notify(&self) {
        let mut state = self.state();
        state.notified = true;
        self.wake(state);
    }

    fn wake(&self, mut state: MutexGuard<'_, WaiterState>) {
        let wake_by = std::mem::take(&mut state.wake_by);
        // A waker may run anything, so not under the lock.
        drop(state);
        match wake_by {
            WakeBy::Condvar => self.woken.notify_one(),
            WakeBy::Event(event) => event.signal(),
            WakeBy::Waker(waker) => waker.wake(),
        }
    }

    /// Takes what came of the request, if it is done.
    pub(crate) fn take(&self) -> Option<Outcome> {
        self.state().outcome.take()
    }

    /// Whether there is something to look at. A nudge is forgotten.
    pub(crate) fn take_notified(&self) -> bool {
        let mut state = self.state();
        std::mem::take(&mut state.notified) || state.outcome.is_some()
    }

    /// Whether there is, without forgetting anything.
    pub(crate) fn is_notified(&self) -> bool {
        let state = self.state();
        state.notified || state.outcome.is_some()
    }

    /// Sleeps until there is, or until the deadline.
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

    /// From now on `event` wakes; `false` if there is something to look at already.
    pub(crate) fn wake_by_event(&self, event: &Arc<Event>) -> bool {
        let mut state = self.state();
        if state.notified || state.outcome.is_some() {
            return false;
        }
        state.wake_by = WakeBy::Event(event.clone());
        true
    }

    /// It is awake again.
    pub(crate) fn wake_by_condvar(&self) {
        self.state().wake_by = WakeBy::Condvar;
    }

    /// Takes the outcome, or leaves a waker for it.
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

/// Seats that nobody sits in.
#[derive(Debug, Default)]
pub(crate) struct FreeWaiters(Mutex<Vec<Arc<Waiter>>>);

/// How many are kept.
const KEPT_MAX: usize = 1024;

impl FreeWaiters {
    fn free(&self) -> MutexGuard<'_, Vec<Arc<Waiter>>> {
        lock(&self.0)
    }

    /// A seat for one request.
    pub(crate) fn take(&self) -> Arc<Waiter> {
        let waiter = self.free().pop();
        waiter.unwrap_or_default()
    }

    /// A seat whose request is done: whoever completed it does not touch it any more.
    pub(crate) fn give_back(&self, waiter: Arc<Waiter>) {
        waiter.clear();
        let mut free = self.free();
        if free.len() < KEPT_MAX {
            free.push(waiter);
        }
    }
}
