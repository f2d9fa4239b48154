//! The thread for calls that wait for the cluster. Its callers wait only for a limited time.

use crate::lock::LockError;
use kickless_io::Waker;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The calls that wait for the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Job {
    /// Checks whether another client uses the image.
    Check,
    /// Takes the image's lock.
    Acquire,
    /// Releases the lock.
    Release,
    /// Discards all cached data.
    Invalidate,
    /// Writes everything to stable storage.
    Flush,
}

/// The result of a job.
pub(super) type Outcome = Result<(), LockError>;

/// The state that the thread shares with its callers. No other lock is taken under its lock.
#[derive(Debug)]
pub(super) struct Control {
    state: Mutex<ControlState>,
    changed: Condvar,
    /// The last known size of the image in bytes.
    size: AtomicU64,
    /// Signalled when the size has changed.
    resized: Waker,
}

#[derive(Debug, Default)]
struct ControlState {
    /// A caller waits for a job. The next caller waits for the first one.
    has_caller: bool,
    /// The next job, and its number.
    requested: Option<(Job, u64)>,
    /// The result of the job that a caller waits for, and its number.
    done: Option<(Outcome, u64)>,
    next: u64,
    /// The lock must be released, and no caller waits for that.
    release: bool,
    /// The size may have changed.
    read_size: bool,
    end: bool,
    ended: bool,
}

/// The next action of the thread.
enum ControlStep {
    Do(Job, u64),
    Release,
    ReadSize,
    End,
}

impl Control {
    pub(super) fn new() -> io::Result<Self> {
        let (state, changed) = (Mutex::default(), Condvar::new());
        Ok(Self { state, changed, size: AtomicU64::new(0), resized: Waker::new()? })
    }

    fn lock(&self) -> MutexGuard<'_, ControlState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the thread run a job. Returns `None` if it takes longer than `within`. The job continues then,
    /// but a lock that is acquired too late is released.
    pub(super) fn request(&self, job: Job, within: Duration) -> Option<Outcome> {
        let deadline = Instant::now() + within;
        let Some(mut state) = self.wait(self.lock(), deadline, |state| !state.has_caller) else {
            self.give_up(job, false);
            return None;
        };
        let number = state.next;
        state.next += 1;
        (state.has_caller, state.requested) = (true, Some((job, number)));
        self.changed.notify_all();
        let is_done = |state: &ControlState| matches!(state.done, Some((_, done)) if done == number);
        match self.wait(state, deadline, is_done) {
            Some(mut state) => {
                state.has_caller = false;
                self.changed.notify_all();
                state.done.take().map(|(outcome, _)| outcome)
            }
            None => {
                self.give_up(job, true);
                None
            }
        }
    }

    /// Waits for a condition. Returns `None` if it is not true in time.
    fn wait<'a>(
        &self,
        mut state: MutexGuard<'a, ControlState>,
        deadline: Instant,
        is_so: impl Fn(&ControlState) -> bool,
    ) -> Option<MutexGuard<'a, ControlState>> {
        while !is_so(&state) {
            let left = deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())?;
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Some(state)
    }

    /// Gives up the wait for a job. `requested`: the job was passed to the thread.
    fn give_up(&self, job: Job, requested: bool) {
        let mut state = self.lock();
        if requested {
            (state.has_caller, state.requested) = (false, None);
        }
        // The release comes before the next job.
        state.release |= job == Job::Release || (requested && job == Job::Acquire);
        self.changed.notify_all();
    }

    /// Records that the image has changed, perhaps in size.
    pub(super) fn image_changed(&self) {
        self.lock().read_size = true;
        self.changed.notify_all();
    }

    /// Returns the last known size of the image in bytes.
    pub(super) fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    pub(super) fn set_size(&self, size: u64) {
        self.size.store(size, Ordering::Relaxed);
    }

    /// Returns the waker that is signalled when the size has changed.
    pub(super) fn resized(&self) -> &Waker {
        &self.resized
    }

    /// Closes the image and stops the thread. Returns whether that happened in time.
    pub(super) fn end(&self, within: Duration) -> bool {
        let mut state = self.lock();
        state.end = true;
        self.changed.notify_all();
        self.wait(state, Instant::now() + within, |state| state.ended).is_some()
    }

    /// Runs the thread until it must stop. `perform` runs a job; `size` reads the size of the image.
    pub(super) fn run(
        &self,
        mut perform: impl FnMut(Job) -> Outcome,
        mut size: impl FnMut() -> io::Result<u64>,
    ) {
        loop {
            let (mut done, mut read_size) = (None, false);
            match self.next() {
                ControlStep::Do(job, number) => {
                    let outcome = perform(job);
                    if let Err(error) = &outcome {
                        tracing::debug!(?job, %error, "the Ceph cluster refuses");
                    }
                    done = Some((outcome, number));
                    // Another client may have changed the image before.
                    read_size = matches!(job, Job::Acquire | Job::Invalidate);
                }
                ControlStep::Release => {
                    if let Err(error) = perform(Job::Release) {
                        tracing::warn!(%error, "the lock of a Ceph image cannot be released");
                    }
                }
                ControlStep::ReadSize => match size() {
                    Ok(size) if self.size.swap(size, Ordering::Relaxed) != size => self.resized.wake(),
                    Ok(_) => {}
                    Err(error) => tracing::warn!(%error, "the size of a Ceph image cannot be read"),
                },
                ControlStep::End => return,
            }
            let mut state = self.lock();
            state.read_size |= read_size;
            if done.is_some() {
                state.done = done;
            }
            drop(state);
            self.changed.notify_all();
        }
    }

    /// Records that the thread has closed the image.
    pub(super) fn closed(&self) {
        self.lock().ended = true;
        self.changed.notify_all();
    }

    /// Waits for the next action.
    fn next(&self) -> ControlStep {
        let mut state = self.lock();
        loop {
            let step = if std::mem::take(&mut state.release) {
                Some(ControlStep::Release)
            } else if let Some((job, number)) = state.requested.take() {
                Some(ControlStep::Do(job, number))
            } else if state.end {
                Some(ControlStep::End)
            } else if std::mem::take(&mut state.read_size) {
                Some(ControlStep::ReadSize)
            } else {
                None
            };
            if let Some(step) = step {
                return step;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::thread;

    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(1);

    /// Stops the thread even if the test fails.
    struct Ends<'a>(&'a Control);

    impl Drop for Ends<'_> {
        fn drop(&mut self) {
            self.0.end(Duration::ZERO);
        }
    }

    /// Runs `check` together with the thread. The receiver gets each job that begins; the sender lets a
    /// `held` job go on.
    fn with_thread(held: Job, check: impl FnOnce(&Control, &Receiver<Job>, &Sender<()>)) {
        let control = &Control::new().unwrap();
        let ((tell, begun), (go_on, wait)) = (channel(), channel());
        thread::scope(|scope| {
            let (go_on, _ends) = (go_on, Ends(control));
            scope.spawn(move || {
                let perform = |job| {
                    tell.send(job).unwrap();
                    if job == held {
                        let _ = wait.recv();
                    }
                    Ok(())
                };
                control.run(perform, || Ok(512));
                control.closed();
            });
            check(control, &begun, &go_on);
            drop(go_on);
            assert!(control.end(LONG));
        });
    }

    /// Requests the job `held` until the thread has begun it and the caller has given up.
    fn begin(control: &Control, begun: &Receiver<Job>, held: Job) {
        let mut wait = SHORT;
        while !begun.try_iter().any(|job| job == held) {
            assert!(control.request(held, wait).is_none());
            wait *= 2;
        }
    }

    /// Waits until the size is the one that the thread finds.
    fn wait_for_size_512(control: &Control) {
        let deadline = Instant::now() + LONG;
        while !control.resized().clear() {
            assert!(Instant::now() < deadline, "the new size is not announced");
            thread::yield_now();
        }
        assert_eq!(control.size(), 512);
    }

    #[test]
    fn requested_jobs_are_done() {
        with_thread(Job::Flush, |control, begun, go_on| {
            go_on.send(()).unwrap();
            assert!(control.request(Job::Flush, LONG).unwrap().is_ok());
            assert_eq!(begun.recv(), Ok(Job::Flush));
            control.image_changed();
            wait_for_size_512(control);
        });
    }

    /// Another client may have changed the image.
    #[test]
    fn the_size_is_read_after_acquire_and_invalidate() {
        for job in [Job::Acquire, Job::Invalidate] {
            with_thread(Job::Flush, |control, _, _| {
                assert!(control.request(job, LONG).unwrap().is_ok());
                wait_for_size_512(control);
            });
        }
    }

    #[test]
    fn a_lock_that_comes_too_late_is_released() {
        with_thread(Job::Acquire, |control, begun, go_on| {
            begin(control, begun, Job::Acquire);
            // Further jobs have a time limit too.
            assert!(control.request(Job::Flush, SHORT).is_none());
            (0..2).for_each(|_| go_on.send(()).unwrap());
            assert!(control.request(Job::Acquire, LONG).unwrap().is_ok());
            let op: Vec<_> = begun.try_iter().collect();
            assert_eq!(op, [Job::Release, Job::Acquire]);
        });
    }

    #[test]
    fn callers_wait_for_one_another() {
        with_thread(Job::Flush, |control, begun, go_on| {
            begin(control, begun, Job::Flush);
            thread::scope(|scope| {
                let callers = [(); 8].map(|()| scope.spawn(|| control.request(Job::Check, LONG)));
                go_on.send(()).unwrap();
                assert!(callers.map(|caller| caller.join().unwrap()).iter().all(Option::is_some));
            });
            assert_eq!(begun.try_iter().filter(|job| *job == Job::Check).count(), 8);
        });
    }

    /// A caller that never got its turn releases the lock that exists, and does not affect a later one.
    #[test]
    fn a_caller_without_a_turn_gives_up_too() {
        with_thread(Job::Flush, |control, begun, go_on| {
            begin(control, begun, Job::Flush);
            thread::scope(|scope| {
                let first = scope.spawn(|| control.request(Job::Check, LONG));
                while !control.lock().has_caller {
                    thread::yield_now();
                }
                assert!(control.request(Job::Acquire, SHORT).is_none() && !control.lock().release);
                assert!(control.request(Job::Release, SHORT).is_none());
                go_on.send(()).unwrap();
                assert!(first.join().unwrap().is_some());
            });
            assert_eq!(begun.try_iter().collect::<Vec<_>>(), [Job::Release, Job::Check]);
        });
    }

    /// The thread may start late.
    #[test]
    fn an_abandoned_job_does_not_begin() {
        let (control, mut done) = (Control::new().unwrap(), Vec::new());
        assert!(control.request(Job::Acquire, SHORT).is_none());
        assert!(!control.end(Duration::ZERO));
        control.run(
            |job| {
                done.push(job);
                Ok(())
            },
            || Ok(512),
        );
        assert_eq!(done, [Job::Release]);
    }

    #[test]
    fn an_abandoned_release_still_happens() {
        with_thread(Job::Flush, |control, begun, go_on| {
            begin(control, begun, Job::Flush);
            assert!(control.request(Job::Release, SHORT).is_none());
            go_on.send(()).unwrap();
            assert_eq!(begun.recv(), Ok(Job::Release));
        });
    }
}
