//! Affinity groups: tasks of one device that run on one worker and move together.
//!
//! A group's *home* is the worker that its tasks are to be on. A move sets the home and moves the tasks that are on the same
//! worker. A task that is on its way, or was spawned meanwhile, compares its worker with the home when it arrives, and moves on.
//! Two workers that move parts of one group at once set the home one after the other. A task that has stayed behind then
//! follows the next time that loads are looked at.

use crate::event_loop::EventLoop;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// The homes of a device's groups, as long as they have tasks.
#[derive(Debug, Default)]
pub(crate) struct Homes(Mutex<HashMap<u32, Weak<AtomicUsize>>>);

impl Homes {
    /// Returns the home of a group; `worker_id` if it has none yet.
    pub(crate) fn of(&self, group: u32, worker_id: usize) -> Arc<AtomicUsize> {
        let mut homes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(home) = homes.get(&group).and_then(Weak::upgrade) {
            return home;
        }
        let home = Arc::new(AtomicUsize::new(worker_id));
        homes.insert(group, Arc::downgrade(&home));
        home
    }
}

impl EventLoop {
    /// Moves a task to the home of its group, if that is another worker.
    pub(crate) fn follow_home(&mut self, number: u32) {
        let Some(entry) = self.entries[number as usize].as_ref() else { return };
        if let Some(home) = &entry.tenant.home {
            self.move_one(number, home.load(Ordering::Relaxed));
        }
    }

    /// Adds the shares of a group's tasks, by task number, to that of the first of them, because they move together.
    pub(crate) fn join_groups(&self, shares: &mut [(u32, u32)]) {
        let home =
            |number: u32| self.entries[number as usize].as_ref()?.tenant.home.as_ref().map(Arc::as_ptr);
        for at in 1..shares.len() {
            let Some(group) = home(shares[at].0) else { continue };
            if let Some(first) = (0..at).find(|&first| home(shares[first].0) == Some(group)) {
                shares[first].1 += std::mem::take(&mut shares[at].1);
            }
        }
    }
}
