//! Which of the threads that wait at a queue sleeps on its events, for all of them.

use std::collections::VecDeque;
use std::sync::Arc;

use kickless_sync::{Mutex, MutexGuard, lock};

use crate::event::Event;
use crate::waiter::Waiter;

/// The role of the one that sleeps on the queue's events and hands out what has come. The others sleep in their seats, until
/// their request is done or the role is free and they are told.
///
/// Whoever leaves while the role is free tells the first of those that sleep; so there is always one on its way to it.
#[derive(Debug, Default)]
pub(crate) struct WaitLeader(Mutex<LeaderState>);

#[derive(Debug, Default)]
struct LeaderState {
    taken: bool,
    followers: VecDeque<Arc<Waiter>>,
    /// The disk's thread wants the role as soon as it is free, and keeps it.
    reactor: Option<Arc<Event>>,
}

impl WaitLeader {
    fn state(&self) -> MutexGuard<'_, LeaderState> {
        lock(&self.0)
    }

    /// Takes the role if it is free; otherwise the seat is among those that are told when it is.
    pub(crate) fn lead_or_follow(&self, waiter: &Arc<Waiter>) -> bool {
        let mut state = self.state();
        if state.taken || state.reactor.is_some() {
            state.followers.push_back(waiter.clone());
            return false;
        }
        state.taken = true;
        true
    }

    /// The seat does not wait any more.
    pub(crate) fn stop_following(&self, waiter: &Arc<Waiter>) {
        self.state().followers.retain(|other| !Arc::ptr_eq(other, waiter));
    }

    /// The role is free again.
    pub(crate) fn resign(&self) {
        let mut state = self.state();
        state.taken = false;
        state.wake_next();
    }

    /// Whoever leaves the queue says so.
    pub(crate) fn wake_next(&self) {
        self.state().wake_next();
    }

    /// The disk's thread takes the role for good; `false`: not yet, and `event` is signalled when it can.
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

    /// Everybody is to look again.
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
