//! The back-end of io_uring: one ring.
#![expect(unsafe_code, reason = "island: buffers handed to the kernel")]

mod buffers;
mod cancel;
mod enter;
mod entry;
mod setup;
mod submission;

use crate::error::Error;
use crate::op::Completion;
use crate::operations::Operations;
use crate::options::{CompletionMode, EngineOptions};
use crate::submit_thread::SubmitThread;
use crate::waker::Waker;
use buffers::Registered;
use cancel::Cancels;
use enter::Enter;
use io_uring::{EnterFlags, IoUring, Submitter};
use kickless_memory::View;
use rustix::event::epoll;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::sync::Arc;

/// The number of files that the kernel knows by index, which saves a look-up for each operation. Later ones
/// go by descriptor.
const FIXED_FILES: u32 = 64;

/// An io_uring, and the slots of the operations in it.
pub(crate) struct Uring {
    ring: IoUring,
    /// The same ring, for the thread that submits.
    ring_fd: Arc<OwnedFd>,
    /// A thread of the kernel takes pushed operations.
    sqpoll: bool,
    /// The ring is enabled. It belongs to the first thread that submits.
    enabled: bool,
    /// Makes the submitting calls, and signals `submitter_done` after each.
    submitter: Option<SubmitThread<Enter>>,
    submitter_done: Option<Waker>,
    /// The kernel can know files by index.
    fixed: bool,
    /// Guest memory that the kernel has pinned, if requested.
    buffers: Option<Registered>,
    /// Slots that are queued and not taken by the kernel, oldest first. The first `pushed` are in the
    /// submission ring already.
    staged: VecDeque<u32>,
    pushed: usize,
    /// The number of operations that the kernel has taken and that are not reaped. It is too low while the
    /// result of the submitting thread is unknown.
    in_flight: isize,
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
        let failed = |step| move |source| Error::Uring { step, source };
        let (ring, enabled) = setup::make(options)?;
        let fixed = ring.submitter().register_files_sparse(FIXED_FILES).is_ok();
        let buffers = options.fixed_buffers.then(|| Registered::new(&ring.submitter())).transpose();
        let buffers = buffers.map_err(failed("a table of buffers"))?;
        epoll::add(&epoll, &ring, epoll::EventData::new_u64(0), epoll::EventFlags::IN)
            .map_err(|e| failed("epoll")(e.into()))?;
        let ring_fd = rustix::io::fcntl_dupfd_cloexec(&ring, 0).map_err(|e| failed("dup")(e.into()))?;
        let mut uring = Self {
            ring,
            ring_fd: Arc::new(ring_fd),
            sqpoll: options.sqpoll,
            enabled,
            submitter: None,
            submitter_done: None,
            fixed,
            buffers,
            staged: VecDeque::with_capacity(options.shares().total()),
            pushed: 0,
            in_flight: 0,
            cancels: Cancels::default(),
            broken: None,
        };
        // With a thread of the kernel, none of ours is needed.
        if options.completion == CompletionMode::Thread && !options.sqpoll {
            uring.start_submitter(&epoll).map_err(failed("a thread that submits"))?;
        }
        Ok(uring)
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

    pub(crate) fn hold_memory(&mut self, view: &Arc<View>) {
        if let Some(buffers) = &mut self.buffers {
            buffers.hold(&self.ring.submitter(), view);
        }
    }

    pub(crate) fn release_memory(&mut self, view: &Arc<View>) {
        if let Some(buffers) = &mut self.buffers {
            buffers.release(&self.ring.submitter(), view);
        }
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
        // Before the check of the ring, and before any check of whether the thread is busy.
        if let Some(submitter_done) = &self.submitter_done {
            submitter_done.clear();
        }
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
        let (submitter, _, ring) = self.ring.split();
        let mut count = 0;
        for done in ring {
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
            if let Some(buffers) = &mut self.buffers {
                release_buffer(buffers, &submitter, ops, op_slot);
            }
            ops.complete(op_slot, result, into);
        }
        self.in_flight -= count;
        count > 0
    }

    /// Notes that the kernel no longer uses a registered buffer for `op_slot`.
    fn release_buffer(&mut self, ops: &mut Operations, op_slot: u32) {
        if let Some(buffers) = &mut self.buffers {
            release_buffer(buffers, &self.ring.submitter(), ops, op_slot);
        }
    }

    /// Ends cancelled operations that are not in the submission ring. The next [`Uring::submit`] gets_events
    /// the kernel to cancel the others.
    pub(crate) fn cancel(&mut self, ops: &mut Operations) {
        let not_pushed = self.staged.split_off(self.pushed);
        for op_slot in not_pushed {
            if ops.slots.is_cancelled(op_slot) {
                self.release_buffer(ops, op_slot);
                ops.fail(op_slot, Errno::CANCELED);
            } else {
                self.staged.push_back(op_slot);
            }
        }
        // The kernel has some, or a thread is submitting them now.
        if self.in_flight + self.pushed as isize > 0 && self.broken.is_none() {
            self.cancels.request_all(&ops.slots);
        }
    }

    /// Returns whether staged operations or requests can be submitted now.
    pub(crate) fn needs_turn(&self) -> bool {
        let waits_for_thread = || self.submitter.as_ref().is_some_and(|submitter| submitter.is_busy());
        (!self.staged.is_empty() || self.cancels.can_stage()) && !waits_for_thread()
    }

    /// Discards operations that the kernel does not know. Nothing is submitted afterwards.
    pub(crate) fn end(&mut self, ops: &mut Operations) {
        self.stop_submitter();
        self.staged.drain(..).for_each(|op_slot| ops.discard(op_slot));
    }

    /// Unregisters files and memory. The kernel dismantles the ring later. Until then, files would stay open
    /// and memory pinned. Nothing is in flight.
    pub(crate) fn release_all(&mut self) {
        if self.fixed {
            let _ = self.ring.submitter().unregister_files();
        }
        if self.buffers.is_some() {
            let _ = self.ring.submitter().unregister_buffers();
        }
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.max(0) as usize
    }
}

#[cfg(test)]
impl Uring {
    pub(crate) fn staged(&self) -> &VecDeque<u32> {
        &self.staged
    }

    pub(crate) fn registered(&self) -> (usize, usize) {
        self.buffers.as_ref().unwrap().counts()
    }

    pub(crate) fn has_submit_thread(&self) -> bool {
        self.submitter.is_some()
    }
}

/// Notes that the kernel no longer uses a registered buffer for `op_slot`.
#[inline]
fn release_buffer(buffers: &mut Registered, submitter: &Submitter<'_>, ops: &mut Operations, op_slot: u32) {
    if let Some(index) = ops.slots.get_mut(op_slot).and_then(|operation| operation.buffer.take()) {
        buffers.done(submitter, index);
    }
}
