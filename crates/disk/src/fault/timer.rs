//! Waking workers when an injected delay is over.

use kickless_io::Waker;
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Instant;

/// A thread that wakes. It ends with this.
#[derive(Debug)]
pub(super) struct Timer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    plan: Mutex<Plan>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Plan {
    /// By time, and a number that tells two of the same time apart.
    due: BTreeMap<(Instant, u64), Waker>,
    next: u64,
    stop: bool,
}

impl Shared {
    fn plan(&self) -> MutexGuard<'_, Plan> {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut plan = self.plan();
        while !plan.stop {
            let now = Instant::now();
            let first = plan.due.first_entry().map(|first| (first.key().0, first));
            plan = match first {
                Some((due, first)) if due <= now => {
                    first.remove().wake();
                    continue;
                }
                Some((due, _)) => {
                    let wait = self.changed.wait_timeout(plan, due - now);
                    wait.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.changed.wait(plan).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }
}

impl Timer {
    pub(super) fn start() -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let theirs = shared.clone();
        let thread = Builder::new().name("fault-timer".into()).spawn(move || theirs.run())?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Wakes at this time, or a little later.
    pub(super) fn wake_at(&self, due: Instant, waker: &Waker) {
        let mut plan = self.shared.plan();
        let number = plan.next;
        plan.next += 1;
        plan.due.insert((due, number), waker.clone());
        self.shared.changed.notify_one();
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        self.shared.plan().stop = true;
        self.shared.changed.notify_one();
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
