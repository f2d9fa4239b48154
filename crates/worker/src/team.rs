//! The workers of a pool, as each of them sees the others.

use crate::clock::{Clock, Nanos};
use crate::mailbox::{Arrival, Item, Key, Mailbox, Tenant};
use crate::primitive::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};

/// A load that is older than this is that of a worker which has been asleep since.
const STALE_NS: Nanos = 300_000_000;

/// One worker, from outside.
pub(crate) struct Seat {
    pub(crate) mailbox: Arc<Mailbox>,
    /// How busy it was, in thousandths, and when that was found. The two may be of different times, which does not matter.
    busy: AtomicU32,
    at: AtomicU64,
}

/// All workers of a pool.
pub(crate) struct Team {
    pub(crate) clock: Clock,
    pub(crate) seats: Vec<Seat>,
}

impl Team {
    pub(crate) fn new(clock: Clock, mailboxes: Vec<Arc<Mailbox>>) -> Self {
        let seat = |mailbox| Seat { mailbox, busy: AtomicU32::new(0), at: AtomicU64::new(0) };
        Self { clock, seats: mailboxes.into_iter().map(seat).collect() }
    }

    /// Puts an item for a task into the mailbox of the worker that has it, which `place` says. If that worker has ended the item
    /// comes back.
    pub(crate) fn put(&self, place: &Mutex<usize>, item: Item) -> Result<(), Item> {
        let place = place.lock().unwrap_or_else(PoisonError::into_inner);
        self.seats[*place].mailbox.put(item)
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
        let (old, new) = (&self.seats[from].mailbox, &self.seats[to].mailbox);
        let mut place = tenant.seat.lock().unwrap_or_else(PoisonError::into_inner);
        new.put(Item::Adopt(key, tenant.clone(), arrival))?;
        for item in old.take_for(key) {
            // It took the first; and if it has ended since, so does everything.
            let _ = new.put(item);
        }
        *place = to;
        Ok(())
    }

    /// Says how busy a worker is, in thousandths of its time. Only the worker itself does.
    pub(crate) fn tell(&self, seat: usize, busy: u32, now: Nanos) {
        self.seats[seat].busy.store(busy, Ordering::Relaxed);
        self.seats[seat].at.store(now, Ordering::Relaxed);
    }

    /// How busy the workers are, in thousandths.
    pub(crate) fn loads(&self, now: Nanos) -> impl Iterator<Item = u32> + '_ {
        self.seats.iter().map(move |seat| {
            let age = now.saturating_sub(seat.at.load(Ordering::Relaxed));
            if age > STALE_NS { 0 } else { seat.busy.load(Ordering::Relaxed) }
        })
    }
}
