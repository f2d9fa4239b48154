//! The threads of one turn.

use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::Duration;

use anyhow::{Result, anyhow};
use kickless_values::CpuList;

use super::cpu::{pin, shorten_timer_slack};

/// The time between two checks whether the threads have ended.
const LAST_LOOK: Duration = Duration::from_millis(1);

/// Threads that run the loads of a turn.
pub(crate) struct Threads<'scope, T>(Vec<ScopedJoinHandle<'scope, Result<T>>>);

impl<'scope, T: Send + 'scope> Threads<'scope, T> {
    /// Starts a thread for each load, on its CPU of the list.
    pub(crate) fn start<F: FnOnce() -> Result<T> + Send + 'scope>(
        scope: &'scope Scope<'scope, '_>,
        cpus: Option<&'scope CpuList>,
        loads: impl IntoIterator<Item = F>,
    ) -> Self {
        let start = |(at, load): (usize, F)| {
            scope.spawn(move || {
                pin(cpus, at)?;
                shorten_timer_slack();
                load()
            })
        };
        Self(loads.into_iter().enumerate().map(start).collect())
    }

    /// Returns whether a thread has ended.
    pub(crate) fn is_one_finished(&self) -> bool {
        self.0.iter().any(ScopedJoinHandle::is_finished)
    }

    /// Waits until all threads have ended, or `look` returns `true`.
    pub(crate) fn wait(&self, look: impl Fn() -> bool) {
        while !self.0.iter().all(ScopedJoinHandle::is_finished) && !look() {
            thread::sleep(LAST_LOOK);
        }
    }

    /// Waits for all threads. Returns their results.
    ///
    /// # Errors
    /// A thread failed.
    pub(crate) fn join(self) -> Result<Vec<T>> {
        let join = |running: ScopedJoinHandle<'_, Result<T>>| {
            running.join().unwrap_or_else(|_| Err(anyhow!("a thread panicked")))
        };
        let ended: Vec<_> = self.0.into_iter().map(join).collect();
        ended.into_iter().collect()
    }
}
