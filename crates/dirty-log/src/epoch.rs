//! Quiescent points: how one thread knows that others have finished with what they saw.
//!
//! A member's *section* is the time between two of its quiescent points. What it looked up in a section (a leaf, a cached
//! translation, a pointer to a bitmap) it uses in that section only. Who takes something away does it first, and then calls
//! [`Epochs::wait`], which returns once no section is left that began before the call. Members never wait for anybody.
//!
//! # Orders
//! * `current` counts the waits. A wait adds one (release); a member loads it (acquire) at each quiescent point, and if it
//!   has changed, empties its cache and announces the number it saw (release). So there are no stores at all at the quiescent
//!   points between two waits.
//! * What a member did in a section comes before its announcement (release), which the waiter loads (acquire): its stores to
//!   guest memory have happened when the wait is over.
//! * What was taken away comes before the count (release), which the member loads (acquire) before its next section: it does
//!   not see it any more. The same number serves as the generation of the caches: one that was filled before is emptied.
//! * A wait that lasts asks those who run, again and again, to give way at their next quiescent point (`crowded`): whom it waits for may share
//!   their processor, and would otherwise get it when the scheduler thinks it time, milliseconds later for each.
//! * A member that sleeps is *offline* and not waited for. That is the one place where two threads each store and then load
//!   what the other stored: the member announces that it is online, and looks things up; the waiter has taken things away, and
//!   looks who is online. Each has a fence between the two ([`Member::online`], [`Epochs::wait`]), so that at least one of
//!   them sees the other.

use kickless_sync::atomic::{AtomicU64, Ordering, fence};
use kickless_sync::{Mutex, lock, yield_now};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// What an offline member announces; the count begins behind it.
const OFFLINE: u64 = 0;

/// On cache lines of its own, of which processors fetch two at a time.
#[repr(align(128))]
struct Apart<T>(T);

/// Looks after which a wait lasts, and asks the writers to give way.
const LOOKS: u32 = 128;
/// It asks less often than that: somebody who is kept from his quiescent point for longer is not kept by other writers.
const ASKS_MAX: u32 = 256;
/// How long who gives way does so, and who has asked often enough sleeps between looks.
const PAUSE: Duration = Duration::from_micros(100);

/// The count, and who is waited for.
pub(crate) struct Epochs {
    current: Apart<AtomicU64>,
    /// How many waits last.
    crowded: AtomicU64,
    members: Mutex<Vec<Arc<Apart<AtomicU64>>>>,
}

impl Epochs {
    pub(crate) fn new() -> Self {
        Self {
            current: Apart(AtomicU64::new(OFFLINE + 1)),
            crowded: AtomicU64::new(0),
            members: Mutex::new(Vec::new()),
        }
    }

    /// Waits until every section that began before has ended.
    pub(crate) fn wait(&self) {
        let target = self.current.0.fetch_add(1, Ordering::AcqRel) + 1;
        // Partner: the fence in `Member::online`.
        fence(Ordering::SeqCst);
        // Who joins later was not online before, and the lock orders what it sees after what was taken away.
        let members = lock(&self.members).clone();
        let mut turns = 0;
        for member in members {
            loop {
                let announced = member.0.load(Ordering::Acquire);
                if announced == OFFLINE || announced >= target {
                    break;
                }
                relax(&mut turns);
                if !cfg!(loom) && turns.is_multiple_of(LOOKS) {
                    self.ask(turns / LOOKS);
                }
            }
        }
        if !cfg!(loom) && (LOOKS..LOOKS * ASKS_MAX).contains(&turns) {
            self.crowded.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Asks the writers to give way, or sleeps if that has been asked often enough.
    #[cold]
    fn ask(&self, times: u32) {
        if times == 1 {
            self.crowded.fetch_add(1, Ordering::Relaxed);
        } else if times == ASKS_MAX {
            self.crowded.fetch_sub(1, Ordering::Relaxed);
        }
        if times < ASKS_MAX {
            // So that those who have announced what is waited for look again.
            self.current.0.fetch_add(1, Ordering::AcqRel);
        } else {
            thread::sleep(PAUSE);
        }
    }

    /// For who has passed a quiescent point.
    #[cold]
    fn give_way(&self) {
        if !cfg!(loom) && self.crowded.load(Ordering::Relaxed) != 0 {
            // To yield is not enough: a scheduler may prefer who runs.
            thread::sleep(PAUSE);
        }
    }
}

/// One who is waited for. Offline to begin with.
pub(crate) struct Member {
    announced: Arc<Apart<AtomicU64>>,
    /// What it announced last while it was online: its cache is of that generation.
    seen: u64,
}

impl Member {
    pub(crate) fn join(epochs: &Epochs) -> Self {
        let announced = Arc::new(Apart(AtomicU64::new(OFFLINE)));
        lock(&epochs.members).push(announced.clone());
        Self { announced, seen: OFFLINE }
    }

    /// Ends a section and begins another; whether the cache is to be emptied.
    #[inline]
    pub(crate) fn quiesce(&mut self, epochs: &Epochs) -> bool {
        let current = epochs.current.0.load(Ordering::Acquire);
        // Offline: its guard was leaked. It comes back when it looks something up.
        if current == self.seen || self.is_offline() {
            return false;
        }
        self.announced.0.store(current, Ordering::Release);
        self.seen = current;
        epochs.give_way();
        true
    }

    /// Begins a section; whether the cache is to be emptied.
    pub(crate) fn online(&mut self, epochs: &Epochs) -> bool {
        // Release: a waiter that finds this number relies on the section before the sleep being over, as at any other announcement.
        self.announced.0.store(epochs.current.0.load(Ordering::Relaxed), Ordering::Release);
        // Partner: the fence in `Epochs::wait`.
        fence(Ordering::SeqCst);
        // Only now: a wait that saw this member offline has counted before.
        let current = epochs.current.0.load(Ordering::Acquire);
        self.announced.0.store(current, Ordering::Release);
        std::mem::replace(&mut self.seen, current) != current
    }

    /// Whether it is in no section.
    pub(crate) fn is_offline(&self) -> bool {
        self.announced.0.load(Ordering::Relaxed) == OFFLINE
    }

    /// Ends a section.
    pub(crate) fn offline(&mut self) {
        self.announced.0.store(OFFLINE, Ordering::Release);
    }

    /// Ends a section for ever.
    pub(crate) fn leave(&mut self, epochs: &Epochs) {
        self.offline();
        lock(&epochs.members).retain(|member| !Arc::ptr_eq(member, &self.announced));
    }
}

/// Waits a little for another thread, longer as `turns` grow.
fn relax(turns: &mut u32) {
    *turns = turns.saturating_add(1);
    if cfg!(loom) || *turns > 64 {
        // That thread may need this processor.
        yield_now();
    } else {
        std::hint::spin_loop();
    }
}
