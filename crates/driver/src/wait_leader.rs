//! Selects one of the threads that wait at a queue. It sleeps on the events of the queue for all of them.

use std::collections::VecDeque;
use std::sync::Arc;

use kickless_sync::{Mutex, MutexGuard, lock};

use crate::event::Event;
use crate::waiter::Waiter;

/// The role of the leader.
///
/// The leader sleeps on the queue's events and delivers completions. The other threads sleep on their
/// waiters, until their request is done or the role is free.
///
/// A thread that leaves while the role is free notifies the first sleeping thread. So there is always a
/// thread that will take the role.
#[derive(Debug, Default)]
pub(crate) struct WaitLeader(Mutex<LeaderState>);

#[derive(Debug, Default)]
struct LeaderState {
    taken: bool,
    followers: VecDeque<Arc<Waiter>>,
    /// Signalled when the role is free, because the reactor thread wants to keep it.
    reactor: Option<Arc<Event>>,
}

impl WaitLeader {
    fn state(&self) -> MutexGuard<'_, LeaderState> {
        lock(&self.0)
    }

    /// Takes the role if it is free, and returns `true`. Otherwise, adds the waiter to those that are
    /// notified when the role becomes free, and returns `false`.
    pub(crate) fn lead_or_follow(&self, waiter: &Arc<Waiter>) -> bool {
        let mut state = self.state();
        if state.taken || state.reactor.is_some() {
            state.followers.push_back(waiter.clone());
            return false;
        }
        state.taken = true;
        true
    }

    /// Removes a waiter that does not wait any more.
    pub(crate) fn stop_following(&self, waiter: &Arc<Waiter>) {
        self.state().followers.retain(|other| !Arc::ptr_eq(other, waiter));
    }

    /// Gives up the role.
    pub(crate) fn resign(&self) {
        let mut state = self.state();
        state.taken = false;
        state.wake_next();
    }

    /// Notifies the next waiter if the role is free. A thread that leaves the queue calls this.
    pub(crate) fn wake_next(&self) {
        self.state().wake_next();
    }

    /// Gives the role to the reactor thread for good. Returns `false` if it is taken; then `event` is
    /// signalled when it is free.
    pub(crate) fn lead_for_good(&self, event: &Arc<Event>) -> bool {
        let mut state = self.state();
        if state.taken {
            state.reactor = Some(event.clone());
            return false;
        }
        state.taken = true;
        state.reactor = None;
        true
    }

    /// Notifies all waiters, so that they check their state again.
    pub(crate) fn notify_all_waiters(&self) {
        self.state().followers.iter().for_each(|waiter| waiter.notify());
    }
}

impl LeaderState {
    fn wake_next(&self) {
        if self.taken {
            return;
        }
        match (&self.reactor, self.followers.front()) {
            (Some(event), _) => event.signal(),
            (None, Some(waiter)) => waiter.notify(),
            (None, None) => {}
        }
    }
}
