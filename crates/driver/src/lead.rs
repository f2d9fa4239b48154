//! Which of the threads that wait at a queue sleeps on its events, for all of them.

use std::collections::VecDeque;
use std::sync::Arc;

use kickless_sync::{Mutex, MutexGuard, lock};

use crate::event::Event;
use crate::seat::Seat;

/// The role of the one that sleeps on the queue's events and hands out what has come. The others sleep in their seats, until
/// their request is done or the role is free and they are told.
///
/// Whoever leaves while the role is free tells the first of those that sleep; so there is always one on its way to it.
#[derive(Debug, Default)]
pub(crate) struct Lead(Mutex<Roles>);

#[derive(Debug, Default)]
struct Roles {
    taken: bool,
    followers: VecDeque<Arc<Seat>>,
    /// The disk's thread wants the role as soon as it is free, and keeps it.
    reactor: Option<Arc<Event>>,
}

impl Lead {
    fn roles(&self) -> MutexGuard<'_, Roles> {
        lock(&self.0)
    }

    /// Takes the role if it is free; otherwise the seat is among those that are told when it is.
    pub(crate) fn take_or_follow(&self, seat: &Arc<Seat>) -> bool {
        let mut roles = self.roles();
        if roles.taken || roles.reactor.is_some() {
            roles.followers.push_back(seat.clone());
            return false;
        }
        roles.taken = true;
        true
    }

    /// The seat does not wait any more.
    pub(crate) fn stop_following(&self, seat: &Arc<Seat>) {
        self.roles().followers.retain(|other| !Arc::ptr_eq(other, seat));
    }

    /// The role is free again.
    pub(crate) fn give_up(&self) {
        let mut roles = self.roles();
        roles.taken = false;
        roles.tell();
    }

    /// Whoever leaves the queue says so.
    pub(crate) fn pass_on(&self) {
        self.roles().tell();
    }

    /// The disk's thread takes the role for good; `false`: not yet, and `event` is signalled when it can.
    pub(crate) fn take_for_good(&self, event: &Arc<Event>) -> bool {
        let mut roles = self.roles();
        if roles.taken {
            roles.reactor = Some(event.clone());
            return false;
        }
        roles.taken = true;
        roles.reactor = None;
        true
    }

    /// Everybody is to look again.
    pub(crate) fn rouse(&self) {
        self.roles().followers.iter().for_each(|seat| seat.nudge());
    }
}

impl Roles {
    fn tell(&self) {
        if self.taken {
            return;
        }
        match (&self.reactor, self.followers.front()) {
            (Some(event), _) => event.signal(),
            (None, Some(seat)) => seat.nudge(),
            (None, None) => {}
        }
    }
}
