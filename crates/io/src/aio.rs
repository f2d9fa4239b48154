//! The back-end of Linux AIO, for hosts that forbid io_uring, and for files on which io_uring is slow.
//!
//! For a file that is open for direct I/O, `io_submit` only starts a transfer, and returns. For any other
//! file it does the whole transfer. So transfers of other files, operations that AIO does not know, and calls
//! that could wait go to threads ([`crate::files::route`]).
//!
//! It cannot cancel: the kernel has no `io_cancel` for transfers of files.

pub(crate) mod batch;
pub(crate) mod context;

use crate::early_submit;
use crate::error::Error;
use crate::files::Files;
use crate::files::shares::Shares;
use crate::op::{BYTES_MAX, Completion, KernelBuffers, OpKind};
use crate::operations::Operations;
use crate::operations::in_flight::{InFlight, rw_flags};
use crate::operations::slots::Slots;
use crate::waker::Waker;
use batch::{Batch, Submitted};
use context::{BATCH, Context, Control, Event, PREAD, PREADV, PWRITE, PWRITEV, SIGNAL_EVENT};
use rustix::event::epoll;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

/// The smallest context that is worth having.
const DEPTH_MIN: usize = 8;

/// A context and its operations. The operations themselves are in the engine's slots, by which they are known
/// here.
#[derive(Debug)]
pub(crate) struct Aio {
    context: Arc<Context>,
    /// Signalled with each completion.
    event: Waker,
    /// Transfers that the worker submits.
    worker_queue: SubmitQueue,
    /// By owner: transfers that threads of the owner's share submit, one batch at a time.
    owner_queues: Vec<SubmitQueue>,
    /// The number of operations in these queues.
    owners_staged: usize,
    /// The number of operations that the kernel has, as far as is known. Those that a thread has count as
    /// well.
    in_flight: usize,
    /// Small batches are submitted first ([`early_submit`]).
    early: bool,
}

/// A queue of operations that are submitted in order.
#[derive(Debug, Default)]
struct SubmitQueue {
    /// Slots of the operations. A thread has the first `with_thread`.
    staged: VecDeque<u32>,
    with_thread: usize,
    /// Operations were cancelled while a thread had some.
    has_cancelled: bool,
    /// The next batch's memory, made with the first.
    batch: Option<Box<Batch>>,
}

impl SubmitQueue {
    /// Returns the slot that was queued last, if neither the kernel nor a thread knows it.
    fn last(&self) -> Option<u32> {
        if self.staged.len() > self.with_thread { self.staged.back().copied() } else { None }
    }

    /// Ends cancelled operations that neither the kernel nor a thread knows. Returns their number.
    fn cancel(&mut self, ops: &mut Operations) -> usize {
        let before = self.staged.len();
        self.has_cancelled = self.with_thread > 0;
        for op_slot in self.staged.split_off(self.with_thread) {
            if ops.slots.is_cancelled(op_slot) {
                ops.fail(op_slot, Errno::CANCELED);
            } else {
                self.staged.push_back(op_slot);
            }
        }
        before - self.staged.len()
    }

    /// Returns whether operations wait, and no thread has any.
    fn can_submit(&self) -> bool {
        self.with_thread == 0 && !self.staged.is_empty()
    }
}

impl Aio {
    /// Opens a context for the slots that owners share, or for fewer if other programs have used up the
    /// system's limit (`fs.aio-max-nr`). Also returns the shares of the slots that there are. Its completions
    /// make `epoll` readable.
    pub(crate) fn open_within(wanted: &Shares, epoll: impl AsFd) -> Result<(Self, Shares), Error> {
        let failed = |step| move |source| Error::Aio { step, source };
        context::try_one().map_err(failed("io_submit"))?;
        let mut most = wanted.total();
        loop {
            match Self::open(most, &epoll) {
                Ok(aio) => return Ok((Self { early: true, ..aio }, wanted.within(most))),
                Err(e) if e.raw_os_error() == Some(Errno::AGAIN.raw_os_error()) && most > DEPTH_MIN => {
                    most = (most / 2).max(DEPTH_MIN);
                }
                Err(e) => return Err(failed("io_setup")(e)),
            }
        }
    }

    /// Opens a context for `depth` operations, for use beside io_uring. Its completions make `epoll`
    /// readable.
    ///
    /// It serves devices in RAM, which are done when `io_submit` returns, so it submits nothing early.
    pub(crate) fn open(depth: usize, epoll: impl AsFd) -> io::Result<Self> {
        let event = Waker::new()?;
        let context = Arc::new(Context::open(depth)?);
        epoll::add(epoll, event.as_fd(), epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        let worker_queue = SubmitQueue { staged: VecDeque::with_capacity(depth), ..SubmitQueue::default() };
        let (owner_queues, owners_staged, in_flight) = (Vec::new(), 0, 0);
        Ok(Self { context, event, worker_queue, owner_queues, owners_staged, in_flight, early: false })
    }

    /// Queues an operation. With an `owner`, a thread of the owner's share submits it.
    #[inline]
    pub(crate) fn queue(&mut self, op_slot: u32, owner: Option<u32>) {
        match owner {
            None => self.worker_queue.staged.push_back(op_slot),
            Some(owner) => self.queue_for(owner, op_slot),
        }
    }

    fn queue_for(&mut self, owner: u32, op_slot: u32) {
        if self.owner_queues.len() <= owner as usize {
            self.owner_queues.resize_with(owner as usize + 1, SubmitQueue::default);
        }
        self.owner_queues[owner as usize].staged.push_back(op_slot);
        self.owners_staged += 1;
    }

    /// Returns the slot that was queued last for the worker, or for the owner, if neither the kernel nor a
    /// thread knows it.
    pub(crate) fn last(&self, owner: Option<u32>) -> Option<u32> {
        match owner {
            None => self.worker_queue.last(),
            Some(owner) => self.owner_queues.get(owner as usize)?.last(),
        }
    }

    /// Returns whether the staged operations should be submitted before one more of an owner is staged. The
    /// owner has this many unfinished operations without that one.
    #[inline]
    pub(crate) fn is_due(&self, unfinished: usize) -> bool {
        let staged = self.worker_queue.staged.len();
        let in_kernel = unfinished.saturating_sub(staged).min(self.in_flight);
        self.early && early_submit::is_due(staged, in_kernel)
    }

    /// Returns whether operations wait for which the kernel had no room.
    pub(crate) fn needs_turn(&self) -> bool {
        self.worker_queue.can_submit()
            || (self.owners_staged > 0 && self.owner_queues.iter().any(SubmitQueue::can_submit))
    }

    /// Submits the worker's operations. Passes one batch of each owner to a thread.
    pub(crate) fn submit(&mut self, ops: &mut Operations) {
        if self.owners_staged > 0 {
            self.submit_for_owners(ops);
        }
        self.submit_own(ops);
    }

    fn submit_for_owners(&mut self, ops: &mut Operations) {
        for owner in 0..self.owner_queues.len() {
            let mut queue = std::mem::take(&mut self.owner_queues[owner]);
            if queue.can_submit() {
                let in_kernel = self.in_flight;
                let mut batch = self.next_batch(&mut queue, &mut ops.slots, &ops.files);
                batch.in_kernel = Some(in_kernel);
                ops.batches.to_submit.push((owner as u32, batch));
            }
            self.owner_queues[owner] = queue;
        }
    }

    /// Submits the worker's operations. The engine pauses if the kernel has no room for them.
    pub(crate) fn submit_own(&mut self, ops: &mut Operations) {
        if self.worker_queue.staged.is_empty() {
            return;
        }
        let mut queue = std::mem::take(&mut self.worker_queue);
        let mut had_room = true;
        while had_room && queue.can_submit() {
            let mut batch = self.next_batch(&mut queue, &mut ops.slots, &ops.files);
            let result = batch.submit();
            had_room = self.note_submitted(&mut queue, batch, result, ops);
        }
        self.worker_queue = queue;
        if !had_room {
            ops.files.pause_all();
        }
    }

    /// Notes the results of batches that threads have submitted for owners.
    fn take_submitted(&mut self, ops: &mut Operations) {
        let mut submitted = std::mem::take(&mut ops.batches.submitted);
        for Submitted { owner, batch, result } in submitted.drain(..) {
            let mut queue = std::mem::take(&mut self.owner_queues[owner as usize]);
            let before = queue.staged.len();
            let had_room = self.note_submitted(&mut queue, batch, result, ops);
            self.owners_staged -= before - queue.staged.len();
            self.owner_queues[owner as usize] = queue;
            if !had_room {
                ops.files.pause_all();
            }
        }
        ops.batches.submitted = submitted;
    }

    /// Describes the next operations of a queue to the kernel. They count as in flight.
    fn next_batch(&mut self, queue: &mut SubmitQueue, slots: &mut Slots, files: &Files) -> Box<Batch> {
        let mut batch = queue.batch.take().unwrap_or_else(|| Batch::new(self.context.clone()));
        let event_fd = self.event.as_fd().as_raw_fd();
        for (control, &op_slot) in batch.controls.iter_mut().zip(&queue.staged) {
            debug_assert!(slots.get_mut(op_slot).is_some(), "a staged operation has its slot");
            // The kernel refuses an operation without a file.
            let none = Control { fd: -1, ..Control::default() };
            let filled = slots.get_mut(op_slot).map_or(none, |operation| filled(operation, files));
            *control = Control { data: op_slot.into(), event_fd, ..filled };
        }
        batch.count = queue.staged.len().min(BATCH);
        queue.with_thread = batch.count;
        self.in_flight += batch.count;
        batch
    }

    /// Notes the result of a batch. Returns whether the kernel may take more now.
    fn note_submitted(
        &mut self,
        queue: &mut SubmitQueue,
        batch: Box<Batch>,
        result: Result<usize, Errno>,
        ops: &mut Operations,
    ) -> bool {
        let taken = result.unwrap_or(0).min(batch.count);
        queue.staged.drain(..taken);
        self.in_flight = self.in_flight.saturating_sub(batch.count - taken);
        queue.with_thread = 0;
        queue.batch = Some(batch);
        let had_room = match result {
            // If the kernel refuses a later operation of a batch, it returns `Ok`. So this also means
            // "later".
            Ok(taken) => taken > 0,
            // The error is that of the first operation, or there is no room yet.
            Err(Errno::INTR) => true,
            Err(Errno::AGAIN) => false,
            Err(errno) => {
                if let Some(op_slot) = queue.staged.pop_front() {
                    ops.refuse(op_slot, errno);
                }
                true
            }
        };
        if queue.has_cancelled {
            queue.cancel(ops);
        }
        had_room
    }

    /// Completes the operations that the kernel has done.
    #[inline]
    pub(crate) fn reap(&mut self, ops: &mut Operations, into: &mut Vec<Completion>) {
        if !ops.batches.submitted.is_empty() {
            self.take_submitted(ops);
        }
        // It can only fail for an invalid context.
        let _ = self.events(false, ops, into);
    }

    /// Waits until the kernel has done an operation, and completes it.
    pub(crate) fn wait(&mut self, ops: &mut Operations, into: &mut Vec<Completion>) -> Result<(), Errno> {
        self.events(true, ops, into)
    }

    fn events(
        &mut self,
        mut wait: bool,
        ops: &mut Operations,
        into: &mut Vec<Completion>,
    ) -> Result<(), Errno> {
        // Before the check for completions, because later ones signal again. Also with nothing in flight: the
        // kernel signals after it has shown a completion, which may have been taken by then.
        self.event.clear();
        if self.in_flight == 0 {
            return Ok(());
        }
        loop {
            let mut events = [Event::default(); BATCH];
            let count = match self.context.events(wait, &mut events) {
                Ok(count) => count,
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(errno),
            };
            for event in events.iter().take(count) {
                self.in_flight = self.in_flight.saturating_sub(1);
                let result = match event.result {
                    bytes @ 0.. => Ok(bytes as u32),
                    errno => Err(Errno::from_raw_os_error(-errno as i32)),
                };
                ops.complete(event.data as u32, result, into);
            }
            if count < BATCH {
                return Ok(());
            }
            wait = false;
        }
    }

    /// Ends cancelled operations that neither the kernel nor a thread knows.
    pub(crate) fn cancel(&mut self, ops: &mut Operations) {
        // Batches that threads have just returned.
        self.take_submitted(ops);
        self.worker_queue.cancel(ops);
        for queue in &mut self.owner_queues {
            self.owners_staged -= queue.cancel(ops);
        }
    }

    /// Discards operations that the kernel does not know. Nothing is submitted afterwards, and no thread has
    /// a batch of an owner any more.
    pub(crate) fn end(&mut self, ops: &mut Operations) {
        self.take_submitted(ops);
        self.owners_staged = 0;
        let staged = self.owner_queues.iter_mut().flat_map(|queue| queue.staged.drain(..));
        self.worker_queue.staged.drain(..).chain(staged).for_each(|op_slot| ops.discard(op_slot));
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }

    #[cfg(test)]
    pub(crate) fn staged(&self) -> usize {
        self.worker_queue.staged.len()
    }
}

/// Describes an operation to the kernel.
fn filled(operation: &mut InFlight, files: &Files) -> Control {
    // Without a file, the kernel refuses it with EBADF.
    let fd = files.get(operation.held).map_or(-1, |(file, ..)| file.as_raw_fd());
    let write = matches!(operation.op.kind, OpKind::Write { .. });
    let (opcode, buf, nbytes) = match (operation.view(), write) {
        (KernelBuffers::One(at, len), write) => {
            (if write { PWRITE } else { PREAD }, at as u64, len.min(BYTES_MAX) as u64)
        }
        (KernelBuffers::Many(at, count), write) => {
            (if write { PWRITEV } else { PREADV }, at as u64, count as u64)
        }
    };
    let rw_flags = rw_flags(operation) as u32;
    let flags = SIGNAL_EVENT;
    Control { rw_flags, opcode, fd, buf, nbytes, offset: operation.op.offset, flags, ..Control::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::shares::Shares;
    use crate::{AlignedBuf, Buffers, FileId, Op, Owner, Token};
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use std::fs::File;
    use std::os::fd::OwnedFd;
    use std::thread;

    struct Rig {
        aio: Aio,
        ops: Operations,
        file: FileId,
        _epoll: OwnedFd,
    }

    impl Rig {
        /// Makes a context with this many staged reads of the worker.
        fn new(staged: usize) -> Self {
            let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
            let aio = Aio::open(8, &epoll).unwrap();
            let mut ops = Operations::new(Shares::new(8, 0, 0));
            let file = ops.files.insert(Arc::new(File::open("/proc/self/exe").unwrap()), Owner::unique()).0;
            let mut rig = Self { aio, ops, file, _epoll: epoll };
            rig.stage(staged, None);
            rig
        }

        /// Stages this many reads.
        fn stage(&mut self, count: usize, owner: Option<u32>) {
            for _ in 0..count {
                let buffers = Buffers::Owned(AlignedBuf::new(512, 512).unwrap());
                let op = Op { file: self.file, kind: OpKind::Read, offset: 0, buffers };
                let held = self.ops.files.hold(self.file).unwrap();
                let operation = InFlight::new(Token::default(), held, op, false);
                self.aio.queue(self.ops.slots.insert(operation), owner);
            }
        }

        fn submit(&mut self) {
            self.aio.submit(&mut self.ops);
            assert!(!self.ops.files.any_paused() && !self.ops.needs_turn());
        }

        fn next_batch(&mut self) -> Box<Batch> {
            let mut queue = std::mem::take(&mut self.aio.worker_queue);
            let batch = self.aio.next_batch(&mut queue, &mut self.ops.slots, &self.ops.files);
            self.aio.worker_queue = queue;
            batch
        }

        fn note_submitted(&mut self, batch: Box<Batch>, result: Result<usize, Errno>) -> bool {
            let mut queue = std::mem::take(&mut self.aio.worker_queue);
            let more = self.aio.note_submitted(&mut queue, batch, result, &mut self.ops);
            assert!(!self.ops.needs_turn());
            self.aio.worker_queue = queue;
            more
        }

        fn is_readable(&self) -> bool {
            let mut event = [PollFd::new(&self.aio.event, PollFlags::IN)];
            poll(&mut event, Some(&Timespec::default())).unwrap() == 1
        }
    }

    impl Drop for Rig {
        /// Waits for the kernel, so that it has finished with the buffers.
        fn drop(&mut self) {
            if thread::panicking() {
                return std::mem::forget(std::mem::take(&mut self.ops.slots));
            }
            self.aio.end(&mut self.ops);
            while self.aio.in_flight() > 0 {
                self.aio.wait(&mut self.ops, &mut Vec::new()).unwrap();
            }
        }
    }

    /// An operation must not be merged with one that a thread is submitting.
    #[test]
    fn the_last_is_not_one_that_the_thread_has() {
        let mut rig = Rig::new(0);
        rig.stage(2, Some(0));
        assert_eq!((rig.aio.last(None), rig.aio.last(Some(0))), (None, Some(1)));
        rig.submit();
        assert_eq!((rig.aio.owner_queues[0].staged.len(), rig.aio.last(Some(0))), (2, None));
        rig.stage(1, Some(0));
        assert_eq!(rig.aio.last(Some(0)), Some(2));
        // In fact, the kernel does not know them.
        rig.aio.in_flight = 0;
    }

    /// Operations that the kernel has not taken are not submitted again at once, and are not lost.
    #[test]
    fn none_taken_means_later() {
        for later in [Ok(0), Err(Errno::AGAIN)] {
            let mut rig = Rig::new(3);
            let batch = rig.next_batch();
            assert_eq!((batch.count, rig.aio.in_flight()), (3, 3));
            assert!(!rig.note_submitted(batch, later));
            assert_eq!((rig.aio.worker_queue.staged.len(), rig.aio.in_flight()), (3, 0));
            rig.submit();
            assert_eq!((rig.aio.worker_queue.staged.len(), rig.aio.in_flight()), (0, 3));
        }
    }

    /// The kernel has taken some, or a signal has come before it took any. Then the others may be submitted
    /// at once.
    #[test]
    fn some_taken_means_more() {
        for (result, left) in [(Ok(2), 1), (Err(Errno::INTR), 3)] {
            let mut rig = Rig::new(3);
            let batch = rig.next_batch();
            assert!(rig.note_submitted(batch, result));
            assert_eq!((rig.aio.worker_queue.staged.len(), rig.aio.in_flight()), (left, 3 - left));
            // In fact, the kernel does not know them.
            rig.aio.in_flight = 0;
        }
    }

    /// Operations that a thread has when they are cancelled, and that the kernel does not take, are not
    /// submitted again.
    #[test]
    fn operations_that_a_thread_returns_are_cancelled() {
        for (result, left) in [(Ok(1), 2), (Err(Errno::AGAIN), 3), (Err(Errno::BADF), 3)] {
            let mut rig = Rig::new(3);
            let batch = rig.next_batch();
            rig.ops.cancel(rig.file);
            rig.aio.cancel(&mut rig.ops);
            assert_eq!((rig.aio.worker_queue.staged.len(), rig.ops.needs_turn()), (3, false));
            let mut queue = std::mem::take(&mut rig.aio.worker_queue);
            rig.aio.note_submitted(&mut queue, batch, result, &mut rig.ops);
            let mut done = Vec::new();
            rig.ops.reap_failed(&mut done);
            let cancelled = done.iter().filter(|done| done.result == Err(Errno::CANCELED)).count();
            let refused = usize::from(result == Err(Errno::BADF));
            assert_eq!((queue.staged.len(), done.len(), cancelled), (0, left, left - refused), "{result:?}");
            // In fact, the kernel does not know them.
            rig.aio.in_flight = 0;
        }
    }

    /// A signal that comes after its completion was taken is cleared, and does not wake the worker again and
    /// again.
    #[test]
    fn a_signal_with_nothing_in_flight_is_cleared() {
        let mut rig = Rig::new(0);
        rig.aio.event.wake();
        assert!(rig.is_readable());
        let mut done = Vec::new();
        rig.aio.reap(&mut rig.ops, &mut done);
        assert!(done.is_empty(), "nothing is in flight");
        assert!(!rig.is_readable());
    }
}
