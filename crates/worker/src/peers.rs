//! The workers of a pool, as each of them sees the others.

use crate::clock::{Clock, Nanos};
use crate::mailbox::{Holder, Mailbox, MovedTask, Placement, TaskKey, WorkItem};
use crate::times::Times;
use kickless_sync::{Mutex, lock};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The age at which a load is no longer valid, because its worker has been asleep since.
const STALE_NS: Nanos = 300_000_000;

/// The number of workers of all pools that this process has made.
static WORKERS: AtomicU32 = AtomicU32::new(0);

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
    /// The number of the first worker among those of all pools.
    first: u32,
}

impl Peers {
    pub(crate) fn new(clock: Clock, mailboxes: Vec<Arc<Mailbox>>) -> Self {
        let times = || Arc::new(Times::new(clock.now()));
        let peer = |mailbox| Peer { mailbox, times: times(), busy: AtomicU32::new(0), at: AtomicU64::new(0) };
        // Lossless, because a process makes far fewer workers.
        let first = WORKERS.fetch_add(mailboxes.len() as u32, Ordering::Relaxed);
        Self { clock, workers: mailboxes.into_iter().map(peer).collect(), first }
    }

    /// Returns the number of a worker among those of all pools, which is its name in a location.
    pub(crate) fn location_of(&self, worker_id: usize) -> u32 {
        self.first.wrapping_add(worker_id as u32)
    }

    /// Puts an item for a task into the mailbox of the worker that has it, or to the items of the parked
    /// task. The item comes back if that worker has ended.
    pub(crate) fn put(&self, holder: &Mutex<Holder>, item: WorkItem) -> Result<(), WorkItem> {
        match &mut *lock(holder) {
            Holder::Worker(worker_id) => self.workers[*worker_id].mailbox.put(item),
            Holder::Handle(parked) => {
                parked.items.push(item);
                Ok(())
            }
        }
    }

    /// Gives a task that has left its worker to the worker `to`, with all work items for it that are not done
    /// yet. If that worker has ended, the task comes back and stays where it was.
    pub(crate) fn hand_over(
        &self,
        key: TaskKey,
        placement: &Placement,
        moved: Box<MovedTask>,
        to: usize,
    ) -> Result<(), WorkItem> {
        let (old, new) = (&self.workers[moved.from].mailbox, &self.workers[to].mailbox);
        let mut holder = lock(&placement.holder);
        new.put(WorkItem::Adopt(key, placement.clone(), moved))?;
        for item in old.take_for(key) {
            // The worker took the first item. If it has ended since, it drops all of them.
            let _ = new.put(item);
        }
        *holder = Holder::Worker(to);
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
