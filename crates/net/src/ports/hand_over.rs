//! The part of a port in the hand-over of its card to another process.

use kickless_device::{GiveError, StartError};
use kickless_handover::{Given, Giving, Part};
use kickless_sync::lock;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Returns the error of a port that cannot be given now.
pub(crate) fn cannot_give(error: impl std::error::Error + Send + Sync + 'static) -> GiveError {
    GiveError(Box::new(error))
}

/// Returns the error of a state that contradicts what this process knows.
pub(crate) fn contradicts(error: impl std::error::Error + Send + Sync + 'static) -> StartError {
    StartError(Box::new(error))
}

/// The way in which a port passes to the next process of its host.
pub(crate) enum Passing<'p> {
    /// The next process opens the port by its name. Frames that wait in this one are lost.
    Anew,
    /// It does not: one sentence.
    Refused(&'static str),
    /// It gives what it has.
    Given(&'p dyn GivePort),
}

/// A port that passes to the next process of its host. Its name takes it over, as in
/// [`Name::open`](super::port::Name::open).
///
/// The calls are those of [`HandOver`](kickless_device::HandOver), in its order.
pub(crate) trait GivePort {
    /// Returns the number of changes of the things that [`GivePort::give`] gives.
    fn changes(&self) -> u64;

    /// Adds what the new process opens the port with, with duplicates of the descriptors. Rings run.
    ///
    /// # Errors
    /// The process has no free descriptor.
    fn give(&self, to: &mut Giving) -> Result<Part, GiveError>;

    /// Stops threads of the port that read or set something. Does not wait.
    fn hold(&self);

    /// Returns what has changed until now. All rings are parked. Adds no descriptor.
    ///
    /// # Errors
    /// A thread is still at work, or the state is too long.
    fn give_final(&self, to: &mut Giving) -> Result<Part, GiveError>;

    /// Lets the threads of the port go on.
    fn take_back(&self);

    /// Takes what the old process has returned from [`GivePort::give_final`]. The port has not been started.
    ///
    /// # Errors
    /// The state contradicts what was given before.
    fn receive_final(&self, state: Part, given: &Given) -> Result<(), StartError>;
}

/// The time that a thread gets to finish what it does. It is in a system call of some microseconds, or waits
/// for the kernel's network configuration.
const HELD_WAIT_MAX: Duration = Duration::from_secs(1);

/// A gate that the thread of a port passes before each piece of work, so that another thread can keep it from
/// working.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct GateState {
    is_closed: bool,
    is_working: bool,
}

/// The error of a thread that does not finish its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the host's network does not answer: a change of a TAP is still going on")]
pub(crate) struct StillWorking;

impl Gate {
    /// Keeps the thread from further work. Does not wait for the end of what it does.
    pub(crate) fn close(&self) {
        lock(&self.state).is_closed = true;
    }

    /// Waits until the thread has no work in hand, for a second at most. The gate is closed.
    pub(crate) fn wait_until_idle(&self) -> Result<(), StillWorking> {
        let state = lock(&self.state);
        let waited = self.changed.wait_timeout_while(state, HELD_WAIT_MAX, |state| state.is_working);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if state.is_working { Err(StillWorking) } else { Ok(()) }
    }

    /// Lets the thread work again.
    pub(crate) fn open(&self) {
        lock(&self.state).is_closed = false;
        self.changed.notify_all();
    }

    /// Does a piece of work of the thread, once the gate is open.
    pub(crate) fn pass<T>(&self, work: impl FnOnce() -> T) -> T {
        self.enter();
        let done = work();
        self.leave();
        done
    }

    /// Waits until the gate is open.
    fn enter(&self) {
        let state = lock(&self.state);
        let waited = self.changed.wait_while(state, |state| state.is_closed);
        waited.unwrap_or_else(PoisonError::into_inner).is_working = true;
    }

    fn leave(&self) {
        let mut state = lock(&self.state);
        state.is_working = false;
        // A thread waits for this only after it has closed the gate. A signal is a system call.
        if state.is_closed {
            self.changed.notify_all();
        }
    }
}
