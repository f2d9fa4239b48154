//! Back-ends of an engine: they submit operations and report what became of them, and nothing else.
//!
//! What is common to all of them is in [`Operations`] (operations, shares, pauses, results) and in
//! [`crate::Engine`] (which back-end does an operation). Another back-end is another variant here, and a file
//! of its own.

use crate::aio::Aio;
use crate::files::route::{Facts, Route, Routes};
use crate::op::Completion;
use crate::operations::Operations;
use crate::threads::Threads;
use crate::uring::Uring;
use rustix::io::Errno;
use std::io;

/// Does operations that stay in their slots.
#[derive(Debug)]
pub(crate) enum Backend {
    Uring(Box<Uring>),
    Aio(Box<Aio>),
    Threads(Box<Threads>),
}

impl Backend {
    /// Returns the name that chooses it on the command line.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Uring(_) => "io_uring",
            Self::Aio(_) => "aio",
            Self::Threads(_) => "threads",
        }
    }

    /// Returns the routes of a file in an engine whose first back-end this is, and which serves a lone owner or several.
    pub(crate) fn routes(&self, facts: Facts, lone_owner: bool) -> Routes {
        match self {
            Self::Uring(_) => Routes::by_ring(facts),
            Self::Aio(_) if lone_owner => Routes::by_aio(facts).without_handover(),
            Self::Aio(_) => Routes::by_aio(facts),
            Self::Threads(_) => Routes::all(Route::Blocking),
        }
    }

    /// Takes the operation at `place`, for a thread of the owner's share where there is one. Nothing is
    /// submitted yet.
    #[inline]
    pub(crate) fn queue(&mut self, place: u32, owner: Option<u32>) {
        match self {
            Self::Uring(uring) => uring.queue(place),
            Self::Aio(aio) => aio.queue(place, owner),
            Self::Threads(threads) => threads.queue(place),
        }
    }

    /// Returns the place of the operation that was queued last, if the kernel and threads were not told of
    /// it.
    pub(crate) fn last(&self, owner: Option<u32>) -> Option<u32> {
        match self {
            Self::Uring(uring) => uring.last(),
            Self::Aio(aio) => aio.last(owner),
            Self::Threads(threads) => threads.last(),
        }
    }

    /// Submits what is queued before one more operation of an owner is, if it is time ([`crate::early_submit`]). The owner
    /// has so many `unfinished` operations without that one.
    #[inline]
    pub(crate) fn submit_early(&mut self, ops: &mut Operations, unfinished: usize) {
        match self {
            // Where the ring has failed the next call says so again.
            Self::Uring(uring) if uring.is_time(unfinished) => drop(uring.submit(ops)),
            Self::Aio(aio) if aio.is_time(unfinished) => aio.submit_own(ops),
            Self::Uring(_) | Self::Aio(_) | Self::Threads(_) => {}
        }
    }

    /// Submits what is queued.
    ///
    /// # Errors
    /// The back-end has failed for good, and so have the operations that it had not submitted.
    pub(crate) fn submit(&mut self, ops: &mut Operations) -> io::Result<()> {
        match self {
            Self::Uring(uring) => return uring.submit(ops),
            Self::Aio(aio) => aio.submit(ops),
            Self::Threads(threads) => threads.submit(ops),
        }
        Ok(())
    }

    /// Completes what is done. Never waits.
    #[inline]
    pub(crate) fn reap(&mut self, ops: &mut Operations, into: &mut Vec<Completion>) {
        match self {
            Self::Uring(uring) => uring.reap(ops, into),
            Self::Aio(aio) => aio.reap(ops, into),
            Self::Threads(threads) => threads.reap(ops, into),
        }
    }

    /// Returns whether there is something to do that no descriptor tells of.
    pub(crate) fn needs_turn(&self) -> bool {
        match self {
            Self::Uring(uring) => uring.needs_turn(),
            Self::Aio(aio) => aio.needs_turn(),
            Self::Threads(threads) => threads.needs_turn(),
        }
    }

    /// Ends those of the cancelled operations that this back-end has, as far as it can. Never waits.
    pub(crate) fn cancel(&mut self, ops: &mut Operations) {
        match self {
            Self::Uring(uring) => uring.cancel(ops),
            Self::Aio(aio) => aio.cancel(ops),
            Self::Threads(threads) => threads.cancel(ops),
        }
    }

    /// Ends the threads of this back-end, and gives up operations that neither they nor the kernel have been
    /// told of. The engine is being dropped: nothing is submitted afterwards. May be called again.
    pub(crate) fn end(&mut self, ops: &mut Operations, into: &mut Vec<Completion>) {
        match self {
            Self::Uring(uring) => uring.end(ops),
            Self::Aio(aio) => aio.end(ops),
            Self::Threads(threads) => threads.end(ops, into),
        }
    }

    /// Returns how many operations the kernel has. Of an ended back-end.
    pub(crate) fn in_flight(&self) -> usize {
        match self {
            Self::Uring(uring) => uring.in_flight(),
            Self::Aio(aio) => aio.in_flight(),
            Self::Threads(_) => 0,
        }
    }

    /// Waits until one of the operations that the kernel has is done. Of an ended back-end.
    ///
    /// # Errors
    /// The kernel does not say when it will have finished.
    pub(crate) fn wait(&mut self, ops: &mut Operations, into: &mut Vec<Completion>) -> Result<(), Errno> {
        match self {
            Self::Uring(uring) => uring.wait(ops, into),
            Self::Aio(aio) => aio.wait(ops, into),
            Self::Threads(_) => Ok(()),
        }
    }
}
