//! The back-end of io_uring: one ring.
#![expect(unsafe_code, reason = "island: buffers handed to the kernel")]

#[cfg(debug_assertions)]
pub mod attack;
mod cancel;
mod entry;
mod setup;
mod submission;

use crate::error::Error;
use crate::op::Completion;
use crate::operations::Operations;
use crate::options::EngineOptions;
use cancel::Cancels;
use io_uring::{EnterFlags, IoUring};
use rustix::event::epoll;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::os::fd::{AsFd, RawFd};

/// The number of files that the kernel knows by index, which saves a look-up for each operation. Later ones
/// go by descriptor.
const FIXED_FILES: u32 = 64;

/// An io_uring, and the slots of the operations in it.
pub(crate) struct Uring {
    ring: IoUring,
    /// The ring is enabled. It belongs to the first thread that submits.
    enabled: bool,
    /// The kernel can know files by index.
    fixed: bool,
    /// Slots that are queued and not taken by the kernel, oldest first. The first `pushed` are in the
    /// submission ring already.
    staged: VecDeque<u32>,
    pushed: usize,
    /// The number of operations that the kernel has taken and that are not reaped.
    in_flight: usize,
    /// Requests to cancel operations that the kernel has.
    cancels: Cancels,
    /// `io_uring_enter` failed for good: nothing is submitted any more.
    broken: Option<Errno>,
}

impl std::fmt::Debug for Uring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uring")
            .field("in_flight", &self.in_flight)
            .field("staged", &self.staged.len())
            .field("broken", &self.broken)
            .finish_non_exhaustive()
    }
}

impl Uring {
    /// Makes a ring. Its completions make `epoll` readable.
    pub(crate) fn open(options: &EngineOptions, epoll: impl AsFd) -> Result<Self, Error> {
        setup::try_one()?;
        let ring = setup::make(options)?;
        let fixed = ring.submitter().register_files_sparse(FIXED_FILES).is_ok();
        setup::restrict(&ring)?;
        epoll::add(&epoll, &ring, epoll::EventData::new_u64(0), epoll::EventFlags::IN)
            .map_err(|e| Error::Uring { step: "epoll", source: e.into() })?;
        Ok(Self {
            ring,
            enabled: false,
            fixed,
            staged: VecDeque::with_capacity(options.shares().total()),
            pushed: 0,
            in_flight: 0,
            cancels: Cancels::default(),
            broken: None,
        })
    }

    /// Registers a file with the kernel by its index in the engine's table. Returns whether the kernel
    /// accepts it.
    pub(crate) fn register(&mut self, index: u32, fd: RawFd) -> bool {
        self.fixed
            && index < FIXED_FILES
            && matches!(self.ring.submitter().register_files_update(index, &[fd]), Ok(1))
    }

    /// Unregisters a file from the kernel. If this fails, the next file with the index replaces it.
    pub(crate) fn forget(&mut self, index: u32) {
        let _ = self.ring.submitter().register_files_update(index, &[-1]);
    }

    /// Queues an operation that stays in its slot.
    #[inline]
    pub(crate) fn queue(&mut self, op_slot: u32) {
        self.staged.push_back(op_slot);
    }

    /// Returns the slot that was queued last, if it is not in the submission ring.
    pub(crate) fn last(&self) -> Option<u32> {
        if self.staged.len() > self.pushed { self.staged.back().copied() } else { None }
    }

    /// Calls `io_uring_enter` once, which also runs work that the kernel has deferred.
    fn enter(&mut self, submit: u32, wait: u32) -> Result<usize, Errno> {
        let gets_events = wait > 0 || self.has_deferred_completions();
        let flags = if gets_events { EnterFlags::GETEVENTS } else { EnterFlags::empty() };
        // SAFETY: no argument is passed, and the flags need none.
        unsafe { self.ring.submitter().enter::<libc::sigset_t>(submit, wait, flags.bits(), None) }
            .map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))
    }

    /// Returns whether the kernel has completions that it puts into the ring only on request.
    fn has_deferred_completions(&mut self) -> bool {
        let queue = self.ring.submission();
        queue.taskrun() || queue.cq_overflow()
    }

    /// Completes the operations that the kernel has done.
    #[inline]
    pub(crate) fn reap(&mut self, ops: &mut Operations, into: &mut Vec<Completion>) {
        if !self.drain(ops, into) && self.has_deferred_completions() {
            // A failure occurs again in the next submission.
            let _ = self.enter(0, 0);
            self.drain(ops, into);
        }
    }

    /// Waits until the kernel has done an operation, and completes it.
    pub(crate) fn wait(&mut self, ops: &mut Operations, into: &mut Vec<Completion>) -> Result<(), Errno> {
        if !self.drain(ops, into) {
            match self.enter(0, 1) {
                Ok(_) | Err(Errno::INTR | Errno::AGAIN | Errno::BUSY) => {}
                Err(errno) => return Err(errno),
            }
            self.drain(ops, into);
        }
        Ok(())
    }

    /// Empties the completion ring. Returns whether there was a completion.
    fn drain(&mut self, ops: &mut Operations, into: &mut Vec<Completion>) -> bool {
        let mut count = 0;
        for done in self.ring.completion() {
            count += 1;
            let result = match done.result() {
                bytes @ 0.. => Ok(bytes as u32),
                errno => Err(Errno::from_raw_os_error(-errno)),
            };
            // `user_data` is returned unchanged: a slot.
            let op_slot = done.user_data() as u32;
            if self.cancels.completes(op_slot) {
                continue;
            }
            ops.complete(op_slot, result, into);
        }
        self.in_flight -= count;
        count > 0
    }

    /// Ends cancelled operations that are not in the submission ring. The next [`Uring::submit`] asks the
    /// kernel to cancel the others.
    pub(crate) fn cancel(&mut self, ops: &mut Operations) {
        let not_pushed = self.staged.split_off(self.pushed);
        for op_slot in not_pushed {
            if ops.slots.is_cancelled(op_slot) {
                ops.fail(op_slot, Errno::CANCELED);
            } else {
                self.staged.push_back(op_slot);
            }
        }
        // The kernel has some, or takes them from the submission ring before the requests.
        if self.in_flight + self.pushed > 0 && self.broken.is_none() {
            self.cancels.request_all(&ops.slots);
        }
    }

    /// Returns whether staged operations or requests can be submitted now.
    pub(crate) fn needs_turn(&self) -> bool {
        !self.staged.is_empty() || self.cancels.can_stage()
    }

    /// Discards operations that the kernel does not know. Nothing is submitted afterwards.
    pub(crate) fn end(&mut self, ops: &mut Operations) {
        self.staged.drain(..).for_each(|op_slot| ops.discard(op_slot));
    }

    /// Unregisters files. The kernel dismantles the ring later, and they would stay open until then. Nothing
    /// is in flight.
    pub(crate) fn release_files(&mut self) {
        if self.fixed {
            let _ = self.ring.submitter().unregister_files();
        }
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }
}

#[cfg(test)]
impl Uring {
    pub(crate) fn staged(&self) -> &VecDeque<u32> {
        &self.staged
    }
}
