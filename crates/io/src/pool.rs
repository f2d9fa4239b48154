//! Threads that do one blocking operation after the other.
#![expect(unsafe_code, reason = "island: buffers handed to the kernel")]

use crate::files::Held;
use crate::op::{OpKind, RangeCall, View};
use crate::{Completion, Op, Token, Waker};
use rustix::io::Errno;
use rustix::ioctl::opcode;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};

/// So many threads at most. They wait for the disk nearly all the time.
const THREADS_MAX: usize = 16;

/// Of linux/fs.h.
const BLKDISCARD: u32 = opcode::none(0x12, 119);
const BLKZEROOUT: u32 = opcode::none(0x12, 127);

/// A thread needs next to none.
const STACK_BYTES: usize = 128 << 10;

/// An operation, with the file that it holds open.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) held: Held,
    pub(crate) file: Option<Arc<File>>,
    pub(crate) token: Token,
    pub(crate) op: Op,
}

/// A job that is done: its file is still held.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) held: Held,
    pub(crate) completion: Completion,
}

#[derive(Debug, Default)]
struct Work {
    jobs: VecDeque<Job>,
    /// Threads that wait for a job.
    idle: usize,
    stop: bool,
}

/// What the threads share with the engine. Lock order: `work` and `done` are never held together.
#[derive(Debug)]
struct Shared {
    work: Mutex<Work>,
    more: Condvar,
    done: Mutex<Vec<Done>>,
    /// Signalled exactly while `done` is not empty; changed under its lock.
    event: Waker,
}

/// Up to [`THREADS_MAX`] threads, started as they are needed.
#[derive(Debug)]
pub(crate) struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    threads_max: usize,
}

/// Nothing is left half done by a thread that panics: none of them can, under a lock.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    /// Starts one thread; there is always one.
    pub(crate) fn start(depth: usize) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            work: Mutex::default(),
            more: Condvar::new(),
            done: Mutex::default(),
            event: Waker::new()?,
        });
        let mut pool = Self { shared, threads: Vec::new(), threads_max: depth.clamp(1, THREADS_MAX) };
        pool.add_thread()?;
        Ok(pool)
    }

    fn add_thread(&mut self) -> io::Result<()> {
        let shared = self.shared.clone();
        let builder = Builder::new().name(format!("io-{}", self.threads.len())).stack_size(STACK_BYTES);
        self.threads.push(builder.spawn(move || shared.run())?);
        Ok(())
    }

    pub(crate) fn event(&self) -> BorrowedFd<'_> {
        self.shared.event.as_fd()
    }

    /// Hands over all of `jobs`.
    pub(crate) fn submit(&mut self, jobs: &mut VecDeque<Job>) {
        let count = jobs.len();
        let (waiting, idle) = {
            let mut work = lock(&self.shared.work);
            work.jobs.append(jobs);
            (work.jobs.len(), work.idle)
        };
        for _ in 0..count.min(idle) {
            self.shared.more.notify_one();
        }
        // The host may refuse another thread; those that there are do the work as well.
        for _ in idle..waiting.min(self.threads_max) {
            if self.threads.len() == self.threads_max || self.add_thread().is_err() {
                break;
            }
        }
    }

    /// Appends what is done.
    pub(crate) fn reap(&mut self, into: &mut Vec<Done>) {
        let mut done = lock(&self.shared.done);
        if !done.is_empty() {
            into.append(&mut done);
            self.shared.event.clear();
        }
    }
}

impl Drop for Pool {
    /// The threads finish all that they have been given.
    fn drop(&mut self) {
        lock(&self.shared.work).stop = true;
        self.shared.more.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn run(&self) {
        while let Some(Job { held, file, token, mut op }) = self.next() {
            let result = file.as_ref().map_or(Err(Errno::BADF), |file| perform(file, &mut op));
            // Before the engine can learn of it: a file that it forgets then is closed then.
            drop(file);
            let mut done = lock(&self.done);
            done.push(Done { held, completion: Completion { token, result, buffers: op.buffers } });
            if done.len() == 1 {
                self.event.wake();
            }
        }
    }

    /// Waits for a job; `None` when there will be none.
    fn next(&self) -> Option<Job> {
        let mut work = lock(&self.work);
        loop {
            if let Some(job) = work.jobs.pop_front() {
                return Some(job);
            }
            if work.stop {
                return None;
            }
            work.idle += 1;
            work = self.more.wait(work).unwrap_or_else(PoisonError::into_inner);
            work.idle -= 1;
        }
    }
}

/// Does one operation, and waits for it.
fn perform(file: &File, op: &mut Op) -> Result<u32, Errno> {
    let fd = file.as_raw_fd();
    // Beyond what fits, the kernel says that the argument is invalid.
    let Ok(offset) = libc::off_t::try_from(op.offset) else { return Err(Errno::INVAL) };
    if let OpKind::Range { call, len } = op.kind {
        return on_range(fd, call, offset, len);
    }
    let flags = if op.kind == (OpKind::Write { durable: true }) { libc::RWF_DSYNC } else { 0 };
    let one;
    let (segments, count) = match op.buffers.view(op.kind) {
        View::One(at, len) => {
            one = libc::iovec { iov_base: at.cast(), iov_len: len };
            (&raw const one, 1)
        }
        View::Many(segments, count) => (segments, count as i32),
    };
    // SAFETY: `op` owns the buffers and stays here until the call returns; what others do to guest memory
    // meanwhile is between them and the kernel.
    let result = unsafe {
        match op.kind {
            OpKind::Read => libc::preadv2(fd, segments, count, offset, 0),
            OpKind::Write { .. } => libc::pwritev2(fd, segments, count, offset, flags),
            OpKind::Flush | OpKind::Range { .. } => libc::fdatasync(fd) as isize,
        }
    };
    match result {
        // No more than 0x7fff_f000.
        bytes @ 0.. => Ok(bytes as u32),
        _ => Err(last_error()),
    }
}

/// Does something to a range, and waits for it.
fn on_range(fd: RawFd, call: RangeCall, offset: libc::off_t, len: u64) -> Result<u32, Errno> {
    let result = if let Some(mode) = call.mode() {
        let Ok(len) = libc::off_t::try_from(len) else { return Err(Errno::INVAL) };
        // SAFETY: no memory is passed.
        unsafe { libc::fallocate(fd, mode, offset, len) }
    } else {
        let request = if call == RangeCall::DeviceDiscard { BLKDISCARD } else { BLKZEROOUT };
        let range = [offset as u64, len];
        // SAFETY: both calls read two 64-bit numbers there, whatever kind of file it is: others know no such request.
        unsafe { libc::ioctl(fd, request as libc::Ioctl, range.as_ptr()) }
    };
    if result == 0 { Ok(0) } else { Err(last_error()) }
}

fn last_error() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::Files;
    use crate::{AlignedBuf, Buffers};
    use rustix::event::{PollFd, PollFlags, poll};
    use seccompiler::{
        BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
        SeccompRule,
    };
    use std::thread;

    /// An image's first operation.
    fn op(files: &mut Files, kind: OpKind, offset: u64) -> (Held, Arc<File>, Op) {
        let file = Arc::new(tempfile::tempfile().unwrap());
        file.set_len(4096).unwrap();
        let id = files.insert(file.clone()).0;
        let buffers = Buffers::Owned(AlignedBuf::new(512, 512).unwrap());
        (files.hold(id), file, Op { file: id, kind, offset, buffers })
    }

    fn reap(pool: &mut Pool, count: usize) -> Vec<Done> {
        let mut done = Vec::new();
        while done.len() < count {
            let _ = poll(&mut [PollFd::from_borrowed_fd(pool.event(), PollFlags::IN)], None);
            pool.reap(&mut done);
        }
        done
    }

    #[test]
    fn as_many_threads_as_the_depth_and_no_more_than_the_limit() {
        for (depth, threads) in [(0, 1), (1, 1), (2, 2), (1000, THREADS_MAX)] {
            let mut files = Files::default();
            let mut pool = Pool::start(depth).unwrap();
            let jobs = (0..100).map(|slot| {
                let (held, file, op) = op(&mut files, OpKind::Read, 0);
                Job { held, file: Some(file), token: Token { source: 0, slot }, op }
            });
            pool.submit(&mut jobs.collect());
            assert_eq!(pool.threads.len(), threads, "of a depth of {depth}");
            assert!(reap(&mut pool, 100).iter().all(|done| done.completion.result == Ok(512)));
        }
    }

    #[test]
    fn a_job_that_is_seen_done_has_let_go_of_its_file() {
        let (mut pool, mut files) = (Pool::start(1).unwrap(), Files::default());
        for _ in 0..2000 {
            let (held, file, op) = op(&mut files, OpKind::Flush, 0);
            let kept = file.clone();
            pool.submit(&mut [Job { held, file: Some(file), token: Token::default(), op }].into());
            reap(&mut pool, 1);
            assert_eq!(Arc::strong_count(&kept), 2, "one here, one in the table");
        }
    }

    /// For the kernel -1 is "where the file is".
    #[test]
    fn no_offset_is_negative() {
        for (offset, result) in [(0, Ok(512)), (1 << 63, Err(Errno::INVAL)), (u64::MAX, Err(Errno::INVAL))] {
            let (_, file, mut op) = op(&mut Files::default(), OpKind::Read, offset);
            assert_eq!(perform(&file, &mut op), result, "{offset}");
        }
    }

    /// Devices take them in different ways: which call it is shows where one is forbidden, in a thread that ends.
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
            [RangeCall::DeviceDiscard, RangeCall::DeviceZeroes].map(|call| {
                let (_, file, mut op) = op(&mut Files::default(), OpKind::Range { call, len: 512 }, 0);
                perform(&file, &mut op)
            })
        };
        let (other, forbidden) = (Err(Errno::NOTTY), Err(Errno::DOM));
        assert_eq!(thread::spawn(move || results(0x1277)).join().unwrap(), [forbidden, other]);
        assert_eq!(thread::spawn(move || results(0x127f)).join().unwrap(), [other, forbidden]);
    }
}
