//! The back-end of threads, which make calls that wait. It works everywhere.
//!
//! Each engine has one. io_uring and AIO leave operations to it that they cannot do without waiting
//! ([`crate::files::route`]). It cannot cancel a call that a thread makes.

pub(crate) mod blocking;
pub(crate) mod pool;
pub(crate) mod submit_wait;

use crate::aio::batch::Submitted;
use crate::error::Error;
use crate::op::Completion;
use crate::operations::Operations;
use blocking::BlockingOp;
use pool::{Done, Job, ThreadPool};
use rustix::event::epoll;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use submit_wait::{SUBMIT_WAIT_MAX, SubmitWait};

/// A pool, its next jobs, and the jobs that it has done.
#[derive(Debug)]
pub(crate) struct Threads {
    pool: ThreadPool,
    /// Slots of operations to stage. No thread knows them.
    op_slots: Vec<u32>,
    /// Jobs that are described, and not handed to the pool.
    staged: VecDeque<Job>,
    /// The number of jobs that the pool has and that were not reaped.
    in_flight: usize,
    done: Vec<Done>,
    submit_wait: SubmitWait,
}

impl Threads {
    /// Starts a pool for an engine of this depth, with a reserve for each of `owners` owners. Its completions
    /// make `epoll` readable.
    pub(crate) fn open(depth: usize, owners: usize, epoll: impl AsFd) -> Result<Self, Error> {
        let try_open = || -> io::Result<Self> {
            let pool = ThreadPool::start(depth, owners)?;
            epoll::add(epoll, pool.event(), epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
            Ok(Self {
                pool,
                op_slots: Vec::new(),
                staged: VecDeque::new(),
                in_flight: 0,
                done: Vec::new(),
                submit_wait: SubmitWait::default(),
            })
        };
        try_open().map_err(Error::Threads)
    }

    /// Queues an operation that stays in its slot.
    #[inline]
    pub(crate) fn queue(&mut self, op_slot: u32) {
        self.op_slots.push(op_slot);
    }

    /// Returns the slot that was queued last, if no thread knows it.
    pub(crate) fn last(&self) -> Option<u32> {
        self.op_slots.last().copied()
    }

    /// Hands over the queued operations, and the batches that threads submit for AIO. May wait for these
    /// ([`submit_wait`]).
    pub(crate) fn submit(&mut self, ops: &mut Operations) {
        for op_slot in self.op_slots.drain(..) {
            let Operations { slots, files, .. } = ops;
            match slots.get_mut(op_slot).and_then(|operation| BlockingOp::of(op_slot, operation, files)) {
                Some(op) => self.staged.push_back(Job::Op(op)),
                None => ops.refuse(op_slot, Errno::BADF),
            }
        }
        for (owner, batch) in ops.batches.to_submit.drain(..) {
            self.submit_wait.called();
            self.staged.push_back(Job::Submit { owner, batch });
        }
        if !self.staged.is_empty() || self.pool.lacks_threads() {
            self.in_flight += self.staged.len();
            self.pool.submit(&mut self.staged);
        }
        if let Some(calls) = self.submit_wait.awaited() {
            let prompt = self.pool.await_calls(calls, SUBMIT_WAIT_MAX, &mut self.done);
            self.submit_wait.waited(prompt);
        }
    }

    /// Completes the operations that threads have done, and returns the batches that they have submitted to
    /// AIO.
    #[inline]
    pub(crate) fn reap(&mut self, ops: &mut Operations, into: &mut Vec<Completion>) {
        if self.in_flight == 0 {
            return;
        }
        self.pool.reap(&mut self.done);
        self.in_flight -= self.done.len();
        for done in self.done.drain(..) {
            match done {
                Done::Op { op_slot, result } => ops.complete(op_slot, result, into),
                Done::Submit(submitted) => {
                    self.submit_wait.returned();
                    ops.batches.submitted.push(submitted);
                }
            }
        }
    }

    /// Ends cancelled operations that no thread does yet, and returns batches with such operations to AIO.
    pub(crate) fn cancel(&mut self, ops: &mut Operations) {
        let is_cancelled = |op_slot| ops.slots.is_cancelled(op_slot);
        let mut ended: Vec<u32> = self.op_slots.extract_if(.., |op_slot| is_cancelled(*op_slot)).collect();
        for job in self.pool.take_queued(is_cancelled) {
            self.in_flight -= 1;
            match job {
                Job::Op(op) => ended.push(op.op_slot),
                Job::Submit { owner, batch } => {
                    self.submit_wait.returned();
                    // The result is that of a signal before the call: AIO submits the others in another
                    // batch.
                    let result = Err(Errno::INTR);
                    ops.batches.submitted.push(Submitted { owner, batch, result });
                }
            }
        }
        ended.into_iter().for_each(|op_slot| ops.fail(op_slot, Errno::CANCELED));
    }

    /// Returns whether there are jobs to hand over or to complete, or the pool must try again to start a
    /// thread.
    pub(crate) fn needs_turn(&self) -> bool {
        !(self.op_slots.is_empty() && self.done.is_empty()) || self.pool.lacks_threads()
    }

    /// Discards operations that no thread knows, waits until the threads have done the others, and ends them.
    pub(crate) fn end(&mut self, ops: &mut Operations, into: &mut Vec<Completion>) {
        self.op_slots.drain(..).for_each(|op_slot| ops.discard(op_slot));
        self.pool.finish();
        self.reap(ops, into);
    }

    #[cfg(test)]
    pub(crate) fn pool(&self) -> &ThreadPool {
        &self.pool
    }

    #[cfg(test)]
    pub(crate) fn has_submitted(&self) -> bool {
        self.done.iter().any(|done| matches!(done, Done::Submit(_)))
    }

    #[cfg(test)]
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight + self.op_slots.len()
    }
}

/// Does the operation in `op_slot`, and those that are merged with it, on this thread, and discards it. The
/// engine is being dropped.
pub(crate) fn perform(ops: &mut Operations, op_slot: u32) {
    let Operations { slots, files, .. } = ops;
    if let Some(op) = slots.get_mut(op_slot).and_then(|operation| BlockingOp::of(op_slot, operation, files)) {
        // No caller is left for the result.
        let _ = op.perform();
    }
    ops.discard(op_slot);
}
