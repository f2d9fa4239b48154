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

/// Files that the kernel knows by index, which spares it a look-up for each operation. Later ones go by
/// descriptor.
const FIXED_FILES: u32 = 64;

/// An io_uring, and the places of operations that are in it.
pub(crate) struct Uring {
    ring: IoUring,
    /// The same ring, for the thread that submits.
    ring_fd: Arc<OwnedFd>,
    /// A thread of the kernel's takes what is pushed.
    sqpoll: bool,
    /// The ring belongs to a thread, the first one that submits.
    enabled: bool,
    /// It makes the calls that submit, and signals `called` then.
    submitter: Option<SubmitThread<Enter>>,
    called: Option<Waker>,
    /// The kernel can know files by index.
    fixed: bool,
    /// Guest memory that the kernel has pinned, where that is asked for.
    buffers: Option<Registered>,
    /// Queued and not taken by the kernel, oldest first. The first `pushed` are in the submission ring
    /// already.
    staged: VecDeque<u32>,
    pushed: usize,
    /// Taken by the kernel and not reaped. Less than that while it is not known what a thread has submitted.
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
            called: None,
            fixed,
            buffers,
            staged: VecDeque::with_capacity(options.shares().total()),
            pushed: 0,
            in_flight: 0,
            cancels: Cancels::default(),
            broken: None,
        };
        // A ring with a thread of the kernel's needs none of ours.
        if options.completion == CompletionMode::Thread && !options.sqpoll {
            uring.start_submitter(&epoll).map_err(failed("a thread that submits"))?;
        }
        Ok(uring)
    }

    /// Makes a file known to the kernel by its index in the engine's table. Returns whether the kernel can
    /// know it so.
    pub(crate) fn register(&mut self, index: u32, fd: RawFd) -> bool {
        self.fixed
            && index < FIXED_FILES
            && matches!(self.ring.submitter().register_files_update(index, &[fd]), Ok(1))
    }

    /// Has the kernel let go of a file as well. Should it refuse, the next file that gets the index replaces
    /// it.
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

    /// Takes an operation that stays in its slot.
    #[inline]
    pub(crate) fn queue(&mut self, place: u32) {
        self.staged.push_back(place);
    }

    /// Returns the place that was queued last, if it is not in the submission ring.
    pub(crate) fn last(&self) -> Option<u32> {
        if self.staged.len() > self.pushed { self.staged.back().copied() } else { None }
    }

    /// One `io_uring_enter`, which also runs what the kernel has put off.
    fn enter(&mut self, submit: u32, wait: u32) -> Result<usize, Errno> {
        let asks = wait > 0 || self.kernel_waits();
        let flags = if asks { EnterFlags::GETEVENTS } else { EnterFlags::empty() };
        // SAFETY: no argument is passed, and the flags need none.
        unsafe { self.ring.submitter().enter::<libc::sigset_t>(submit, wait, flags.bits(), None) }
            .map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))
    }

    /// Whether the kernel has completions that it puts into the ring only when asked.
    fn kernel_waits(&mut self) -> bool {
        let queue = self.ring.submission();
        queue.taskrun() || queue.cq_overflow()
    }

    /// Completes what the kernel has done.
    #[inline]
    pub(crate) fn reap(&mut self, ops: &mut Operations, into: &mut Vec<Completion>) {
        // Before the look at the ring, and before anybody asks whether the thread is busy.
        if let Some(called) = &self.called {
            called.clear();
        }
        if !self.drain(ops, into) && self.kernel_waits() {
            // A failure shows itself again in the next submission.
            let _ = self.enter(0, 0);
            self.drain(ops, into);
        }
    }

    /// Waits until the kernel has done something, and completes that.
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

    /// Empties the completion ring; whether anything was in it.
    fn drain(&mut self, ops: &mut Operations, into: &mut Vec<Completion>) -> bool {
        let (submitter, _, ring) = self.ring.split();
        let mut count = 0;
        for done in ring {
            count += 1;
            let result = match done.result() {
                bytes @ 0.. => Ok(bytes as u32),
                errno => Err(Errno::from_raw_os_error(-errno)),
            };
            // `user_data` comes back as it went in: a place.
            let place = done.user_data() as u32;
            if self.cancels.completes(place) {
                continue;
            }
            if let Some(buffers) = &mut self.buffers {
                let_go(buffers, &submitter, ops, place);
            }
            ops.complete(place, result, into);
        }
        self.in_flight -= count;
        count > 0
    }

    /// Notes that the kernel uses no registered buffer for `place` any more.
    fn let_go(&mut self, ops: &mut Operations, place: u32) {
        if let Some(buffers) = &mut self.buffers {
            let_go(buffers, &self.ring.submitter(), ops, place);
        }
    }

    /// Ends cancelled operations that are not in the submission ring. The next [`Uring::submit`] asks the kernel
    /// to cancel the others.
    pub(crate) fn cancel(&mut self, ops: &mut Operations) {
        let unseen = self.staged.split_off(self.pushed);
        for place in unseen {
            if ops.slots.is_cancelled(place) {
                self.let_go(ops, place);
                ops.fail(place, Errno::CANCELED);
            } else {
                self.staged.push_back(place);
            }
        }
        // The kernel has some, or a thread is just submitting them.
        if self.in_flight + self.pushed as isize > 0 && self.broken.is_none() {
            self.cancels.ask_for_all(&ops.slots);
        }
    }

    /// Returns whether the kernel can be told of what is staged, or is to be staged.
    pub(crate) fn needs_turn(&self) -> bool {
        let waits_for_thread = || self.submitter.as_ref().is_some_and(|submitter| submitter.is_busy());
        (!self.staged.is_empty() || self.cancels.can_stage()) && !waits_for_thread()
    }

    /// Gives up what the kernel has not been told of. Nothing is submitted afterwards.
    pub(crate) fn end(&mut self, ops: &mut Operations) {
        self.stop_submitter();
        self.staged.drain(..).for_each(|place| ops.discard(place));
    }

    /// Lets go of files and memory. The kernel takes the ring apart later; files are not to stay open until
    /// then, nor memory to stay pinned. Nothing is in flight.
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

/// Notes that the kernel uses no registered buffer for `place` any more.
#[inline]
fn let_go(buffers: &mut Registered, submitter: &Submitter<'_>, ops: &mut Operations, place: u32) {
    if let Some(index) = ops.slots.get_mut(place).and_then(|operation| operation.buffer.take()) {
        buffers.done(submitter, index);
    }
}
