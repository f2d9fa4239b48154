//! Wakes workers when an injected delay is over.

use kickless_io::Waker;
use kickless_sync::lock;
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Instant;

/// A thread that wakes workers. It is stopped when this is dropped.
#[derive(Debug)]
pub(super) struct Timer {
    shared: Arc<TimerShared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct TimerShared {
    plan: Mutex<Plan>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Plan {
    /// The wakers by time, and a number that tells equal times apart.
    due: BTreeMap<(Instant, u64), Waker>,
    next: u64,
    stop: bool,
}

impl TimerShared {
    fn run(&self) {
        let mut plan = lock(&self.plan);
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
        let shared = Arc::new(TimerShared::default());
        let theirs = shared.clone();
        let thread = Builder::new().name("fault-timer".into()).spawn(move || theirs.run())?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Wakes at this time, or a little later.
    pub(super) fn wake_at(&self, due: Instant, waker: &Waker) {
        let mut plan = lock(&self.shared.plan);
        let number = plan.next;
        plan.next += 1;
        plan.due.insert((due, number), waker.clone());
        self.shared.changed.notify_one();
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        lock(&self.shared.plan).stop = true;
        self.shared.changed.notify_one();
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;
    use std::time::Duration;

    /// Two of the wakers are due at the same moment.
    #[test]
    fn wakes_each_and_ends() {
        let timer = Timer::start().unwrap();
        let wakers = [Waker::new().unwrap(), Waker::new().unwrap(), Waker::new().unwrap()];
        let (now, millis) = (Instant::now(), Duration::from_millis);
        timer.wake_at(now + millis(60_000), &wakers[0]);
        wakers[1..].iter().for_each(|waker| timer.wake_at(now + millis(20), waker));
        let limit = now + millis(30_000);
        for waker in &wakers[1..] {
            while !waker.clear() {
                assert!(Instant::now() < limit, "the worker is not woken");
                thread::sleep(millis(1));
            }
        }
        assert!(!wakers[0].clear());
        let shared = timer.shared.clone();
        drop(timer);
        assert_eq!(Arc::strong_count(&shared), 1, "the thread is left behind");
    }
}
