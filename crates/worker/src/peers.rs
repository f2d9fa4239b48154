//! The workers of a pool, as each of them sees the others.

use crate::clock::{Clock, Nanos};
use crate::mailbox::{Mailbox, MovedTask, Placement, TaskKey, WorkItem};
use crate::times::Times;
use kickless_sync::{Mutex, lock};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The age at which a load is no longer valid, because its worker has been asleep since.
const STALE_NS: Nanos = 300_000_000;

/// A worker, as seen by other threads.
pub(crate) struct Peer {
    pub(crate) mailbox: Arc<Mailbox>,
    pub(crate) times: Arc<Times>,
    /// The part of its time in which it was busy, in thousandths, and when that was measured. A reader may
    /// see values of different times, which does not matter.
    busy: AtomicU32,
    at: AtomicU64,
}

/// All workers of a pool.
pub(crate) struct Peers {
    pub(crate) clock: Clock,
    pub(crate) workers: Vec<Peer>,
}

impl Peers {
    pub(crate) fn new(clock: Clock, mailboxes: Vec<Arc<Mailbox>>) -> Self {
        let times = || Arc::new(Times::new(clock.now()));
        let peer = |mailbox| Peer { mailbox, times: times(), busy: AtomicU32::new(0), at: AtomicU64::new(0) };
        Self { clock, workers: mailboxes.into_iter().map(peer).collect() }
    }

    /// Puts an item for a task into the mailbox of the worker that has it, whose number is in `worker_id`.
    /// The item comes back if that worker has ended.
    pub(crate) fn put(&self, worker_id: &Mutex<usize>, item: WorkItem) -> Result<(), WorkItem> {
        let worker_id = lock(worker_id);
        self.workers[*worker_id].mailbox.put(item)
    }

    /// Gives a task that has left the worker `from` to the worker `to`, with all work items for it that are
    /// not done yet. If that worker has ended, the task comes back and stays where it was.
    pub(crate) fn hand_over(
        &self,
        key: TaskKey,
        placement: &Placement,
        moved: Box<MovedTask>,
        (from, to): (usize, usize),
    ) -> Result<(), WorkItem> {
        let (old, new) = (&self.workers[from].mailbox, &self.workers[to].mailbox);
        let mut worker_id = lock(&placement.worker_id);
        new.put(WorkItem::Adopt(key, placement.clone(), moved))?;
        for item in old.take_for(key) {
            // The worker took the first item. If it has ended since, it drops all of them.
            let _ = new.put(item);
        }
        *worker_id = to;
        Ok(())
    }

    /// Publishes the load of a worker, in thousandths of its time. Only the worker itself calls this.
    pub(crate) fn publish_load(&self, worker_id: usize, busy: u32, now: Nanos) {
        self.workers[worker_id].busy.store(busy, Ordering::Relaxed);
        self.workers[worker_id].at.store(now, Ordering::Relaxed);
    }

    /// Returns the loads of all workers, in thousandths.
    pub(crate) fn loads(&self, now: Nanos) -> impl Iterator<Item = u32> + '_ {
        self.workers.iter().map(move |peer| {
            let age = now.saturating_sub(peer.at.load(Ordering::Relaxed));
            if age > STALE_NS { 0 } else { peer.busy.load(Ordering::Relaxed) }
        })
    }
}
