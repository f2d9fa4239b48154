//! The back-end of Linux AIO: for hosts that forbid io_uring, and for files on which io_uring is slow.
//!
//! `io_submit` only starts a transfer, and returns, where the file is open for direct I/O; on any other it
//! does all of it. So transfers of other files, and what AIO does not do, go to threads, as does what could
//! wait ([`crate::files::route`]).
//!
//! It cannot cancel: the kernel has no `io_cancel` for transfers of files.

pub(crate) mod batch;
pub(crate) mod context;

use crate::early_submit;
use crate::error::Error;
use crate::files::Files;
use crate::files::shares::Shares;
use crate::op::{BYTES_MAX, Completion, OpKind, View};
use crate::operations::Operations;
use crate::operations::in_flight::{InFlight, rw_flags};
use crate::operations::slots::Slots;
use crate::options::CompletionMode;
use crate::submit_thread::SubmitThread;
use crate::submit_thread::handover::Submission;
use crate::waker::Waker;
use batch::{Batch, Submitted};
use context::{BATCH, Context, Control, Event, PREAD, PREADV, PWRITE, PWRITEV, SIGNAL_EVENT};
use rustix::event::epoll;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

/// A context that is smaller than this is not worth having.
const DEPTH_MIN: usize = 8;

/// A context and what is in it. The operations themselves are in the engine's slots, by whose places they are
/// known here.
#[derive(Debug)]
pub(crate) struct Aio {
    context: Arc<Context>,
    /// Signalled with each completion, and when a batch comes back from the thread that submits.
    event: Waker,
    /// Transfers that the worker submits, or the thread beside it.
    own: Lane,
    /// By owner: what threads of the owner's share submit, one batch at a time.
    lanes: Vec<Lane>,
    /// Operations in these lanes.
    in_lanes: usize,
    /// With the kernel, as far as is known: those that are with a thread are counted.
    in_flight: usize,
    submitter: Option<SubmitThread<Box<Batch>>>,
    /// Small batches go first ([`early_submit`]).
    early: bool,
}

/// Operations that are submitted one after the other.
#[derive(Debug, Default)]
struct Lane {
    /// The first `handed` are with a thread.
    staged: VecDeque<u32>,
    handed: usize,
    /// Operations were cancelled while a thread had some.
    has_cancelled: bool,
    /// For the next batch; made with the first.
    batch: Option<Box<Batch>>,
}

impl Lane {
    /// The place that was queued last, if nobody has been told of it.
    fn last(&self) -> Option<u32> {
        if self.staged.len() > self.handed { self.staged.back().copied() } else { None }
    }

    /// Ends cancelled operations of which nobody has been told; returns how many went.
    fn cancel(&mut self, ops: &mut Operations) -> usize {
        let before = self.staged.len();
        self.has_cancelled = self.handed > 0;
        for place in self.staged.split_off(self.handed) {
            if ops.slots.is_cancelled(place) {
                ops.fail(place, Errno::CANCELED);
            } else {
                self.staged.push_back(place);
            }
        }
        before - self.staged.len()
    }

    /// Whether operations wait, and none is with a thread.
    fn waits(&self) -> bool {
        self.handed == 0 && !self.staged.is_empty()
    }
}

impl Aio {
    /// Opens a context for the places that owners share, or for fewer where others have used up what the
    /// system has (`fs.aio-max-nr`). Returns it with the shares of those that there are. Its completions make
    /// `epoll` readable.
    pub(crate) fn open_within(
        wanted: &Shares,
        completion: CompletionMode,
        epoll: impl AsFd,
    ) -> Result<(Self, Shares), Error> {
        let failed = |step| move |source| Error::Aio { step, source };
        context::try_one().map_err(failed("io_submit"))?;
        let mut most = wanted.total();
        loop {
            match Self::open(most, completion, &epoll) {
                Ok(aio) => return Ok((Self { early: true, ..aio }, wanted.within(most))),
                Err(e) if e.raw_os_error() == Some(Errno::AGAIN.raw_os_error()) && most > DEPTH_MIN => {
                    most = (most / 2).max(DEPTH_MIN);
                }
                Err(e) => return Err(failed("io_setup")(e)),
            }
        }
    }

    /// Opens a context for `depth` operations that is to be used beside io_uring. Its completions make
    /// `epoll` readable.
    ///
    /// It serves devices in RAM, which are done when `io_submit` returns, so it submits nothing early.
    pub(crate) fn open(depth: usize, completion: CompletionMode, epoll: impl AsFd) -> io::Result<Self> {
        let event = Waker::new()?;
        let context = Arc::new(Context::open(depth)?);
        let by_thread = completion == CompletionMode::Thread;
        let submitter = by_thread.then(|| SubmitThread::start(event.clone())).transpose()?;
        epoll::add(epoll, event.as_fd(), epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        let own = Lane { staged: VecDeque::with_capacity(depth), ..Lane::default() };
        let (lanes, in_lanes, in_flight) = (Vec::new(), 0, 0);
        Ok(Self { context, event, own, lanes, in_lanes, in_flight, submitter, early: false })
    }

    /// Takes an operation, for a thread of the owner's share where there is one.
    #[inline]
    pub(crate) fn queue(&mut self, place: u32, owner: Option<u32>) {
        match owner {
            None => self.own.staged.push_back(place),
            Some(owner) => self.queue_for(owner, place),
        }
    }

    fn queue_for(&mut self, owner: u32, place: u32) {
        if self.lanes.len() <= owner as usize {
            self.lanes.resize_with(owner as usize + 1, Lane::default);
        }
        self.lanes[owner as usize].staged.push_back(place);
        self.in_lanes += 1;
    }

    /// Returns the place that was queued last for the worker, or for a thread of the owner's share, if the
    /// kernel and threads were not told of it.
    pub(crate) fn last(&self, owner: Option<u32>) -> Option<u32> {
        match owner {
            None => self.own.last(),
            Some(owner) => self.lanes.get(owner as usize)?.last(),
        }
    }

    /// Returns whether the staged operations are to be submitted before one more of an owner is, who has so many
    /// unfinished ones without that.
    #[inline]
    pub(crate) fn is_time(&self, unfinished: usize) -> bool {
        let staged = self.own.staged.len();
        let given = unfinished.saturating_sub(staged).min(self.in_flight);
        self.early && self.submitter.is_none() && early_submit::is_time(staged, given)
    }

    /// Returns whether operations wait that the kernel could not take.
    pub(crate) fn needs_turn(&self) -> bool {
        let own = !self.own.staged.is_empty()
            && !self.submitter.as_ref().is_some_and(|submitter| submitter.is_busy());
        own || (self.in_lanes > 0 && self.lanes.iter().any(Lane::waits))
    }

    /// Starts what is staged; has threads start what is staged for them, for each owner one batch at a time.
    pub(crate) fn submit(&mut self, ops: &mut Operations) {
        if self.in_lanes > 0 {
            self.submit_lanes(ops);
        }
        self.submit_own(ops);
    }

    fn submit_lanes(&mut self, ops: &mut Operations) {
        for owner in 0..self.lanes.len() {
            let mut lane = std::mem::take(&mut self.lanes[owner]);
            if lane.waits()
                && let given = self.in_flight
                && let Some(mut batch) = self.next_batch(&mut lane, &mut ops.slots, &ops.files)
            {
                batch.given = Some(given);
                ops.batches.to_submit.push((owner as u32, batch));
            }
            self.lanes[owner] = lane;
        }
    }

    /// Starts what is staged for the worker. The engine pauses where the kernel has no room for it.
    pub(crate) fn submit_own(&mut self, ops: &mut Operations) {
        if self.own.staged.is_empty() {
            return;
        }
        let mut own = std::mem::take(&mut self.own);
        let had_room = match self.submitter {
            Some(_) => self.submit_by_thread(&mut own, ops),
            None => self.submit_by_worker(&mut own, ops),
        };
        self.own = own;
        if !had_room {
            ops.files.stall_all();
        }
    }

    fn submit_by_worker(&mut self, own: &mut Lane, ops: &mut Operations) -> bool {
        while own.waits()
            && let Some(mut batch) = self.next_batch(own, &mut ops.slots, &ops.files)
        {
            let result = batch.run();
            if !self.took(own, batch, result, ops) {
                return false;
            }
        }
        true
    }

    fn submit_by_thread(&mut self, own: &mut Lane, ops: &mut Operations) -> bool {
        if let Some((batch, result)) = self.submitter.as_ref().and_then(|submitter| submitter.take())
            && !self.took(own, batch, result, ops)
        {
            return false;
        }
        // There is one batch: where none is handed out, the worker's end is clear.
        if own.waits()
            && let Some(batch) = self.next_batch(own, &mut ops.slots, &ops.files)
            && let Some(submitter) = &self.submitter
        {
            submitter.hand_over(batch);
        }
        true
    }

    /// Notes the results of batches of lanes that threads have submitted.
    fn take_submitted(&mut self, ops: &mut Operations) {
        let mut submitted = std::mem::take(&mut ops.batches.submitted);
        for Submitted { owner, batch, result } in submitted.drain(..) {
            let mut lane = std::mem::take(&mut self.lanes[owner as usize]);
            let before = lane.staged.len();
            let had_room = self.took(&mut lane, batch, result, ops);
            self.in_lanes -= before - lane.staged.len();
            self.lanes[owner as usize] = lane;
            if !had_room {
                ops.files.stall_all();
            }
        }
        ops.batches.submitted = submitted;
    }

    /// Describes to the kernel what comes next of a lane that has something. It counts as being in flight.
    fn next_batch(&mut self, lane: &mut Lane, slots: &mut Slots, files: &Files) -> Option<Box<Batch>> {
        let mut batch = lane.batch.take().unwrap_or_else(|| Batch::new(self.context.clone()));
        let event_fd = self.event.as_fd().as_raw_fd();
        for (control, &place) in batch.controls.iter_mut().zip(&lane.staged) {
            debug_assert!(slots.get_mut(place).is_some(), "a staged operation has its slot");
            // The kernel refuses one without a file.
            let none = Control { fd: -1, ..Control::default() };
            let filled = slots.get_mut(place).map_or(none, |operation| filled(operation, files));
            *control = Control { data: place.into(), event_fd, ..filled };
        }
        batch.count = lane.staged.len().min(BATCH);
        lane.handed = batch.count;
        self.in_flight += batch.count;
        Some(batch)
    }

    /// Notes the result of a batch. Returns whether the kernel may take more now.
    fn took(
        &mut self,
        lane: &mut Lane,
        batch: Box<Batch>,
        result: Result<usize, Errno>,
        ops: &mut Operations,
    ) -> bool {
        let taken = result.unwrap_or(0).min(batch.count);
        lane.staged.drain(..taken);
        self.in_flight = self.in_flight.saturating_sub(batch.count - taken);
        lane.handed = 0;
        lane.batch = Some(batch);
        let had_room = match result {
            // Not the first of a batch is refused with `Ok`, so this is "later" as well.
            Ok(taken) => taken > 0,
            // The error is that of the first, or there is no room yet.
            Err(Errno::INTR) => true,
            Err(Errno::AGAIN) => false,
            Err(errno) => {
                if let Some(place) = lane.staged.pop_front() {
                    ops.refuse(place, errno);
                }
                true
            }
        };
        if lane.has_cancelled {
            lane.cancel(ops);
        }
        had_room
    }

    /// Completes what the kernel has done.
    #[inline]
    pub(crate) fn reap(&mut self, ops: &mut Operations, into: &mut Vec<Completion>) {
        if !ops.batches.submitted.is_empty() {
            self.take_submitted(ops);
        }
        // Its only failure is a context that is no context.
        let _ = self.events(false, ops, into);
    }

    /// Waits until the kernel has done something, and completes that.
    pub(crate) fn wait(&mut self, ops: &mut Operations, into: &mut Vec<Completion>) -> Result<(), Errno> {
        self.events(true, ops, into)
    }

    fn events(
        &mut self,
        mut wait: bool,
        ops: &mut Operations,
        into: &mut Vec<Completion>,
    ) -> Result<(), Errno> {
        // Before the look at what has completed: what comes after it signals again. Also with nothing in
        // flight: the kernel signals after it has shown a completion, which may have been taken by then.
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

    /// Ends cancelled operations of which neither the kernel nor a thread has been told.
    pub(crate) fn cancel(&mut self, ops: &mut Operations) {
        // Batches that threads have just given back.
        self.take_submitted(ops);
        self.own.cancel(ops);
        for lane in &mut self.lanes {
            self.in_lanes -= lane.cancel(ops);
        }
    }

    /// Gives up what the kernel has not been told of. Nothing is submitted afterwards, and no thread has a
    /// batch of a lane any more.
    pub(crate) fn end(&mut self, ops: &mut Operations) {
        self.take_submitted(ops);
        if let Some((batch, result)) = self.submitter.take().and_then(|mut submitter| submitter.finish()) {
            let mut own = std::mem::take(&mut self.own);
            self.took(&mut own, batch, result, ops);
            self.own = own;
        }
        self.in_lanes = 0;
        let lanes = self.lanes.iter_mut().flat_map(|lane| lane.staged.drain(..));
        self.own.staged.drain(..).chain(lanes).for_each(|place| ops.discard(place));
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }

    #[cfg(test)]
    pub(crate) fn staged(&self) -> usize {
        self.own.staged.len()
    }
}

/// What to tell the kernel about an operation.
fn filled(operation: &mut InFlight, files: &Files) -> Control {
    // Without a file the kernel refuses it with EBADF.
    let fd = files.get(operation.held).map_or(-1, |(file, ..)| file.as_raw_fd());
    let write = matches!(operation.op.kind, OpKind::Write { .. });
    let (opcode, buf, nbytes) = match (operation.view(), write) {
        (View::One(at, len), write) => {
            (if write { PWRITE } else { PREAD }, at as u64, len.min(BYTES_MAX) as u64)
        }
        (View::Many(at, count), write) => (if write { PWRITEV } else { PREADV }, at as u64, count as u64),
    };
    let rw_flags = rw_flags(operation) as u32;
    let flags = SIGNAL_EVENT;
    Control { rw_flags, opcode, fd, buf, nbytes, offset: operation.op.offset, flags, ..Control::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::shares::Shares;
    use crate::{AlignedBuf, Buffers, Op, Owner, Token};
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use std::fs::File;
    use std::os::fd::OwnedFd;
    use std::thread;

    struct Rig {
        aio: Aio,
        ops: Operations,
        _epoll: OwnedFd,
    }

    impl Rig {
        /// With so many reads staged.
        fn new(completion: CompletionMode, staged: usize) -> Self {
            let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
            let mut aio = Aio::open(8, completion, &epoll).unwrap();
            let mut ops = Operations::new(Shares::new(8, 0, 0));
            let file = ops.files.insert(Arc::new(File::open("/proc/self/exe").unwrap()), Owner::unique()).0;
            for _ in 0..staged {
                let buffers = Buffers::Owned(AlignedBuf::new(512, 512).unwrap());
                let op = Op { file, kind: OpKind::Read, offset: 0, buffers };
                let operation = InFlight::new(Token::default(), ops.files.hold(file).unwrap(), op, false);
                aio.queue(ops.slots.insert(operation), None);
            }
            Self { aio, ops, _epoll: epoll }
        }

        fn submit(&mut self) {
            self.aio.submit(&mut self.ops);
            assert!(!self.ops.files.any_stalled() && !self.ops.needs_turn());
        }

        fn next_batch(&mut self) -> Box<Batch> {
            let mut own = std::mem::take(&mut self.aio.own);
            let batch = self.aio.next_batch(&mut own, &mut self.ops.slots, &self.ops.files).unwrap();
            self.aio.own = own;
            batch
        }

        fn took(&mut self, batch: Box<Batch>, result: Result<usize, Errno>) -> bool {
            let mut own = std::mem::take(&mut self.aio.own);
            let more = self.aio.took(&mut own, batch, result, &mut self.ops);
            assert!(!self.ops.needs_turn());
            self.aio.own = own;
            more
        }

        fn is_readable(&self) -> bool {
            let mut event = [PollFd::new(&self.aio.event, PollFlags::IN)];
            poll(&mut event, Some(&Timespec::default())).unwrap() == 1
        }
    }

    impl Drop for Rig {
        /// The kernel has finished with the buffers before they go.
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

    /// Nothing may be merged with what a thread is telling the kernel of at this moment.
    #[test]
    fn the_last_is_not_one_that_the_thread_has() {
        let mut rig = Rig::new(CompletionMode::Thread, 2);
        assert_eq!(rig.aio.last(None), Some(1));
        rig.submit();
        assert_eq!((rig.aio.own.staged.len(), rig.aio.last(None)), (2, None));
        rig.aio.queue(7, None);
        assert_eq!(rig.aio.last(None), Some(7));
        rig.aio.own.staged.pop_back();
    }

    /// Nothing may be asked again at once that the kernel has not taken, and it is not lost.
    #[test]
    fn none_taken_means_later() {
        for later in [Ok(0), Err(Errno::AGAIN)] {
            let mut rig = Rig::new(CompletionMode::Worker, 3);
            let batch = rig.next_batch();
            assert_eq!((batch.count, rig.aio.in_flight()), (3, 3));
            assert!(!rig.took(batch, later));
            assert_eq!((rig.aio.own.staged.len(), rig.aio.in_flight()), (3, 0));
            rig.submit();
            assert_eq!((rig.aio.own.staged.len(), rig.aio.in_flight()), (0, 3));
        }
    }

    /// The kernel has taken some, or a signal has come before it took any: it may be asked for the others at
    /// once.
    #[test]
    fn some_taken_means_more() {
        for (result, left) in [(Ok(2), 1), (Err(Errno::INTR), 3)] {
            let mut rig = Rig::new(CompletionMode::Worker, 3);
            let batch = rig.next_batch();
            assert!(rig.took(batch, result));
            assert_eq!((rig.aio.own.staged.len(), rig.aio.in_flight()), (left, 3 - left));
            // Nobody has told the kernel of them in fact.
            rig.aio.in_flight = 0;
        }
    }

    /// Operations that a thread has when they are cancelled, and that the kernel does not take, are not
    /// submitted again.
    #[test]
    fn what_a_thread_brings_back_is_cancelled() {
        for (result, left) in [(Ok(1), 2), (Err(Errno::AGAIN), 3), (Err(Errno::BADF), 3)] {
            let mut rig = Rig::new(CompletionMode::Worker, 3);
            let batch = rig.next_batch();
            let file = rig.ops.slots.get_mut(0).unwrap().op.file;
            rig.ops.cancel(file);
            rig.aio.cancel(&mut rig.ops);
            assert_eq!((rig.aio.own.staged.len(), rig.ops.needs_turn()), (3, false));
            let mut own = std::mem::take(&mut rig.aio.own);
            rig.aio.took(&mut own, batch, result, &mut rig.ops);
            let mut done = Vec::new();
            rig.ops.reap_failed(&mut done);
            let cancelled = done.iter().filter(|done| done.result == Err(Errno::CANCELED)).count();
            let refused = usize::from(result == Err(Errno::BADF));
            assert_eq!((own.staged.len(), done.len(), cancelled), (0, left, left - refused), "{result:?}");
            // Nobody has told the kernel of them in fact.
            rig.aio.in_flight = 0;
        }
    }

    /// A signal that comes late, when its completion has been taken, wakes nobody again and again.
    #[test]
    fn a_signal_with_nothing_in_flight_is_cleared() {
        let mut rig = Rig::new(CompletionMode::Worker, 0);
        rig.aio.event.wake();
        assert!(rig.is_readable());
        let mut done = Vec::new();
        rig.aio.reap(&mut rig.ops, &mut done);
        assert!(done.is_empty(), "nothing is in flight");
        assert!(!rig.is_readable());
    }
}
