//! Keeps the devices as they are while they pass to another process.
//!
//! Each caller that changes devices says so first
//! ([`Registry::begin_change`](crate::Registry::begin_change)), and is refused while they pass. A freeze
//! waits for the changes that go on. Front-ends come and go meanwhile, and devices can end by themselves.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Instant;

use kickless_sync::lock;

/// The changes of the devices of a registry.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    state: Mutex<ChangesState>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct ChangesState {
    running: usize,
    is_frozen: bool,
}

/// A change that goes on. Dropping it ends the change.
#[derive(Debug)]
#[must_use]
pub struct Change<'r>(&'r Changes);

/// Refuses changes until it is dropped.
#[derive(Debug)]
#[must_use]
pub(crate) struct Freeze<'r>(&'r Changes);

/// The error of a change, or of a second freeze, while the devices pass to another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the daemon is being upgraded: try again in a moment")]
pub struct BeingUpgraded;

/// The reason for which the devices cannot be frozen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FreezeError {
    /// Another caller has frozen them.
    #[error(transparent)]
    Frozen(#[from] BeingUpgraded),
    /// A change took longer than the caller waits.
    #[error("a device is being added, removed or changed: try again when that is done")]
    Busy,
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).running -= 1;
        self.0.ended.notify_all();
    }
}

impl Drop for Freeze<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).is_frozen = false;
    }
}

impl Changes {
    /// Begins a change.
    ///
    /// # Errors
    /// The devices pass to another process.
    pub(crate) fn begin(&self) -> Result<Change<'_>, BeingUpgraded> {
        let mut state = lock(&self.state);
        if state.is_frozen {
            return Err(BeingUpgraded);
        }
        state.running += 1;
        Ok(Change(self))
    }

    /// Refuses changes from now on. Waits up to `deadline` for those that go on.
    ///
    /// # Errors
    /// A change goes on for longer, or another caller has frozen the devices.
    pub(crate) fn freeze(&self, deadline: Instant) -> Result<Freeze<'_>, FreezeError> {
        let mut state = lock(&self.state);
        if state.is_frozen {
            return Err(BeingUpgraded.into());
        }
        state.is_frozen = true;
        while state.running > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                state.is_frozen = false;
                return Err(FreezeError::Busy);
            }
            state = self.ended.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(Freeze(self))
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;

    const SOON: Duration = Duration::from_millis(20);
    const LATE: Duration = Duration::from_secs(60);

    #[test]
    fn a_freeze_waits_for_changes_and_refuses_others() {
        let changes = Changes::default();
        let change = changes.begin().unwrap();
        assert_eq!(changes.freeze(Instant::now() + SOON).unwrap_err(), FreezeError::Busy);
        // The freeze that gave up refuses nothing.
        drop(changes.begin().unwrap());
        thread::scope(|scope| {
            let frozen = scope.spawn(|| changes.freeze(Instant::now() + LATE).map(std::mem::forget));
            while changes.begin().is_ok() {
                thread::yield_now();
            }
            assert!(!frozen.is_finished());
            drop(change);
            frozen.join().unwrap().unwrap();
        });
        assert_eq!(changes.begin().unwrap_err(), BeingUpgraded);
        assert_eq!(changes.freeze(Instant::now() + LATE).unwrap_err(), FreezeError::Frozen(BeingUpgraded));
        drop(Freeze(&changes));
        drop(changes.begin().unwrap());
    }
}
