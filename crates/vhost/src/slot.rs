//! The place where the thread of a server leaves its session while it is parked.
//!
//! The thread of a server owns the session. A coordinator asks for it ([`Slot::ask`]). The thread leaves the
//! session here between two messages and waits, until the coordinator gives it back. A thread that waits for
//! a connection does the same without a session. All steps are under one lock, so a request that is withdrawn
//! and a thread that follows it agree: the thread parks only if the request still stands.
//!
//! In a process that takes over, the coordinator holds the slot before there is a thread. The thread waits
//! until it gets the session.

use kickless_device::Waker;
use kickless_sync::lock;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// The session `S` of a server, while its thread does not have it.
pub(crate) struct Slot<S> {
    state: Mutex<SlotState<S>>,
    changed: Condvar,
    /// Readable while the thread is asked to park. `None` if the process had no descriptor left.
    asked: Option<Waker>,
}

struct SlotState<S> {
    phase: Phase,
    thread: Thread,
    session: Option<S>,
    /// The number of changes of what is given, of all sessions that have ended.
    changes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The thread has the session.
    Serving,
    /// As `Serving`, and the thread is asked to park.
    Asked,
    /// The coordinator has the session, or it is here.
    Parked,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Thread {
    NotBegun,
    Here,
    Ended,
}

/// The reason for which a server is not parked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotParked {
    TimedOut,
    Ended,
}

impl<S> Slot<S> {
    pub(crate) fn new() -> Self {
        let (phase, thread) = (Phase::Serving, Thread::NotBegun);
        let state = SlotState { phase, thread, session: None, changes: 0 };
        Self { state: Mutex::new(state), changed: Condvar::new(), asked: Waker::new().ok() }
    }

    /// Returns a descriptor that is readable while the thread is asked to park.
    pub(crate) fn asked(&self) -> Option<BorrowedFd<'_>> {
        self.asked.as_ref().map(AsFd::as_fd)
    }

    /// Called when the thread begins. Waits while the slot is held. Returns the session to serve first, if
    /// there is one.
    pub(crate) fn enter(&self) -> Option<S> {
        let mut state = lock(&self.state);
        state.thread = Thread::Here;
        self.wait_while_parked(state)
    }

    /// Called when the thread ends.
    pub(crate) fn leave(&self) {
        lock(&self.state).thread = Thread::Ended;
        self.changed.notify_all();
    }

    /// Parks the thread with its session, if it is asked to. Returns the session when the thread goes on.
    pub(crate) fn park(&self, session: Option<S>) -> Option<S> {
        let mut state = lock(&self.state);
        if state.phase != Phase::Asked {
            return session;
        }
        state.phase = Phase::Parked;
        state.session = session;
        self.clear();
        self.changed.notify_all();
        self.wait_while_parked(state)
    }

    fn wait_while_parked(&self, state: MutexGuard<'_, SlotState<S>>) -> Option<S> {
        let waited = self.changed.wait_while(state, |state| state.phase == Phase::Parked);
        waited.unwrap_or_else(PoisonError::into_inner).session.take()
    }

    /// Adds changes of a session that has begun or ended.
    pub(crate) fn add_changes(&self, changes: u64) {
        lock(&self.state).changes += changes;
    }

    /// Returns the changes of sessions that have ended.
    pub(crate) fn changes(&self) -> u64 {
        lock(&self.state).changes
    }

    /// Asks the thread to park. Without a thread, the slot is held at once.
    pub(crate) fn ask(&self) {
        let mut state = lock(&self.state);
        match (state.phase, state.thread) {
            (Phase::Serving, Thread::NotBegun) => state.phase = Phase::Parked,
            (Phase::Serving, _) => {
                state.phase = Phase::Asked;
                if let Some(asked) = &self.asked {
                    asked.wake();
                }
            }
            (Phase::Asked | Phase::Parked, _) => {}
        }
    }

    /// Waits until the thread is parked, and takes its session. Withdraws the request otherwise.
    pub(crate) fn take(&self, deadline: Instant) -> Result<Option<S>, NotParked> {
        let patience = deadline.saturating_duration_since(Instant::now());
        let is_undecided =
            |state: &mut SlotState<S>| state.phase == Phase::Asked && state.thread != Thread::Ended;
        let waited = self.changed.wait_timeout_while(lock(&self.state), patience, is_undecided);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match (state.phase, state.thread) {
            (Phase::Parked, _) => Ok(state.session.take()),
            (_, thread) => {
                self.withdraw_from(&mut state);
                Err(if thread == Thread::Ended { NotParked::Ended } else { NotParked::TimedOut })
            }
        }
    }

    /// Withdraws the request. If the thread is parked, it goes on.
    pub(crate) fn withdraw(&self) {
        self.withdraw_from(&mut lock(&self.state));
    }

    fn withdraw_from(&self, state: &mut SlotState<S>) {
        state.phase = Phase::Serving;
        self.clear();
        self.changed.notify_all();
    }

    /// Holds the slot of a server whose thread has not begun, or waits.
    pub(crate) fn hold(&self) {
        lock(&self.state).phase = Phase::Parked;
    }

    /// Lets the thread go on with this session.
    pub(crate) fn give_back(&self, session: Option<S>) {
        let mut state = lock(&self.state);
        state.session = session;
        self.withdraw_from(&mut state);
    }

    fn clear(&self) {
        if let Some(asked) = &self.asked {
            asked.clear();
        }
    }
}
