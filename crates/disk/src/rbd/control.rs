//! The thread that makes the calls that wait for the cluster, and those who wait for it no longer than they want.

use crate::lock::LockError;
use kickless_io::Waker;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What has to wait for the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Job {
    /// Finds out whether somebody else uses the image.
    Check,
    /// Takes the image's lock.
    Acquire,
    /// Gives it back.
    Release,
    /// Forgets what was read before.
    Forget,
    /// Has all that was written on stable storage.
    Flush,
}

/// How a job ended.
pub(super) type Outcome = Result<(), LockError>;

/// What the thread shares with those who want something of it. Nothing is locked inside.
#[derive(Debug)]
pub(super) struct Control {
    state: Mutex<ControlState>,
    changed: Condvar,
    /// Bytes of the image, as was heard last.
    size: AtomicU64,
    /// Signalled when that has changed.
    resized: Waker,
}

#[derive(Debug, Default)]
struct ControlState {
    /// Somebody waits for a job. Whoever comes next waits for that.
    taken: bool,
    /// What is to be done next, and its number.
    asked: Option<(Job, u64)>,
    /// How that ended which somebody has waited for.
    done: Option<(Outcome, u64)>,
    next: u64,
    /// The lock is to be given back, and nobody waits for that.
    release: bool,
    /// The size may be another.
    look: bool,
    end: bool,
    ended: bool,
}

/// What the thread does.
enum Step {
    Do(Job, u64),
    Release,
    Look,
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

    /// Has something done; `None` when that takes longer. It goes on then, but a lock that is taken so late is given back.
    pub(super) fn ask(&self, job: Job, within: Duration) -> Option<Outcome> {
        let deadline = Instant::now() + within;
        let Some(mut state) = self.wait(self.lock(), deadline, |state| !state.taken) else {
            self.give_up(job, false);
            return None;
        };
        let number = state.next;
        state.next += 1;
        (state.taken, state.asked) = (true, Some((job, number)));
        self.changed.notify_all();
        let is_done = |state: &ControlState| matches!(state.done, Some((_, done)) if done == number);
        match self.wait(state, deadline, is_done) {
            Some(mut state) => {
                state.taken = false;
                self.changed.notify_all();
                state.done.take().map(|(outcome, _)| outcome)
            }
            None => {
                self.give_up(job, true);
                None
            }
        }
    }

    /// Waits until something is so; `None` if it is not so in time.
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

    /// Nobody waits for this job any more, which may have been `asked` for.
    fn give_up(&self, job: Job, asked: bool) {
        let mut state = self.lock();
        if asked {
            (state.taken, state.asked) = (false, None);
        }
        // What comes out of it comes before whatever is asked next.
        state.release |= job == Job::Release || (asked && job == Job::Acquire);
        self.changed.notify_all();
    }

    /// The image has changed: its size may have.
    pub(super) fn image_changed(&self) {
        self.lock().look = true;
        self.changed.notify_all();
    }

    /// Bytes of the image, as far as is known.
    pub(super) fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    pub(super) fn set_size(&self, size: u64) {
        self.size.store(size, Ordering::Relaxed);
    }

    /// Signalled when the size has become another.
    pub(super) fn resized(&self) -> &Waker {
        &self.resized
    }

    /// Has the thread close the image and end; whether it has within this time.
    pub(super) fn end(&self, within: Duration) -> bool {
        let mut state = self.lock();
        state.end = true;
        self.changed.notify_all();
        self.wait(state, Instant::now() + within, |state| state.ended).is_some()
    }

    /// The thread's work, until it is told to end: `perform` does a job, `size` asks for the size of the image.
    pub(super) fn run(
        &self,
        mut perform: impl FnMut(Job) -> Outcome,
        mut size: impl FnMut() -> io::Result<u64>,
    ) {
        loop {
            let (mut done, mut look) = (None, false);
            match self.next() {
                Step::Do(job, number) => {
                    let outcome = perform(job);
                    if let Err(error) = &outcome {
                        tracing::debug!(?job, %error, "the Ceph cluster refuses");
                    }
                    done = Some((outcome, number));
                    // Another client may have changed it while nobody here looked.
                    look = matches!(job, Job::Acquire | Job::Forget);
                }
                Step::Release => {
                    if let Err(error) = perform(Job::Release) {
                        tracing::warn!(%error, "the lock of a Ceph image cannot be given back");
                    }
                }
                Step::Look => match size() {
                    Ok(size) if self.size.swap(size, Ordering::Relaxed) != size => self.resized.wake(),
                    Ok(_) => {}
                    Err(error) => tracing::warn!(%error, "the size of a Ceph image cannot be found out"),
                },
                Step::End => return,
            }
            let mut state = self.lock();
            state.look |= look;
            if done.is_some() {
                state.done = done;
            }
            drop(state);
            self.changed.notify_all();
        }
    }

    /// The thread has closed the image.
    pub(super) fn closed(&self) {
        self.lock().ended = true;
        self.changed.notify_all();
    }

    /// Waits for something to do.
    fn next(&self) -> Step {
        let mut state = self.lock();
        loop {
            let step = if std::mem::take(&mut state.release) {
                Some(Step::Release)
            } else if let Some((job, number)) = state.asked.take() {
                Some(Step::Do(job, number))
            } else if state.end {
                Some(Step::End)
            } else if std::mem::take(&mut state.look) {
                Some(Step::Look)
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

    /// Has the thread end, whatever becomes of the test.
    struct Ends<'a>(&'a Control);

    impl Drop for Ends<'_> {
        fn drop(&mut self) {
            self.0.end(Duration::ZERO);
        }
    }

    /// Runs `check` beside the thread, with what tells which job has begun, and what lets one that is `held` go on.
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

    /// Asks for a job that is held, until it has begun before who asked has given up.
    fn begin(control: &Control, begun: &Receiver<Job>, held: Job) {
        let mut patience = SHORT;
        while !begun.try_iter().any(|job| job == held) {
            assert!(control.ask(held, patience).is_none());
            patience *= 2;
        }
    }

    /// Waits until the size is the one that the thread finds.
    fn hears_of_512(control: &Control) {
        let deadline = Instant::now() + LONG;
        while !control.resized().clear() {
            assert!(Instant::now() < deadline, "nobody tells");
            thread::yield_now();
        }
        assert_eq!(control.size(), 512);
    }

    #[test]
    fn what_is_asked_is_done() {
        with_thread(Job::Flush, |control, begun, go_on| {
            go_on.send(()).unwrap();
            assert!(control.ask(Job::Flush, LONG).unwrap().is_ok());
            assert_eq!(begun.recv(), Ok(Job::Flush));
            control.image_changed();
            hears_of_512(control);
        });
    }

    /// Another client may have changed it.
    #[test]
    fn the_size_is_looked_at_by_who_takes_an_image_over() {
        for job in [Job::Acquire, Job::Forget] {
            with_thread(Job::Flush, |control, _, _| {
                assert!(control.ask(job, LONG).unwrap().is_ok());
                hears_of_512(control);
            });
        }
    }

    #[test]
    fn a_lock_that_comes_too_late_is_given_back() {
        with_thread(Job::Acquire, |control, begun, go_on| {
            begin(control, begun, Job::Acquire);
            // Nor is there an end to what may be asked meanwhile.
            assert!(control.ask(Job::Flush, SHORT).is_none());
            (0..2).for_each(|_| go_on.send(()).unwrap());
            assert!(control.ask(Job::Acquire, LONG).unwrap().is_ok());
            let op: Vec<_> = begun.try_iter().collect();
            assert_eq!(op, [Job::Release, Job::Acquire]);
        });
    }

    #[test]
    fn several_wait_for_one_another() {
        with_thread(Job::Flush, |control, begun, go_on| {
            begin(control, begun, Job::Flush);
            thread::scope(|scope| {
                let callers = [(); 8].map(|()| scope.spawn(|| control.ask(Job::Check, LONG)));
                go_on.send(()).unwrap();
                assert!(callers.map(|caller| caller.join().unwrap()).iter().all(Option::is_some));
            });
            assert_eq!(begun.try_iter().filter(|job| *job == Job::Check).count(), 8);
        });
    }

    /// Whose turn does not come gives back the lock that there is, and none that others take.
    #[test]
    fn who_has_no_turn_gives_up_too() {
        with_thread(Job::Flush, |control, begun, go_on| {
            begin(control, begun, Job::Flush);
            thread::scope(|scope| {
                let first = scope.spawn(|| control.ask(Job::Check, LONG));
                while !control.lock().taken {
                    thread::yield_now();
                }
                assert!(control.ask(Job::Acquire, SHORT).is_none() && !control.lock().release);
                assert!(control.ask(Job::Release, SHORT).is_none());
                go_on.send(()).unwrap();
                assert!(first.join().unwrap().is_some());
            });
            assert_eq!(begun.try_iter().collect::<Vec<_>>(), [Job::Release, Job::Check]);
        });
    }

    /// The thread may be late as well.
    #[test]
    fn what_nobody_waits_for_any_more_is_not_begun() {
        let (control, mut done) = (Control::new().unwrap(), Vec::new());
        assert!(control.ask(Job::Acquire, SHORT).is_none());
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
    fn a_lock_is_given_back_whoever_waits_for_that() {
        with_thread(Job::Flush, |control, begun, go_on| {
            begin(control, begun, Job::Flush);
            assert!(control.ask(Job::Release, SHORT).is_none());
            go_on.send(()).unwrap();
            assert_eq!(begun.recv(), Ok(Job::Release));
        });
    }
}
