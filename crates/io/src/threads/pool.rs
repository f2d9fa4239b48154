//! A pool of threads that make calls which wait, one call after the other.
//!
//! # Why the worker never waits
//! The worker's thread makes no call that can wait for a device. No operation goes to the threads that the
//! kernel has for all files together (io_uring's are few, and a frozen file system blocks each that touches
//! it). Calls that wait are made here: flushes, ranges, transfers that the kernel would not do without
//! waiting, and calls of `io_submit` that can wait ([`crate::files::route`]).
//!
//! # Shares
//! Owners share threads as they share slots ([`crate::files::shares`]): [`THREADS_COMMON`] threads for any
//! owner, and [`THREADS_RESERVE`] more for each. A device that hangs occupies no more threads than that. So
//! each other device has at least its own, for any number of devices that hang. There are at most
//! `THREADS_COMMON + owners * THREADS_RESERVE` threads. One starts at once. Each other starts when a job has
//! a place in its owner's share and no thread waits for jobs.
//!
//! Each owner has a queue of its own. A thread serves the owners in turn and skips those that have no place
//! in their share.
//!
//! # Why no job waits beside an idle thread
//! A job can start when its owner has room. A thread *searches* from the moment when it has started, or has
//! done a job, until it takes the next job or sleeps. [`ThreadPool::submit`] wakes or starts a thread for
//! each job that can start and for which no thread searches. It counts a free common thread once for each
//! owner, so it may wake too many threads, but never too few.
//!
//! Later, places come back one at a time, when a thread has done its job. Under one lock that thread returns
//! the place and begins to search. So there are never fewer threads that search, or were woken, than jobs
//! that can start: a thread that takes a job reduces both counts by one, and a thread sleeps only if no job
//! can start.
//!
//! The host can refuse another thread. Then the jobs wait for the existing threads, and all of these can be
//! with a device that hangs. So the pool remembers that threads are missing ([`ThreadPool::lacks_threads`]),
//! and each turn of the engine tries again, within a millisecond.
//!
//! # The engine waits for a prompt call
//! The engine can wait for a moment until threads have made its calls of `io_submit`
//! ([`ThreadPool::await_calls`], [`crate::threads::submit_wait`]). While it waits, a thread wakes it by a
//! condition variable instead of the event, and only when the last of these calls is done.

use crate::aio::batch::{Batch, Submitted};
use crate::files::shares::Shares;
use crate::threads::blocking::BlockingOp;
use crate::waker::Waker;
use kickless_sync::lock;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

/// The number of threads that any owner can use. They wait for the disk nearly all the time.
const THREADS_COMMON: usize = 16;

/// The number of threads that each owner has for itself. With two, a flush does not wait for the transfer
/// before it.
const THREADS_RESERVE: usize = 2;

/// The stack of a thread, which needs little.
const STACK_BYTES: usize = 128 << 10;

/// A job for a thread.
#[derive(Debug)]
pub(crate) enum Job {
    /// An operation that stays in the engine's slots.
    Op(BlockingOp),
    /// A call of `io_submit` for an owner.
    Submit { owner: u32, batch: Box<Batch> },
}

/// A job that is done.
#[derive(Debug)]
pub(crate) enum Done {
    /// The operation is in its slot.
    Op {
        op_slot: u32,
        result: Result<u32, Errno>,
    },
    Submit(Submitted),
}

impl Job {
    fn owner(&self) -> u32 {
        match self {
            Self::Op(op) => op.owner,
            Self::Submit { owner, .. } => *owner,
        }
    }

    /// Returns the slots of its operations.
    fn op_slots(&self) -> impl Iterator<Item = u32> {
        let (one, batch) = match self {
            Self::Op(op) => (Some(op.op_slot), None),
            Self::Submit { batch, .. } => (None, Some(batch.op_slots())),
        };
        one.into_iter().chain(batch.into_iter().flatten())
    }

    /// Does the job, and waits for it.
    fn perform(self) -> Done {
        match self {
            // The file is released before the engine can learn of the result. So if the engine forgets the
            // file then, it is closed.
            Self::Op(op) => Done::Op { op_slot: op.op_slot, result: op.perform() },
            Self::Submit { owner, mut batch } => {
                let result = batch.submit();
                Done::Submit(Submitted { owner, batch, result })
            }
        }
    }
}

/// Jobs that wait for threads, by owner. Pure.
#[derive(Debug)]
struct Queues {
    jobs: Vec<VecDeque<Job>>,
    /// Owners that have jobs, each once, in the order of their turns.
    turns: VecDeque<u32>,
    /// Places for jobs that threads do.
    shares: Shares,
}

impl Queues {
    fn push(&mut self, job: Job) {
        let owner = job.owner();
        if self.jobs.len() <= owner as usize {
            self.jobs.resize_with(owner as usize + 1, VecDeque::new);
        }
        let jobs = &mut self.jobs[owner as usize];
        if jobs.is_empty() {
            self.turns.push_back(owner);
        }
        jobs.push_back(job);
    }

    /// Takes the next job of an owner that has room, and a place for it.
    fn next(&mut self) -> Option<Job> {
        let at = self.turns.iter().position(|owner| self.shares.room(*owner) > 0)?;
        let owner = self.turns.remove(at)?;
        let jobs = &mut self.jobs[owner as usize];
        let job = jobs.pop_front()?;
        if !jobs.is_empty() {
            self.turns.push_back(owner);
        }
        self.shares.take(owner);
        Some(job)
    }

    /// Takes out jobs that no thread does yet, and that have an operation for which `is_wanted` holds.
    fn take_queued(&mut self, is_wanted: impl Fn(u32) -> bool) -> Vec<Job> {
        let mut taken = Vec::new();
        for jobs in &mut self.jobs {
            let (wanted, kept) = jobs.drain(..).partition(|job| job.op_slots().any(&is_wanted));
            *jobs = kept;
            taken.extend::<VecDeque<Job>>(wanted);
        }
        self.turns.retain(|owner| !self.jobs[*owner as usize].is_empty());
        taken
    }

    /// Returns the number of jobs that can start, or a few more.
    fn startable(&self) -> usize {
        let of = |owner: &u32| self.jobs[*owner as usize].len().min(self.shares.room(*owner));
        self.turns.iter().map(of).sum()
    }
}

#[derive(Debug)]
struct JobState {
    queues: Queues,
    /// The number of threads that sleep until there is a job.
    idle: usize,
    /// The number of threads that will search for a job before they sleep.
    searching: usize,
    stop: bool,
}

/// Jobs that are done and not reaped.
#[derive(Debug, Default)]
struct DoneJobs {
    jobs: Vec<Done>,
    /// The number of calls of `io_submit` among them.
    calls: usize,
    /// The number of these calls for which the engine waits. 0: it does not wait.
    awaited: usize,
    /// The event is readable.
    signalled: bool,
}

/// The state that the threads share with the engine. Lock order: `work` and `done` are never held together.
#[derive(Debug)]
struct PoolShared {
    work: Mutex<JobState>,
    job_ready: Condvar,
    done: Mutex<DoneJobs>,
    /// Signalled when the calls for which the engine waits are done.
    calls_done: Condvar,
    /// Readable while something is in `done`, unless the engine waits for calls and so will check. Changed
    /// under the lock of `done`.
    event: Waker,
}

/// The threads, started when they are needed.
#[derive(Debug)]
pub(crate) struct ThreadPool {
    shared: Arc<PoolShared>,
    threads: Vec<JoinHandle<()>>,
    threads_max: usize,
    /// The host refused a thread that was needed.
    lacks_threads: bool,
}

impl ThreadPool {
    /// Starts the pool with one thread; there is always one. An engine of this depth needs no more common
    /// threads than that.
    pub(crate) fn start(depth: usize, owners: usize) -> io::Result<Self> {
        let shares = Shares::new(depth.clamp(1, THREADS_COMMON), THREADS_RESERVE, owners);
        let threads_max = shares.total();
        let queues = Queues { jobs: Vec::new(), turns: VecDeque::new(), shares };
        let shared = Arc::new(PoolShared {
            work: Mutex::new(JobState { queues, idle: 0, searching: 0, stop: false }),
            job_ready: Condvar::new(),
            done: Mutex::default(),
            calls_done: Condvar::new(),
            event: Waker::new()?,
        });
        let mut pool = Self { shared, threads: Vec::new(), threads_max, lacks_threads: false };
        pool.add_thread()?;
        Ok(pool)
    }

    fn add_thread(&mut self) -> io::Result<()> {
        let shared = self.shared.clone();
        let builder = Builder::new().name(format!("io-{}", self.threads.len())).stack_size(STACK_BYTES);
        lock(&self.shared.work).searching += 1;
        let thread = builder.spawn(move || shared.run());
        self.threads.push(thread.inspect_err(|_| lock(&self.shared.work).searching -= 1)?);
        Ok(())
    }

    pub(crate) fn event(&self) -> BorrowedFd<'_> {
        self.shared.event.as_fd()
    }

    /// Hands over all of `jobs`.
    pub(crate) fn submit(&mut self, jobs: &mut VecDeque<Job>) {
        let (needed, idle) = {
            let mut work = lock(&self.shared.work);
            jobs.drain(..).for_each(|job| work.queues.push(job));
            (work.queues.startable().saturating_sub(work.searching), work.idle)
        };
        for _ in 0..needed.min(idle) {
            self.shared.job_ready.notify_one();
        }
        self.lacks_threads = false;
        for _ in idle..needed.min(self.threads_max) {
            if self.threads.len() == self.threads_max {
                break;
            }
            if self.add_thread().is_err() {
                self.lacks_threads = true;
                break;
            }
        }
    }

    /// Takes back jobs that no thread does yet, and that have an operation for which `is_wanted` holds.
    pub(crate) fn take_queued(&mut self, is_wanted: impl Fn(u32) -> bool) -> Vec<Job> {
        lock(&self.shared.work).queues.take_queued(is_wanted)
    }

    /// Returns whether the host refused a thread for a job that could have started. The next
    /// [`ThreadPool::submit`] tries again.
    pub(crate) fn lacks_threads(&self) -> bool {
        self.lacks_threads
    }

    /// Appends the jobs that are done.
    pub(crate) fn reap(&mut self, into: &mut Vec<Done>) {
        self.take(&mut lock(&self.shared.done), into);
    }

    /// Waits until `calls` calls of `io_submit` are done and not reaped, but no longer than `limit`, and
    /// appends all jobs that are done. Returns whether all of these calls are.
    pub(crate) fn await_calls(&mut self, calls: usize, limit: Duration, into: &mut Vec<Done>) -> bool {
        let mut done = lock(&self.shared.done);
        done.awaited = calls;
        let waiting = |done: &mut DoneJobs| done.calls < done.awaited;
        let (mut done, _) = self
            .shared
            .calls_done
            .wait_timeout_while(done, limit, waiting)
            .unwrap_or_else(PoisonError::into_inner);
        let all = done.calls >= calls;
        done.awaited = 0;
        self.take(&mut done, into);
        all
    }

    fn take(&self, done: &mut DoneJobs, into: &mut Vec<Done>) {
        into.append(&mut done.jobs);
        done.calls = 0;
        if std::mem::take(&mut done.signalled) {
            self.shared.event.clear();
        }
    }

    /// Waits until the threads have done all of their jobs, and ends them.
    pub(crate) fn finish(&mut self) {
        lock(&self.shared.work).stop = true;
        self.shared.job_ready.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
impl ThreadPool {
    /// Takes a place of the owner, like a job that hangs.
    pub(crate) fn occupy(&self, owner: u32) {
        lock(&self.shared.work).queues.shares.take(owner);
    }

    /// Returns that place.
    pub(crate) fn free(&self, owner: u32) {
        lock(&self.shared.work).queues.shares.put_back(owner);
        self.shared.job_ready.notify_all();
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.finish();
    }
}

impl PoolShared {
    fn run(&self) {
        while let Some(job) = self.next() {
            let owner = job.owner();
            let result = job.perform();
            {
                let mut work = lock(&self.work);
                work.queues.shares.put_back(owner);
                work.searching += 1;
            }
            self.finish(result);
        }
    }

    /// Passes a finished job to the engine.
    fn finish(&self, result: Done) {
        let mut done = lock(&self.done);
        done.calls += usize::from(matches!(result, Done::Submit(_)));
        done.jobs.push(result);
        if done.awaited > 0 {
            if done.calls >= done.awaited {
                // The engine takes the lock when it wakes.
                drop(done);
                self.calls_done.notify_one();
            }
        } else if !std::mem::replace(&mut done.signalled, true) {
            self.event.wake();
        }
    }

    /// Waits for a job. Returns `None` when there will be none. This thread searches until it returns or
    /// sleeps.
    fn next(&self) -> Option<Job> {
        let mut work = lock(&self.work);
        work.searching -= 1;
        loop {
            if let Some(job) = work.queues.next() {
                return Some(job);
            }
            // Remaining jobs are done by threads that do others of their owners now.
            if work.stop {
                return None;
            }
            work.idle += 1;
            work = self.job_ready.wait(work).unwrap_or_else(PoisonError::into_inner);
            work.idle -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aio::context::Context;
    use crate::files::Files;
    use crate::operations::in_flight::InFlight;
    use crate::{AlignedBuf, Buffers, Op, OpKind, Owner, RangeSyscall, Token};
    use rustix::event::{PollFd, PollFlags, poll};
    use seccompiler::{
        BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
        SeccompRule,
    };
    use std::fs::File;
    use std::thread;

    fn files() -> Files {
        Files::new(Shares::new(4096, 0, 0))
    }

    fn result(done: &Done) -> Result<u32, Errno> {
        match done {
            Done::Op { result, .. } => *result,
            other => panic!("{other:?}"),
        }
    }

    /// Makes an image and its first operation, in its slot.
    fn op(files: &mut Files, kind: OpKind, offset: u64) -> (Arc<File>, InFlight) {
        let file = Arc::new(tempfile::tempfile().unwrap());
        file.set_len(4096).unwrap();
        let id = files.insert(file.clone(), Owner::unique()).0;
        let buffers = Buffers::Owned(AlignedBuf::new(512, 512).unwrap());
        let held = files.hold(id).unwrap();
        (file, InFlight::new(Token::default(), held, Op { file: id, kind, offset, buffers }, false))
    }

    fn blocking(files: &Files, operation: &mut InFlight) -> BlockingOp {
        BlockingOp::of(0, operation, files).unwrap()
    }

    /// Makes this many reads, in their slots.
    fn reads(files: &mut Files, count: usize) -> Vec<InFlight> {
        (0..count).map(|_| op(files, OpKind::Read, 0).1).collect()
    }

    fn jobs(files: &Files, slots: &mut [InFlight]) -> VecDeque<Job> {
        slots.iter_mut().map(|operation| Job::Op(blocking(files, operation))).collect()
    }

    fn reap(pool: &mut ThreadPool, count: usize) -> Vec<Done> {
        let mut done = Vec::new();
        while done.len() < count {
            let _ = poll(&mut [PollFd::from_borrowed_fd(pool.event(), PollFlags::IN)], None);
            pool.reap(&mut done);
        }
        done
    }

    #[test]
    fn as_many_threads_as_the_depth_and_no_more_than_the_limit() {
        for (depth, threads) in [(0, 1), (1, 1), (2, 2), (1000, THREADS_COMMON)] {
            let mut files = files();
            let mut pool = ThreadPool::start(depth, 0).unwrap();
            let mut slots = reads(&mut files, 100);
            pool.submit(&mut jobs(&files, &mut slots));
            assert_eq!(pool.threads.len(), threads, "of a depth of {depth}");
            assert!(reap(&mut pool, 100).iter().all(|done| result(done) == Ok(512)));
        }
    }

    /// Owners take turns as far as each has room, and one without room delays no other.
    #[test]
    fn owners_are_served_in_turn_within_their_shares() {
        let context = Arc::new(Context::open(1).unwrap());
        let mut queues = Queues { jobs: Vec::new(), turns: VecDeque::new(), shares: Shares::new(1, 1, 2) };
        for owner in [0, 0, 0, 1, 1, 2] {
            queues.push(Job::Submit { owner, batch: Batch::new(context.clone()) });
        }
        let next = |queues: &mut Queues| queues.next().map(|job| job.owner());
        // A third owner has no reserve.
        assert_eq!(queues.startable(), 2 + 2 + 1);
        assert_eq!([(); 4].map(|()| next(&mut queues)), [Some(0), Some(1), Some(2), None]);
        queues.shares.put_back(1);
        assert_eq!([(); 2].map(|()| next(&mut queues)), [Some(1), None]);
        queues.shares.put_back(2);
        assert_eq!([(); 2].map(|()| next(&mut queues)), [Some(0), None]);
        queues.shares.put_back(0);
        assert_eq!([(); 2].map(|()| next(&mut queues)), [Some(0), None]);
        assert_eq!((queues.startable(), queues.turns.len()), (0, 0));
    }

    /// The host refuses a thread. Jobs for it get one as soon as the host allows it, even if nothing else is
    /// submitted.
    #[test]
    fn a_thread_that_the_host_refused_is_started_later() {
        let mut files = files();
        let mut pool = ThreadPool::start(8, 0).unwrap();
        let shared = pool.shared.clone();
        // The only thread stays with its first job.
        let stopped = lock(&shared.done);
        let mut slots = reads(&mut files, 3);
        let mut jobs = jobs(&files, &mut slots);
        thread::scope(|scope| {
            let refused = scope.spawn(|| {
                let calls = [libc::SYS_clone3, libc::SYS_clone].map(|call| (call, vec![]));
                let filter = SeccompFilter::new(
                    calls.into(),
                    SeccompAction::Allow,
                    SeccompAction::Errno(libc::EAGAIN as u32),
                    std::env::consts::ARCH.try_into().unwrap(),
                );
                seccompiler::apply_filter(&BpfProgram::try_from(filter.unwrap()).unwrap()).unwrap();
                pool.submit(&mut jobs);
            });
            refused.join().unwrap();
        });
        assert_eq!((pool.threads.len(), pool.lacks_threads()), (1, true));
        pool.submit(&mut VecDeque::new());
        assert!(pool.threads.len() > 1 && !pool.lacks_threads());
        drop(stopped);
        assert!(reap(&mut pool, 3).iter().all(|done| result(done) == Ok(512)));
    }

    #[test]
    fn a_job_that_is_seen_done_has_let_go_of_its_file() {
        let (mut pool, mut files) = (ThreadPool::start(1, 0).unwrap(), files());
        for _ in 0..2000 {
            let (kept, mut operation) = op(&mut files, OpKind::Flush, 0);
            pool.submit(&mut [Job::Op(blocking(&files, &mut operation))].into());
            reap(&mut pool, 1);
            assert_eq!(Arc::strong_count(&kept), 2, "one here, one in the table");
        }
    }

    /// Offsets of calls are never negative, because -1 means the file's own position.
    #[test]
    fn no_offset_is_negative() {
        for (offset, result) in [(0, Ok(512)), (1 << 63, Err(Errno::INVAL)), (u64::MAX, Err(Errno::INVAL))] {
            let mut files = files();
            let (_, mut operation) = op(&mut files, OpKind::Read, offset);
            assert_eq!(blocking(&files, &mut operation).perform(), result, "{offset}");
        }
    }

    /// Devices are discarded and zeroed by different calls. A thread that may not make one of them shows
    /// which call it is.
    #[test]
    fn a_device_is_discarded_by_one_call_and_zeroed_by_another() {
        let results = |forbidden: u64| {
            let is_it =
                SeccompCondition::new(1, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, forbidden).unwrap();
            let rules = vec![SeccompRule::new(vec![is_it]).unwrap()];
            let filter = SeccompFilter::new(
                [(libc::SYS_ioctl, rules)].into(),
                SeccompAction::Allow,
                SeccompAction::Errno(libc::EDOM as u32),
                std::env::consts::ARCH.try_into().unwrap(),
            );
            seccompiler::apply_filter(&BpfProgram::try_from(filter.unwrap()).unwrap()).unwrap();
            [RangeSyscall::DeviceDiscard, RangeSyscall::DeviceZeroes].map(|syscall| {
                let mut files = files();
                let (_, mut operation) = op(&mut files, OpKind::Range { syscall, len: 512 }, 0);
                blocking(&files, &mut operation).perform()
            })
        };
        let (other, forbidden) = (Err(Errno::NOTTY), Err(Errno::DOM));
        assert_eq!(thread::spawn(move || results(0x1277)).join().unwrap(), [forbidden, other]);
        assert_eq!(thread::spawn(move || results(0x127f)).join().unwrap(), [other, forbidden]);
    }
}
