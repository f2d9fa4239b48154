//! Translations that queues behind a vIOMMU wait for.
//!
//! A queue that lacks translations lists them ([`IotlbMisses::ask`]) and pauses. It goes on when they have
//! come ([`Update::Poll`](crate::Update::Poll)), or when the front-end refuses them
//! ([`Update::TranslationRefused`](crate::Update::TranslationRefused)). The transport takes the list
//! ([`IotlbMisses::take_unsent`]), asks the front-end, and reports its answers here. In return it learns
//! which queues to update.
//!
//! # No queue waits for ever
//! A queue only waits for answers that are still to come. It first finds the translation missing in the
//! table. Then, under the lock, it puts the miss on the list, which the transport sends. If another queue has
//! put the miss there, the answer has not come yet, and it wakes both queues.
//!
//! Answers are not kept here: a queue that is woken looks for its translations in the table. If an answer
//! covered less than was asked, the queue asks again. When the front-end refuses a translation, the refusal
//! goes to the queue, whose request fails.
//!
//! The transport forgets a queue ([`IotlbMisses::forget`]) after it has stopped. So it sends nothing for a
//! stopped queue, and ignores a late answer.

#[cfg(all(test, loom))]
mod model;

use kickless_io::Waker;
use kickless_memory::{Access, Iova, IovaRange, Miss};
use kickless_sync::Mutex;
use kickless_sync::lock;
use std::collections::BTreeMap;

/// The translations that the queues of a session wait for. Their number is limited, because each queue asks
/// for a limited number at a time.
#[derive(Debug)]
pub struct IotlbMisses {
    table: Mutex<MissTable>,
    /// Signalled when there is something to send.
    signal: Waker,
}

#[derive(Debug, Default)]
struct MissTable {
    pending: BTreeMap<Miss, PendingMiss>,
    /// Misses to send, with their numbers.
    unsent: Vec<(u64, Miss)>,
    next: u64,
    queues: BTreeMap<u16, WaitingQueue>,
}

/// A translation that was asked for and not answered yet.
#[derive(Debug)]
struct PendingMiss {
    number: u64,
    queues: Vec<u16>,
}

/// A queue that waits, or has waited and has not gone on yet.
#[derive(Debug, Default)]
struct WaitingQueue {
    /// The number of answers still to come.
    left: usize,
    /// All ranges that the waiting request uses. They must not be evicted.
    pinned: Vec<IovaRange>,
    /// Ranges of the ring's areas, from [`IotlbMisses::watch`]. A translation of one wakes the queue, even
    /// after a refusal.
    watched: Vec<IovaRange>,
}

/// The front-end's answer that it has no such translation.
#[derive(Debug, PartialEq, Eq)]
pub struct RefusedMiss {
    /// The translation that the front-end does not have.
    pub miss: Miss,
    /// The queues that wait for it.
    pub queues: Vec<u16>,
}

impl IotlbMisses {
    /// Makes an empty list. Wakes `signal` when there is something to send.
    pub fn new(signal: Waker) -> Self {
        Self { table: Mutex::new(MissTable::default()), signal }
    }

    /// Returns the waker that is signalled when there is something to send.
    pub fn signal(&self) -> &Waker {
        &self.signal
    }

    fn with<T>(&self, change: impl FnOnce(&mut MissTable) -> T) -> T {
        change(&mut lock(&self.table))
    }

    /// Asks for these translations. The queue then waits for them. A miss that is pending already is not sent
    /// twice. The ranges in `pinned` are not evicted meanwhile.
    pub fn ask(&self, queue: u16, missing: &[Miss], pinned: &[IovaRange]) {
        let news = self.with(|table| {
            let waiting = table.queues.entry(queue).or_default();
            waiting.pinned.clear();
            waiting.pinned.extend_from_slice(pinned);
            // The queue checks again after its answers.
            waiting.watched.clear();
            for miss in missing {
                let pending = table.pending.entry(*miss).or_insert_with(|| {
                    table.next += 1;
                    table.unsent.push((table.next, *miss));
                    PendingMiss { number: table.next, queues: Vec::new() }
                });
                if !pending.queues.contains(&queue) {
                    pending.queues.push(queue);
                    waiting.left += 1;
                }
            }
            !table.unsent.is_empty()
        });
        if news {
            self.signal.wake();
        }
    }

    /// Watches these ranges for a queue. The first translation of one of them wakes the queue, even if the
    /// front-end refused it before and now sends it unasked.
    ///
    /// A queue calls this before it looks in the table. Otherwise a translation that comes in between would
    /// not wake it. The next [`IotlbMisses::ask`] or [`IotlbMisses::resolved`] of the queue ends the watch.
    pub fn watch(&self, queue: u16, ranges: Vec<IovaRange>) {
        self.with(|table| table.queues.entry(queue).or_default().watched = ranges);
    }

    /// Ends the wait of a queue that has its translations.
    pub fn resolved(&self, queue: u16) {
        self.forget(queue);
    }

    /// Ends all waits of a queue. A miss that only this queue has asked for is not sent, and its answer is
    /// ignored.
    pub fn forget(&self, queue: u16) {
        self.with(|table| {
            if table.queues.remove(&queue).is_none_or(|waiting| waiting.left == 0) {
                return;
            }
            let MissTable { pending, unsent, .. } = table;
            pending.retain(|_, pending| {
                pending.queues.retain(|waits| *waits != queue);
                !pending.queues.is_empty()
            });
            unsent.retain(|(number, miss)| pending.get(miss).is_some_and(|p| p.number == *number));
        });
    }

    /// Takes the misses to send, in the order of their requests. The front-end's reply is matched by the
    /// number.
    pub fn take_unsent(&self) -> Vec<(u64, Miss)> {
        self.signal.clear();
        self.with(|table| std::mem::take(&mut table.unsent))
    }

    /// Reports that the table has translations of `range` that allow `access`. Returns the queues to wake:
    /// those whose misses are all answered, and those that watch the range.
    pub fn answered(&self, range: IovaRange, access: Access) -> Vec<u16> {
        self.with(|table| {
            let mut woken = Vec::new();
            if table.queues.is_empty() {
                return woken;
            }
            let first = Miss { page: Iova(range.first().0 & !0xfff), access: Access::NONE };
            let last = Miss { page: range.last(), access: Access::BOTH };
            let met: Vec<Miss> = table
                .pending
                .range(first..=last)
                .map(|(miss, _)| *miss)
                .filter(|miss| access.allows(miss.access))
                .collect();
            for miss in met {
                table.answer(&miss, &mut woken);
            }
            for (queue, waiting) in &mut table.queues {
                if waiting.watched.iter().any(|watched| watched.overlaps(range)) {
                    waiting.watched.clear();
                    woken.push(*queue);
                }
            }
            woken
        })
    }

    /// Reports the front-end's reply to the miss with this number. Returns the queues to inform if the miss
    /// is still unanswered.
    ///
    /// The front-end sends translations before its reply. A miss that is unanswered then is refused, even if
    /// the reply claims success, because the translations that came were not the ones asked for.
    pub fn replied(&self, number: u64, miss: &Miss) -> Option<RefusedMiss> {
        self.with(|table| {
            let pending = table.pending.get(miss).filter(|pending| pending.number == number)?;
            let queues = pending.queues.clone();
            table.answer(miss, &mut Vec::new());
            Some(RefusedMiss { miss: *miss, queues })
        })
    }

    /// Returns whether a queue still waits for the miss with this number.
    pub fn is_pending(&self, number: u64, miss: &Miss) -> bool {
        self.with(|table| table.pending.get(miss).is_some_and(|pending| pending.number == number))
    }

    /// Returns whether a waiting request needs any part of the range.
    pub fn is_pinned(&self, range: IovaRange) -> bool {
        self.with(|table| {
            table.queues.values().any(|waiting| waiting.pinned.iter().any(|pinned| pinned.overlaps(range)))
        })
    }
}

impl MissTable {
    /// Removes an answered miss. Adds the queues that wait for no other answer to `woken`.
    fn answer(&mut self, miss: &Miss, woken: &mut Vec<u16>) {
        let Some(pending) = self.pending.remove(miss) else { return };
        self.unsent.retain(|(number, _)| *number != pending.number);
        for queue in pending.queues {
            if let Some(waiting) = self.queues.get_mut(&queue) {
                waiting.left = waiting.left.saturating_sub(1);
                if waiting.left == 0 {
                    woken.push(queue);
                }
            }
        }
    }
}
