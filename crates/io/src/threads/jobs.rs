//! Work that threads do for an engine, and its results.

use crate::aio::context::Batch;
use crate::files::{Files, Gone, Held};
use crate::operations::slots::Slots;
use crate::threads::pool::{Done, Job, Pool, Transfer};
use crate::threads::submit_wait::{SUBMIT_WAIT_MAX, SubmitWait};
use crate::{Completion, Op, Token};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;

/// A call of `io_submit` that a thread has made for an owner.
#[derive(Debug)]
pub(crate) struct Submitted {
    pub(crate) owner: u32,
    pub(crate) batch: Box<Batch>,
    pub(crate) result: Result<usize, Errno>,
}

/// Something that a thread has done and that is to be looked up in the engine's slots.
#[derive(Debug)]
pub(crate) enum Other {
    /// The transfer at a place.
    Transferred(u32, Result<u32, Errno>),
    Submitted(Submitted),
}

/// A pool, what it is to do next, and what it has done.
#[derive(Debug)]
pub(crate) struct Jobs {
    pool: Pool,
    /// Queued, and not handed to the pool.
    staged: VecDeque<Job>,
    /// Places of transfers that are to be staged. Nobody has been told of them.
    places: Vec<u32>,
    /// Queued and not reaped, the staged ones included.
    in_flight: usize,
    done: Vec<Done>,
    submit_wait: SubmitWait,
}

impl Jobs {
    /// Starts a pool for an engine of this depth, with a reserve for each of so many owners.
    pub(crate) fn start(depth: usize, owners: usize) -> io::Result<Self> {
        let pool = Pool::start(depth, owners)?;
        let (staged, places, done) = (VecDeque::new(), Vec::new(), Vec::new());
        Ok(Self { pool, staged, places, in_flight: 0, done, submit_wait: SubmitWait::default() })
    }

    pub(crate) fn event(&self) -> BorrowedFd<'_> {
        self.pool.event()
    }

    /// Takes an operation that holds its file.
    pub(crate) fn queue(&mut self, held: Held, token: Token, op: Op, files: &Files) {
        self.in_flight += 1;
        match files.get(held) {
            Some((file, ..)) => self.staged.push_back(Job::Op { held, file: file.clone(), token, op }),
            None => {
                let completion = Completion { token, result: Err(Errno::BADF), buffers: op.buffers };
                self.done.push(Done::Op { held, completion });
            }
        }
    }

    /// Takes a transfer that stays in its slot.
    pub(crate) fn queue_place(&mut self, place: u32) {
        self.places.push(place);
    }

    /// Returns the place that was queued last, if nobody has been told of it.
    pub(crate) fn last_place(&self) -> Option<u32> {
        self.places.last().copied()
    }

    /// Forgets the places that nobody has been told of, and returns them.
    pub(crate) fn take_places(&mut self) -> impl Iterator<Item = u32> + '_ {
        self.places.drain(..)
    }

    /// Describes the transfers that stay in their slots to the pool. From now on they stay as they are.
    pub(crate) fn stage_places(&mut self, slots: &mut Slots, files: &Files) {
        for place in self.places.drain(..) {
            let Some(operation) = slots.get_mut(place) else { continue };
            self.in_flight += 1;
            match Transfer::of(place, operation, files) {
                Some(transfer) => self.staged.push_back(Job::Transfer(transfer)),
                None => self.done.push(Done::Transfer { place, result: Err(Errno::BADF) }),
            }
        }
    }

    /// Has a thread of the owner's share submit a batch, at once.
    pub(crate) fn submit_batch(&mut self, owner: u32, batch: Box<Batch>) {
        self.in_flight += 1;
        self.submit_wait.handed();
        self.staged.push_back(Job::Submit { owner, batch });
        self.submit();
    }

    /// Waits for a moment until the batches that were handed to threads are submitted, if that is likely to be soon.
    pub(crate) fn await_batches(&mut self) {
        if let Some(calls) = self.submit_wait.awaited() {
            let prompt = self.pool.await_calls(calls, SUBMIT_WAIT_MAX, &mut self.done);
            self.submit_wait.waited(prompt);
        }
    }

    pub(crate) fn submit(&mut self) {
        if !self.staged.is_empty() || self.pool.lacks_threads() {
            self.pool.submit(&mut self.staged);
        }
    }

    /// Calls `done` for each operation that is done, with the file that went with it; returns what else is done.
    pub(crate) fn reap(
        &mut self,
        files: &mut Files,
        mut done: impl FnMut(Completion, Option<Gone>),
    ) -> Vec<Other> {
        // Empty, and so without memory, but for those that need some.
        let mut others = Vec::new();
        if self.in_flight == 0 {
            return others;
        }
        self.pool.reap(&mut self.done);
        self.in_flight -= self.done.len();
        for one in self.done.drain(..) {
            match one {
                Done::Op { held, completion } => {
                    let gone = files.release(held);
                    done(completion, gone);
                }
                Done::Transfer { place, result } => others.push(Other::Transferred(place, result)),
                Done::Submit { owner, batch, result } => {
                    self.submit_wait.returned();
                    others.push(Other::Submitted(Submitted { owner, batch, result }));
                }
            }
        }
        others
    }

    /// Whether something is to be handed to the pool, or was done, or the pool tries again to start a thread.
    pub(crate) fn needs_turn(&self) -> bool {
        !(self.staged.is_empty() && self.places.is_empty() && self.done.is_empty())
            || self.pool.lacks_threads()
    }

    #[cfg(test)]
    pub(crate) fn has_submitted(&self) -> bool {
        self.done.iter().any(|done| matches!(done, Done::Submit { .. }))
    }

    #[cfg(test)]
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight + self.places.len()
    }

    /// Waits until the threads have done all, and ends them.
    pub(crate) fn finish(&mut self) {
        self.submit();
        self.pool.finish();
    }
}
