//! Quiescent points: they tell a thread that other threads no longer use what they saw.
//!
//! A member's *section* is the time between two of its quiescent points. A member uses the results of a
//! lookup (a leaf, a cached translation, a pointer to a bitmap) only within the section of the lookup. A
//! thread that removes something removes it first, and then calls [`Epochs::wait`]. That returns when all
//! sections that began before the call have ended. Members never wait.
//!
//! # Memory orders
//! * `current` counts the waits. A wait adds one (release). A member loads it (acquire) at each quiescent
//!   point. If it has changed, the member empties its cache and announces the number that it saw (release).
//!   So quiescent points between two waits store nothing.
//! * A member's accesses in a section come before its announcement (release), which the waiter loads
//!   (acquire). So the member's stores to guest memory have happened when the wait is over.
//! * The removal comes before the count (release), which the member loads (acquire) before its next section.
//!   So the member does not see the removed thing any more. The number also serves as the generation of the
//!   caches: a cache of an older generation is emptied.
//! * A long wait asks running members, again and again, to pause at their next quiescent point
//!   (`long_waits`). The member that it waits for may share their processor. Without the pause, that member
//!   would run only when the scheduler switches, milliseconds later for each.
//! * A sleeping member is *offline*, and waits ignore it. This is the only place where two threads each store
//!   a word and then load the other's word. The member announces that it is online, and then looks things up.
//!   The waiter has removed things, and then checks which members are online. Each has a fence between the
//!   two steps ([`Member::online`], [`Epochs::wait`]), so that at least one of them sees the other's store.

use kickless_sync::atomic::{AtomicU64, Ordering, fence};
use kickless_sync::{Mutex, lock, yield_now};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// The announcement of an offline member. The count begins after it.
const OFFLINE: u64 = 0;

/// Puts a value on cache lines of its own. Processors fetch two lines at a time.
#[repr(align(128))]
struct CacheAligned<T>(T);

/// Polls between two requests to pause. A wait is long from the first request on.
const POLLS_PER_REQUEST: u32 = 128;
/// Requests of one wait. A member that is still in its section afterwards is not delayed by other members.
const REQUESTS_MAX: u32 = 256;
/// Length of a member's pause, and of the sleep between two polls after the last request.
const PAUSE: Duration = Duration::from_micros(100);

/// The count of waits, and the members.
pub(crate) struct Epochs {
    current: CacheAligned<AtomicU64>,
    /// Number of long waits at the moment.
    long_waits: AtomicU64,
    members: Mutex<Vec<Arc<CacheAligned<AtomicU64>>>>,
}

impl Epochs {
    pub(crate) fn new() -> Self {
        Self {
            current: CacheAligned(AtomicU64::new(OFFLINE + 1)),
            long_waits: AtomicU64::new(0),
            members: Mutex::new(Vec::new()),
        }
    }

    /// Waits until every section that began before this call has ended.
    pub(crate) fn wait(&self) {
        let target = self.current.0.fetch_add(1, Ordering::AcqRel) + 1;
        // Partner: the fence in `Member::online`.
        fence(Ordering::SeqCst);
        // A member that joins later was not online before. The lock orders its lookups after the removal.
        let members = lock(&self.members).clone();
        let mut polls = 0;
        for member in members {
            loop {
                let announced = member.0.load(Ordering::Acquire);
                if announced == OFFLINE || announced >= target {
                    break;
                }
                back_off(&mut polls);
                if !cfg!(loom) && polls.is_multiple_of(POLLS_PER_REQUEST) {
                    self.request_pause(polls / POLLS_PER_REQUEST);
                }
            }
        }
        if !cfg!(loom) && (POLLS_PER_REQUEST..POLLS_PER_REQUEST * REQUESTS_MAX).contains(&polls) {
            self.long_waits.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Asks the members to pause. Sleeps if they were asked often enough.
    #[cold]
    fn request_pause(&self, requests: u32) {
        if requests == 1 {
            self.long_waits.fetch_add(1, Ordering::Relaxed);
        } else if requests == REQUESTS_MAX {
            self.long_waits.fetch_sub(1, Ordering::Relaxed);
        }
        if requests < REQUESTS_MAX {
            // Counts up, so that members that have already announced the awaited number check again.
            self.current.0.fetch_add(1, Ordering::AcqRel);
        } else {
            thread::sleep(PAUSE);
        }
    }

    /// Pauses a member at a quiescent point, if a wait asks for it.
    #[cold]
    fn pause_if_requested(&self) {
        if !cfg!(loom) && self.long_waits.load(Ordering::Relaxed) != 0 {
            // A yield is not enough: the scheduler may prefer the running thread.
            thread::sleep(PAUSE);
        }
    }
}

/// A thread for which waits wait. It is offline at first.
pub(crate) struct Member {
    announced: Arc<CacheAligned<AtomicU64>>,
    /// Its last announcement while it was online, which is the generation of its cache.
    seen: u64,
}

impl Member {
    pub(crate) fn join(epochs: &Epochs) -> Self {
        let announced = Arc::new(CacheAligned(AtomicU64::new(OFFLINE)));
        lock(&epochs.members).push(announced.clone());
        Self { announced, seen: OFFLINE }
    }

    /// Ends a section and begins another. Returns whether the cache must be emptied.
    #[inline]
    pub(crate) fn quiesce(&mut self, epochs: &Epochs) -> bool {
        let current = epochs.current.0.load(Ordering::Acquire);
        // Offline here means that the guard was leaked. The member comes online at its next lookup.
        if current == self.seen || self.is_offline() {
            return false;
        }
        self.announced.0.store(current, Ordering::Release);
        self.seen = current;
        epochs.pause_if_requested();
        true
    }

    /// Begins a section. Returns whether the cache must be emptied.
    pub(crate) fn online(&mut self, epochs: &Epochs) -> bool {
        // Release: as with any announcement, a waiter that finds this number relies on the end of the section
        // before the sleep.
        self.announced.0.store(epochs.current.0.load(Ordering::Relaxed), Ordering::Release);
        // Partner: the fence in `Epochs::wait`.
        fence(Ordering::SeqCst);
        // Loaded only now: a wait that saw this member offline has counted before.
        let current = epochs.current.0.load(Ordering::Acquire);
        self.announced.0.store(current, Ordering::Release);
        std::mem::replace(&mut self.seen, current) != current
    }

    /// Returns whether the member is in no section.
    pub(crate) fn is_offline(&self) -> bool {
        self.announced.0.load(Ordering::Relaxed) == OFFLINE
    }

    /// Ends a section.
    pub(crate) fn offline(&mut self) {
        self.announced.0.store(OFFLINE, Ordering::Release);
    }

    /// Ends the last section.
    pub(crate) fn leave(&mut self, epochs: &Epochs) {
        self.offline();
        lock(&epochs.members).retain(|member| !Arc::ptr_eq(member, &self.announced));
    }
}

/// Waits a little for another thread, and longer with more `polls`.
fn back_off(polls: &mut u32) {
    *polls = polls.saturating_add(1);
    if cfg!(loom) || *polls > 64 {
        // The other thread may need this processor.
        yield_now();
    } else {
        std::hint::spin_loop();
    }
}
