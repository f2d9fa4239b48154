//! The workers of a pool, as each of them sees the others.

use crate::clock::{Clock, Nanos};
use crate::mailbox::{Arrival, Item, Key, Mailbox, Tenant};
use kickless_sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};

/// A load that is older than this is that of a worker which has been asleep since.
const STALE_NS: Nanos = 300_000_000;

/// One worker, from outside.
pub(crate) struct Peer {
    pub(crate) mailbox: Arc<Mailbox>,
    /// How busy it was, in thousandths, and when that was found. The two may be of different times, which does not matter.
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
        let peer = |mailbox| Peer { mailbox, busy: AtomicU32::new(0), at: AtomicU64::new(0) };
        Self { clock, workers: mailboxes.into_iter().map(peer).collect() }
    }

    /// Puts an item for a task into the mailbox of the worker that has it, which `worker_id` says. If that worker has ended the item
    /// comes back.
    pub(crate) fn put(&self, worker_id: &Mutex<usize>, item: Item) -> Result<(), Item> {
        let worker_id = worker_id.lock().unwrap_or_else(PoisonError::into_inner);
        self.workers[*worker_id].mailbox.put(item)
    }

    /// Gives a task that is on no worker any more to that at `to`, and with it all that it has been asked at `from` and not been
    /// told yet. If that worker has ended the task comes back, and stays where it was.
    pub(crate) fn hand_over(
        &self,
        key: Key,
        tenant: &Tenant,
        arrival: Box<Arrival>,
        (from, to): (usize, usize),
    ) -> Result<(), Item> {
        let (old, new) = (&self.workers[from].mailbox, &self.workers[to].mailbox);
        let mut worker_id = tenant.worker_id.lock().unwrap_or_else(PoisonError::into_inner);
        new.put(Item::Adopt(key, tenant.clone(), arrival))?;
        for item in old.take_for(key) {
            // It took the first; and if it has ended since, so does everything.
            let _ = new.put(item);
        }
        *worker_id = to;
        Ok(())
    }

    /// Says how busy a worker is, in thousandths of its time. Only the worker itself does.
    pub(crate) fn tell(&self, worker_id: usize, busy: u32, now: Nanos) {
        self.workers[worker_id].busy.store(busy, Ordering::Relaxed);
        self.workers[worker_id].at.store(now, Ordering::Relaxed);
    }

    /// How busy the workers are, in thousandths.
    pub(crate) fn loads(&self, now: Nanos) -> impl Iterator<Item = u32> + '_ {
        self.workers.iter().map(move |peer| {
            let age = now.saturating_sub(peer.at.load(Ordering::Relaxed));
            if age > STALE_NS { 0 } else { peer.busy.load(Ordering::Relaxed) }
        })
    }
}
