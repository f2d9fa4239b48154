//! The back-end of threads, which make calls that wait. It works everywhere.
//!
//! Each engine has one: io_uring and AIO leave to it what they cannot do without waiting
//! ([`crate::files::route`]). It cannot cancel a call that a thread makes.

pub(crate) mod blocking;
pub(crate) mod pool;
pub(crate) mod submit_wait;

use crate::aio::batch::Submitted;
use crate::error::Error;
use crate::op::Completion;
use crate::operations::Operations;
use crate::options::CompletionMode;
use blocking::BlockingOp;
use pool::{Done, Job, Pool};
use rustix::event::epoll;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use submit_wait::{SUBMIT_WAIT_MAX, SubmitWait};

/// A pool, what it is to do next, and what it has done.
#[derive(Debug)]
pub(crate) struct Threads {
    pool: Pool,
    /// Places of operations that are to be staged. No thread has been told of them.
    places: Vec<u32>,
    /// Described, and not handed to the pool.
    staged: VecDeque<Job>,
    /// Handed to the pool, and not reaped.
    in_flight: usize,
    done: Vec<Done>,
    submit_wait: SubmitWait,
    /// The worker waits for a moment for batches that threads submit.
    waits: bool,
}

impl Threads {
    /// Starts a pool for an engine of this depth, with a reserve for each of so many owners. Its completions
    /// make `epoll` readable.
    pub(crate) fn open(
        depth: usize,
        owners: usize,
        completion: CompletionMode,
        epoll: impl AsFd,
    ) -> Result<Self, Error> {
        let try_open = || -> io::Result<Self> {
            let pool = Pool::start(depth, owners)?;
            epoll::add(epoll, pool.event(), epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
            Ok(Self {
                pool,
                places: Vec::new(),
                staged: VecDeque::new(),
                in_flight: 0,
                done: Vec::new(),
                submit_wait: SubmitWait::default(),
                // A thread that submits is there so that the worker need not wait.
                waits: completion == CompletionMode::Worker,
            })
        };
        try_open().map_err(Error::Threads)
    }

    /// Takes an operation that stays in its slot.
    #[inline]
    pub(crate) fn queue(&mut self, place: u32) {
        self.places.push(place);
    }

    /// Returns the place that was queued last, if no thread has been told of it.
    pub(crate) fn last(&self) -> Option<u32> {
        self.places.last().copied()
    }

    /// Hands over what is queued, and the batches that threads submit for AIO. May wait for these
    /// ([`submit_wait`]).
    pub(crate) fn submit(&mut self, ops: &mut Operations) {
        for place in self.places.drain(..) {
            let Operations { slots, files, .. } = ops;
            match slots.get_mut(place).and_then(|operation| BlockingOp::of(place, operation, files)) {
                Some(op) => self.staged.push_back(Job::Op(op)),
                None => ops.refuse(place, Errno::BADF),
            }
        }
        for (owner, batch) in ops.batches.to_submit.drain(..) {
            self.submit_wait.handed();
            self.staged.push_back(Job::Submit { owner, batch });
        }
        if !self.staged.is_empty() || self.pool.lacks_threads() {
            self.in_flight += self.staged.len();
            self.pool.submit(&mut self.staged);
        }
        if self.waits
            && let Some(calls) = self.submit_wait.awaited()
        {
            let prompt = self.pool.await_calls(calls, SUBMIT_WAIT_MAX, &mut self.done);
            self.submit_wait.waited(prompt);
        }
    }

    /// Completes what threads have done, and gives the batches that they have submitted back to AIO.
    #[inline]
    pub(crate) fn reap(&mut self, ops: &mut Operations, into: &mut Vec<Completion>) {
        if self.in_flight == 0 {
            return;
        }
        self.pool.reap(&mut self.done);
        self.in_flight -= self.done.len();
        for done in self.done.drain(..) {
            match done {
                Done::Op { place, result } => ops.complete(place, result, into),
                Done::Submit(submitted) => {
                    self.submit_wait.returned();
                    ops.batches.submitted.push(submitted);
                }
            }
        }
    }

    /// Ends cancelled operations that no thread does yet, and gives batches with such operations back to AIO.
    pub(crate) fn cancel(&mut self, ops: &mut Operations) {
        let is_cancelled = |place| ops.slots.is_cancelled(place);
        let mut ended: Vec<u32> = self.places.extract_if(.., |place| is_cancelled(*place)).collect();
        for job in self.pool.take_queued(is_cancelled) {
            self.in_flight -= 1;
            match job {
                Job::Op(op) => ended.push(op.place),
                Job::Submit { owner, batch } => {
                    self.submit_wait.returned();
                    // As if a signal had come before the call: AIO submits the others in another batch.
                    let result = Err(Errno::INTR);
                    ops.batches.submitted.push(Submitted { owner, batch, result });
                }
            }
        }
        ended.into_iter().for_each(|place| ops.fail(place, Errno::CANCELED));
    }

    /// Returns whether something is to be handed to the pool, or was done, or the pool tries again to start a
    /// thread.
    pub(crate) fn needs_turn(&self) -> bool {
        !(self.places.is_empty() && self.done.is_empty()) || self.pool.lacks_threads()
    }

    /// Gives up what no thread has been told of, waits until the threads have done the rest, and ends them.
    pub(crate) fn end(&mut self, ops: &mut Operations, into: &mut Vec<Completion>) {
        self.places.drain(..).for_each(|place| ops.discard(place));
        self.pool.finish();
        self.reap(ops, into);
    }

    #[cfg(test)]
    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    #[cfg(test)]
    pub(crate) fn has_submitted(&self) -> bool {
        self.done.iter().any(|done| matches!(done, Done::Submit(_)))
    }

    #[cfg(test)]
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight + self.places.len()
    }
}

/// Does the operation at `place`, with those that are one with it, on this thread, and gives it up. The
/// engine is being dropped.
pub(crate) fn perform(ops: &mut Operations, place: u32) {
    let Operations { slots, files, .. } = ops;
    if let Some(op) = slots.get_mut(place).and_then(|operation| BlockingOp::of(place, operation, files)) {
        // No caller is left for the result.
        let _ = op.perform();
    }
    ops.discard(place);
}
