//! Back-ends of an engine. They submit operations and report their results, and nothing else.
//!
//! The parts that all of them share are in [`Operations`] (operations, shares, pauses, results) and in
//! [`crate::Engine`] (the choice of a back-end for an operation). Another back-end is another variant here,
//! and a file of its own.

use crate::aio::Aio;
use crate::files::route::{Facts, Route, Routes};
use crate::op::Completion;
use crate::operations::Operations;
use crate::threads::Threads;
use crate::uring::Uring;
use rustix::io::Errno;
use std::io;

/// A back-end, which does operations that stay in their slots.
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

    /// Returns the routes of a file in an engine whose first back-end this is, and which serves a lone owner
    /// or several.
    pub(crate) fn routes(&self, facts: Facts, lone_owner: bool) -> Routes {
        match self {
            Self::Uring(_) => Routes::by_ring(facts),
            Self::Aio(_) if lone_owner => Routes::by_aio(facts).without_handover(),
            Self::Aio(_) => Routes::by_aio(facts),
            Self::Threads(_) => Routes::all(Route::Blocking),
        }
    }

    /// Queues the operation in `op_slot`. With an `owner`, a thread of the owner's share submits it. Nothing
    /// is submitted yet.
    #[inline]
    pub(crate) fn queue(&mut self, op_slot: u32, owner: Option<u32>) {
        match self {
            Self::Uring(uring) => uring.queue(op_slot),
            Self::Aio(aio) => aio.queue(op_slot, owner),
            Self::Threads(threads) => threads.queue(op_slot),
        }
    }

    /// Returns the slot of the operation that was queued last, if neither the kernel nor a thread knows it
    /// yet.
    pub(crate) fn last(&self, owner: Option<u32>) -> Option<u32> {
        match self {
            Self::Uring(uring) => uring.last(),
            Self::Aio(aio) => aio.last(owner),
            Self::Threads(threads) => threads.last(),
        }
    }

    /// Submits the queued operations before one more of an owner is queued, if it is time
    /// ([`crate::early_submit`]). The owner has this many `unfinished` operations without that one.
    #[inline]
    pub(crate) fn submit_early(&mut self, ops: &mut Operations, unfinished: usize) {
        match self {
            // If the ring has failed, the next call reports it again.
            Self::Uring(uring) if uring.is_due(unfinished) => drop(uring.submit(ops)),
            Self::Aio(aio) if aio.is_due(unfinished) => aio.submit_own(ops),
            Self::Uring(_) | Self::Aio(_) | Self::Threads(_) => {}
        }
    }

    /// Submits the queued operations.
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

    /// Completes operations that are done. Never waits.
    #[inline]
    pub(crate) fn reap(&mut self, ops: &mut Operations, into: &mut Vec<Completion>) {
        match self {
            Self::Uring(uring) => uring.reap(ops, into),
            Self::Aio(aio) => aio.reap(ops, into),
            Self::Threads(threads) => threads.reap(ops, into),
        }
    }

    /// Returns whether there is something to do that no descriptor reports.
    pub(crate) fn needs_turn(&self) -> bool {
        match self {
            Self::Uring(uring) => uring.needs_turn(),
            Self::Aio(aio) => aio.needs_turn(),
            Self::Threads(threads) => threads.needs_turn(),
        }
    }

    /// Ends the cancelled operations that this back-end has, as far as it can. Never waits.
    pub(crate) fn cancel(&mut self, ops: &mut Operations) {
        match self {
            Self::Uring(uring) => uring.cancel(ops),
            Self::Aio(aio) => aio.cancel(ops),
            Self::Threads(threads) => threads.cancel(ops),
        }
    }

    /// Ends the threads of this back-end, and discards operations that neither they nor the kernel know. The
    /// engine is being dropped, so nothing is submitted afterwards. May be called again.
    pub(crate) fn end(&mut self, ops: &mut Operations, into: &mut Vec<Completion>) {
        match self {
            Self::Uring(uring) => uring.end(ops),
            Self::Aio(aio) => aio.end(ops),
            Self::Threads(threads) => threads.end(ops, into),
        }
    }

    /// Returns the number of operations that the kernel has. For an ended back-end.
    pub(crate) fn in_flight(&self) -> usize {
        match self {
            Self::Uring(uring) => uring.in_flight(),
            Self::Aio(aio) => aio.in_flight(),
            Self::Threads(_) => 0,
        }
    }

    /// Waits until the kernel has done one of its operations. For an ended back-end.
    ///
    /// # Errors
    /// The kernel does not report when it has finished.
    pub(crate) fn wait(&mut self, ops: &mut Operations, into: &mut Vec<Completion>) -> Result<(), Errno> {
        match self {
            Self::Uring(uring) => uring.wait(ops, into),
            Self::Aio(aio) => aio.wait(ops, into),
            Self::Threads(_) => Ok(()),
        }
    }
}
