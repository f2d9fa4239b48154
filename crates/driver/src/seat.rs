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
pub(crate) struct Seat {
    state: Mutex<State>,
    woken: Condvar,
}

#[derive(Debug, Default)]
struct State {
    outcome: Option<Outcome>,
    /// Somebody said: look again.
    nudged: bool,
    sitter: Sitter,
}

/// Who sits there, and how to wake it.
#[derive(Debug, Default)]
enum Sitter {
    /// Nobody, or a thread that is awake or waits for the condition variable.
    #[default]
    Thread,
    /// A thread that sleeps on the queue's events for all others.
    Leader(Arc<Event>),
    /// A future.
    Future(Waker),
}

impl Seat {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// As if it were new.
    pub(crate) fn clear(&self) {
        *self.state() = State::default();
    }

    /// The request is done.
    pub(crate) fn complete(&self, outcome: Outcome) {
        let mut state = self.state();
        state.outcome = Some(outcome);
        self.wake(state);
    }

    /// Something else has changed.
    pub(crate) fn nudge(&self) {
        let mut state = self.state();
        state.nudged = true;
        self.wake(state);
    }

    fn wake(&self, mut state: MutexGuard<'_, State>) {
        let sitter = std::mem::take(&mut state.sitter);
        // A waker may run anything, so not under the lock.
        drop(state);
        match sitter {
            Sitter::Thread => self.woken.notify_one(),
            Sitter::Leader(event) => event.signal(),
            Sitter::Future(waker) => waker.wake(),
        }
    }

    /// Takes what came of the request, if it is done.
    pub(crate) fn take(&self) -> Option<Outcome> {
        self.state().outcome.take()
    }

    /// Whether there is something to look at. A nudge is forgotten.
    pub(crate) fn is_called(&self) -> bool {
        let mut state = self.state();
        std::mem::take(&mut state.nudged) || state.outcome.is_some()
    }

    /// Whether there is, without forgetting anything.
    pub(crate) fn is_wanted(&self) -> bool {
        let state = self.state();
        state.nudged || state.outcome.is_some()
    }

    /// Sleeps until there is, or until the deadline.
    pub(crate) fn wait(&self, deadline: Option<Instant>) {
        let mut state = self.state();
        while !std::mem::take(&mut state.nudged) && state.outcome.is_none() {
            state = match deadline.map(|deadline| deadline.saturating_duration_since(Instant::now())) {
                None => self.woken.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => return,
                Some(left) => self.woken.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
    }

    /// From now on `event` wakes; `false` if there is something to look at already.
    pub(crate) fn lie_down(&self, event: &Arc<Event>) -> bool {
        let mut state = self.state();
        if state.nudged || state.outcome.is_some() {
            return false;
        }
        state.sitter = Sitter::Leader(event.clone());
        true
    }

    /// It is awake again.
    pub(crate) fn get_up(&self) {
        self.state().sitter = Sitter::Thread;
    }

    /// Takes the outcome, or leaves a waker for it.
    pub(crate) fn poll(&self, waker: &Waker) -> Option<Outcome> {
        let mut state = self.state();
        let outcome = state.outcome.take();
        if outcome.is_none() {
            match &mut state.sitter {
                Sitter::Future(known) => known.clone_from(waker),
                sitter => *sitter = Sitter::Future(waker.clone()),
            }
        }
        outcome
    }
}

/// Seats that nobody sits in.
#[derive(Debug, Default)]
pub(crate) struct Seats(Mutex<Vec<Arc<Seat>>>);

/// How many are kept.
const KEPT_MAX: usize = 1024;

impl Seats {
    fn free(&self) -> MutexGuard<'_, Vec<Arc<Seat>>> {
        lock(&self.0)
    }

    /// A seat for one request.
    pub(crate) fn take(&self) -> Arc<Seat> {
        let seat = self.free().pop();
        seat.unwrap_or_default()
    }

    /// A seat whose request is done: whoever completed it does not touch it any more.
    pub(crate) fn give_back(&self, seat: Arc<Seat>) {
        seat.clear();
        let mut free = self.free();
        if free.len() < KEPT_MAX {
            free.push(seat);
        }
    }
}
