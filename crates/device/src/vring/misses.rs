//! Translations that queues behind a vIOMMU wait for.
//!
//! A queue that lacks translations says which ([`Misses::ask`]), stands still, and goes on when it is told that they have
//! come ([`Update::Look`](crate::Update::Look)), or that they will not ([`Update::Refused`](crate::Update::Refused)). The
//! transport takes what was asked for ([`Misses::take_unsent`]), asks the front-end, and says here what it answered; it
//! then learns which queues to tell.
//!
//! # No queue waits for ever
//! Each translation that is waited for has been asked for since: a queue that finds it missing either puts it on the list,
//! and what is on the list is sent, or finds it there already, with an answer still to come; both under the lock. The
//! answer is looked for in the table by the queue, not here, so an answer that nobody waits for any more, or that says less
//! than was asked, changes nothing: the queue looks, and asks again. An answer is waited for at most once for each time
//! that it is asked for. What the front-end refuses is refused to the queue, which has its request fail.
//!
//! The transport forgets a queue ([`Misses::forget`]) after it has stopped, so a stopped queue is asked nothing for; an
//! answer that comes later finds nobody.

#[cfg(all(test, loom))]
mod model;

use kickless_io::Waker;
use kickless_memory::{Access, Iova, IovaRange, Miss};
use kickless_sync::Mutex;
use std::collections::BTreeMap;
use std::sync::PoisonError;

/// What the queues of a session wait for. Bounded by what each queue asks for at a time.
#[derive(Debug)]
pub struct Misses {
    state: Mutex<State>,
    /// Something is to be sent.
    signal: Waker,
}

#[derive(Debug, Default)]
struct State {
    pending: BTreeMap<Miss, Pending>,
    /// What is to be sent, with its number.
    unsent: Vec<(u64, Miss)>,
    next: u64,
    queues: BTreeMap<u16, Waiting>,
}

/// One translation that was asked for and not answered.
#[derive(Debug)]
struct Pending {
    number: u64,
    queues: Vec<u16>,
}

/// One queue that waits, or waited and has not gone on yet.
#[derive(Debug, Default)]
struct Waiting {
    /// How many answers are to come.
    left: usize,
    /// What the request that waits uses, all of it: none of this is to be evicted.
    pinned: Vec<IovaRange>,
    /// What it cannot have, and would go on with if it came.
    watched: Vec<IovaRange>,
}

/// An answer that the front-end has given to a miss.
#[derive(Debug, PartialEq, Eq)]
pub struct Refusal {
    /// What it has not got.
    pub miss: Miss,
    /// Who waits for it.
    pub queues: Vec<u16>,
}

impl Misses {
    /// None yet. The signal is given when something is to be sent.
    pub fn new(signal: Waker) -> Self {
        Self { state: Mutex::new(State::default()), signal }
    }

    /// Where that is seen.
    pub fn signal(&self) -> &Waker {
        &self.signal
    }

    fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A queue waits for these. What it has asked for before is not asked for twice. All of `pinned` is kept for it.
    pub fn ask(&self, queue: u16, missing: &[Miss], pinned: &[IovaRange]) {
        let news = self.with(|state| {
            let waiting = state.queues.entry(queue).or_default();
            waiting.pinned.clear();
            waiting.pinned.extend_from_slice(pinned);
            // It looks again when it has its answers.
            waiting.watched.clear();
            for miss in missing {
                let pending = state.pending.entry(*miss).or_insert_with(|| {
                    state.next += 1;
                    state.unsent.push((state.next, *miss));
                    Pending { number: state.next, queues: Vec::new() }
                });
                if !pending.queues.contains(&queue) {
                    pending.queues.push(queue);
                    waiting.left += 1;
                }
            }
            !state.unsent.is_empty()
        });
        if news {
            self.signal.wake();
        }
    }

    /// A queue cannot have this, and would go on if it came unasked.
    /// For one that looks, this is to be said before it does, lest what comes in between wakes nobody; until it asks for something.
    pub fn watch(&self, queue: u16, ranges: Vec<IovaRange>) {
        self.with(|state| state.queues.entry(queue).or_default().watched = ranges);
    }

    /// A queue has what it waited for.
    pub fn resolved(&self, queue: u16) {
        self.forget(queue);
    }

    /// A queue waits for nothing any more: what only it has asked for is not sent, and its answer finds nobody.
    pub fn forget(&self, queue: u16) {
        self.with(|state| {
            if state.queues.remove(&queue).is_none_or(|waiting| waiting.left == 0) {
                return;
            }
            let State { pending, unsent, .. } = state;
            pending.retain(|_, pending| {
                pending.queues.retain(|waits| *waits != queue);
                !pending.queues.is_empty()
            });
            unsent.retain(|(number, miss)| pending.get(miss).is_some_and(|p| p.number == *number));
        });
    }

    /// What is to be sent, in the order it was asked for; each with a number that its reply is known by.
    pub fn take_unsent(&self) -> Vec<(u64, Miss)> {
        self.signal.clear();
        self.with(|state| std::mem::take(&mut state.unsent))
    }

    /// There are translations of `range` now that allow `access`. Queues that are to look again: all that they waited for has
    /// been answered.
    pub fn answered(&self, range: IovaRange, access: Access) -> Vec<u16> {
        self.with(|state| {
            let mut woken = Vec::new();
            if state.queues.is_empty() {
                return woken;
            }
            let first = Miss { page: Iova(range.first().0 & !0xfff), access: Access::NONE };
            let last = Miss { page: range.last(), access: Access::BOTH };
            let met: Vec<Miss> = state
                .pending
                .range(first..=last)
                .map(|(miss, _)| *miss)
                .filter(|miss| access.allows(miss.access))
                .collect();
            for miss in met {
                state.end(&miss, &mut woken);
            }
            for (queue, waiting) in &mut state.queues {
                if waiting.watched.iter().any(|watched| watched.overlaps(range)) {
                    waiting.watched.clear();
                    woken.push(*queue);
                }
            }
            woken
        })
    }

    /// The front-end has replied to the miss with this number. If nothing that it said in between was an answer, it has none:
    /// who is to be told. Also where it says that it has answered: what it said was not what was asked for.
    pub fn replied(&self, number: u64, miss: &Miss) -> Option<Refusal> {
        self.with(|state| {
            let pending = state.pending.get(miss).filter(|pending| pending.number == number)?;
            let queues = pending.queues.clone();
            state.end(miss, &mut Vec::new());
            Some(Refusal { miss: *miss, queues })
        })
    }

    /// Whether anybody still waits for the miss with this number.
    pub fn is_pending(&self, number: u64, miss: &Miss) -> bool {
        self.with(|state| state.pending.get(miss).is_some_and(|pending| pending.number == number))
    }

    /// Whether a request that waits needs any of these.
    pub fn is_pinned(&self, range: IovaRange) -> bool {
        self.with(|state| {
            state.queues.values().any(|waiting| waiting.pinned.iter().any(|pinned| pinned.overlaps(range)))
        })
    }
}

impl State {
    /// One answer less to wait for. Queues for which it was the last are woken.
    fn end(&mut self, miss: &Miss, woken: &mut Vec<u16>) {
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
