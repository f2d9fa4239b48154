//! The thread for calls that wait for the cluster. Its callers wait only for a limited time.

use crate::lock::LockError;
use kickless_io::Waker;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SendError, Sender, SyncSender, channel, sync_channel};
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

/// Passes jobs to the thread. The thread does them one after the other.
#[derive(Debug)]
pub(super) struct Control {
    messages: Sender<Message>,
    /// A message to read the size waits.
    reads_size: AtomicBool,
    /// The last known size of the image in bytes.
    size: AtomicU64,
    /// Signalled when the size has changed.
    resized: Waker,
}

/// A message to the thread.
#[derive(Debug)]
pub(super) enum Message {
    /// Do a job for a caller that waits until the deadline. The channel has no room, so the thread learns
    /// whether the caller has taken the outcome.
    Do(Job, Instant, SyncSender<Outcome>),
    /// The size may have changed.
    ReadSize,
    /// Close the image, and then drop the sender.
    End(SyncSender<()>),
}

impl Control {
    /// Also returns the messages, for [`Control::run`].
    pub(super) fn new() -> io::Result<(Self, Receiver<Message>)> {
        let (messages, receiver) = channel();
        let (reads_size, size) = (AtomicBool::new(false), AtomicU64::new(0));
        Ok((Self { messages, reads_size, size, resized: Waker::new()? }, receiver))
    }

    /// Has the thread run a job. Returns `None` if it takes longer than `within`. A job that has begun then
    /// continues, but a lock that is acquired too late is released. Of the jobs that have not begun, only a
    /// release still happens.
    pub(super) fn request(&self, job: Job, within: Duration) -> Option<Outcome> {
        let (caller, outcome) = sync_channel(0);
        self.messages.send(Message::Do(job, Instant::now() + within, caller)).ok()?;
        outcome.recv_timeout(within).ok()
    }

    /// Records that the image has changed, perhaps in size.
    pub(super) fn image_changed(&self) {
        if !self.reads_size.swap(true, Ordering::AcqRel) {
            // Without a thread, nothing uses the size.
            let _ = self.messages.send(Message::ReadSize);
        }
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
        let (closing, closed) = sync_channel(0);
        let _ = self.messages.send(Message::End(closing));
        closed.recv_timeout(within) == Err(RecvTimeoutError::Disconnected)
    }

    /// Runs the thread until it must stop. `perform` runs a job; `size` reads the size of the image. Returns
    /// the sender to drop when the image is closed.
    pub(super) fn run(
        &self,
        messages: &Receiver<Message>,
        mut perform: impl FnMut(Job) -> Outcome,
        mut size: impl FnMut() -> io::Result<u64>,
    ) -> Option<SyncSender<()>> {
        for message in messages {
            match message {
                // The caller has given up.
                Message::Do(job, deadline, _) if job != Job::Release && Instant::now() >= deadline => {}
                Message::Do(job, _, caller) => {
                    let outcome = perform(job);
                    if let Err(error) = &outcome {
                        tracing::debug!(?job, %error, "the Ceph cluster refuses");
                    }
                    let released = match (job, caller.send(outcome)) {
                        (Job::Acquire, Err(_)) => perform(Job::Release),
                        (Job::Release, Err(SendError(late))) => late,
                        _ => Ok(()),
                    };
                    if let Err(error) = released {
                        tracing::warn!(%error, "the lock of a Ceph image cannot be released");
                    }
                    // Another client may have changed the image before.
                    if matches!(job, Job::Acquire | Job::Invalidate) {
                        self.image_changed();
                    }
                }
                Message::ReadSize => {
                    // Before the look: a later change sends another message.
                    self.reads_size.swap(false, Ordering::AcqRel);
                    match size() {
                        Ok(size) if self.size.swap(size, Ordering::Relaxed) != size => self.resized.wake(),
                        Ok(_) => {}
                        Err(error) => tracing::warn!(%error, "the size of a Ceph image cannot be read"),
                    }
                }
                Message::End(closing) => return Some(closing),
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
        let (control, messages) = Control::new().unwrap();
        let (control, messages) = (&control, messages);
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
                drop(control.run(&messages, perform, || Ok(512)));
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

    /// A caller that gives up before its job begins does not affect a later one.
    #[test]
    fn of_jobs_that_have_not_begun_only_a_release_happens_without_a_caller() {
        with_thread(Job::Flush, |control, begun, go_on| {
            begin(control, begun, Job::Flush);
            for job in [Job::Acquire, Job::Release, Job::Invalidate] {
                assert!(control.request(job, SHORT).is_none());
            }
            go_on.send(()).unwrap();
            assert!(control.request(Job::Check, LONG).unwrap().is_ok());
            assert_eq!(begun.try_iter().collect::<Vec<_>>(), [Job::Release, Job::Check]);
        });
    }

    /// The thread may start late.
    #[test]
    fn an_abandoned_job_does_not_begin() {
        let (control, messages) = Control::new().unwrap();
        assert!(control.request(Job::Acquire, SHORT).is_none());
        assert!(!control.end(Duration::ZERO));
        let mut done = Vec::new();
        let perform = |job| {
            done.push(job);
            Ok(())
        };
        assert!(control.run(&messages, perform, || Ok(512)).is_some());
        assert_eq!(done, []);
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
