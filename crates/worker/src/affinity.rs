//! Affinity groups: tasks of one device that run on one worker and move together.
//!
//! The *home* of a group is the worker on which its tasks should be. A move sets the home and moves the tasks
//! that are on the same worker. A task that is moving, or was spawned meanwhile, compares its worker with the
//! home when it arrives, and moves on if they differ. If two workers move parts of one group at once, the
//! later one sets the home. Tasks that stayed behind follow when their worker compares loads the next time.

use crate::event_loop::EventLoop;
use kickless_sync::lock;
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// The homes of a device's groups, as long as they have tasks, or handles of tasks.
#[derive(Debug, Default)]
pub(crate) struct GroupHomes(Mutex<HashMap<u32, Weak<AtomicUsize>>>);

impl GroupHomes {
    /// Returns the home of a group. Sets it to `worker_id` if the group has none.
    pub(crate) fn of(&self, group: u32, worker_id: usize) -> Arc<AtomicUsize> {
        let mut homes = lock(&self.0);
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
        if let Some(home) = &entry.placement.home {
            self.move_one(number, home.load(Ordering::Relaxed));
        }
    }

    /// Adds the shares of a group's tasks to that of the first of them, because they move together. Each pair
    /// is a task number and a share.
    pub(crate) fn join_groups(&self, shares: &mut [(u32, u32)]) {
        join(shares, |number| {
            let entry = self.entries[number as usize].as_ref()?;
            entry.placement.home.as_ref().map(Arc::as_ptr)
        });
    }
}

/// Adds the shares of each group to that of its first task. Pure.
fn join<G: Eq + Hash>(shares: &mut [(u32, u32)], group: impl Fn(u32) -> Option<G>) {
    let mut firsts = HashMap::new();
    for at in 0..shares.len() {
        let Some(group) = group(shares[at].0) else { continue };
        let first = *firsts.entry(group).or_insert(at);
        if first != at {
            shares[first].1 += std::mem::take(&mut shares[at].1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn the_first_of_a_group_has_all_of_its_share() {
        let group = |number: u32| (number != 9).then_some(number % 3);
        let mut shares = [(4, 10), (9, 1), (2, 20), (7, 30), (9, 2), (1, 40), (5, 50), (3, 60)];
        join(&mut shares, group);
        assert_eq!(shares, [(4, 80), (9, 1), (2, 70), (7, 0), (9, 2), (1, 0), (5, 0), (3, 60)]);
        join(&mut [], group);
    }

    #[test]
    fn each_task_is_looked_up_once() {
        let lookups = Cell::new(0);
        let mut shares: Vec<_> = (0..1000).map(|number| (number, 1)).collect();
        join(&mut shares, |number| {
            lookups.set(lookups.get() + 1);
            Some(number % 500)
        });
        assert_eq!(lookups.get(), 1000);
        assert!(shares.iter().all(|(number, share)| *share == if *number < 500 { 2 } else { 0 }));
    }
}
