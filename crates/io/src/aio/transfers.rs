//! Reads and writes by Linux AIO.
#![expect(unsafe_code, reason = "island: buffers handed to the kernel")]

use crate::aio::context::{
    BATCH, Batch, Context, Control, Event, PREAD, PREADV, PWRITE, PWRITEV, SIGNAL_EVENT,
};
use crate::early_submit;
use crate::files::Files;
use crate::op::{BYTES_MAX, OpKind, View};
use crate::operations::in_flight::{InFlight, rw_flags};
use crate::operations::slots::Slots;
use crate::submit_thread::SubmitThread;
use crate::submit_thread::handover::Submission;
use crate::threads::jobs::{Jobs, Submitted};
use crate::{CompletionMode, Waker};
use rustix::event::epoll;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

/// A context and what is in it. The operations themselves are in the engine's slots, by whose places they are known here.
#[derive(Debug)]
pub(crate) struct Transfers {
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
}

/// Operations that are submitted one after the other.
#[derive(Debug, Default)]
struct Lane {
    /// The first `handed` are with a thread.
    staged: VecDeque<u32>,
    handed: usize,
    /// For the next batch; made with the first.
    batch: Option<Box<Batch>>,
}

impl Lane {
    /// The place that was queued last, if nobody has been told of it.
    fn last(&self) -> Option<u32> {
        if self.staged.len() > self.handed { self.staged.back().copied() } else { None }
    }

    /// Whether operations wait, and none is with a thread.
    fn waits(&self) -> bool {
        self.handed == 0 && !self.staged.is_empty()
    }
}

impl Submission for Box<Batch> {
    type Result = Result<usize, Errno>;

    fn run(&mut self) -> Self::Result {
        // SAFETY: the buffers and the file of each belong to its slot, which keeps them unchanged until the completion has been
        // reaped; a dropped engine waits for this call, and for that, or leaks them.
        unsafe { self.submit() }
    }
}

impl Transfers {
    /// A context for `depth` operations, whose completions make `epoll` readable.
    pub(crate) fn open(depth: usize, completion: CompletionMode, epoll: impl AsFd) -> io::Result<Self> {
        let event = Waker::new()?;
        let context = Arc::new(Context::open(depth)?);
        let by_thread = completion == CompletionMode::Thread;
        let submitter = by_thread.then(|| SubmitThread::start(event.clone())).transpose()?;
        epoll::add(epoll, event.as_fd(), epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        let own = Lane { staged: VecDeque::with_capacity(depth), ..Lane::default() };
        Ok(Self { context, event, own, lanes: Vec::new(), in_lanes: 0, in_flight: 0, submitter })
    }

    pub(crate) fn queue(&mut self, place: u32) {
        self.own.staged.push_back(place);
    }

    /// For a thread of the owner's share.
    pub(crate) fn queue_for(&mut self, owner: u32, place: u32) {
        if self.lanes.len() <= owner as usize {
            self.lanes.resize_with(owner as usize + 1, Lane::default);
        }
        self.lanes[owner as usize].staged.push_back(place);
        self.in_lanes += 1;
    }

    /// The place that was queued last for the worker, or for a thread of the owner's share, if nobody has been told of it.
    pub(crate) fn last(&self, owner: Option<u32>) -> Option<u32> {
        match owner {
            None => self.own.last(),
            Some(owner) => self.lanes.get(owner as usize)?.last(),
        }
    }

    /// Whether what is staged is to be submitted before one more is.
    pub(crate) fn is_time(&self) -> bool {
        self.submitter.is_none() && early_submit::is_time(self.own.staged.len(), self.in_flight)
    }

    /// Whether operations wait that the kernel could not take.
    pub(crate) fn needs_turn(&self) -> bool {
        let own = !self.own.staged.is_empty()
            && !self.submitter.as_ref().is_some_and(|submitter| submitter.is_busy());
        own || (self.in_lanes > 0 && self.lanes.iter().any(Lane::waits))
    }

    /// Has threads submit what is staged for them, for each owner one batch at a time. May wait for these calls ([`crate::threads::submit_wait`]).
    pub(crate) fn submit_lanes(&mut self, slots: &mut Slots, files: &Files, jobs: &mut Jobs) {
        if self.in_lanes == 0 {
            return;
        }
        for owner in 0..self.lanes.len() {
            let mut lane = std::mem::take(&mut self.lanes[owner]);
            if lane.waits()
                && let given = self.in_flight
                && let Some(mut batch) = self.next_batch(&mut lane, slots, files)
            {
                batch.given = Some(given);
                jobs.submit_batch(owner as u32, batch);
            }
            self.lanes[owner] = lane;
        }
        // A thread that submits is there so that the worker need not wait.
        if self.submitter.is_none() {
            jobs.await_batches();
        }
    }

    /// A thread has submitted a batch of a lane. Operations that the kernel refused go to `refused` with its reason. Whether it had room.
    pub(crate) fn submitted(&mut self, back: Submitted, mut refused: impl FnMut(u32, Errno)) -> bool {
        let Submitted { owner, batch, result } = back;
        let mut lane = std::mem::take(&mut self.lanes[owner as usize]);
        let before = lane.staged.len();
        let had_room = self.took(&mut lane, batch, result, &mut refused);
        self.in_lanes -= before - lane.staged.len();
        self.lanes[owner as usize] = lane;
        had_room
    }

    /// Starts what is staged. Operations that the kernel refuses go to `refused` with its reason. Whether it had room for all that
    /// it was told of.
    pub(crate) fn submit(
        &mut self,
        slots: &mut Slots,
        files: &Files,
        mut refused: impl FnMut(u32, Errno),
    ) -> bool {
        let mut own = std::mem::take(&mut self.own);
        let had_room = self.submit_own(&mut own, slots, files, &mut refused);
        self.own = own;
        had_room
    }

    fn submit_own(
        &mut self,
        own: &mut Lane,
        slots: &mut Slots,
        files: &Files,
        refused: &mut impl FnMut(u32, Errno),
    ) -> bool {
        if self.submitter.is_some() {
            if let Some((batch, result)) = self.submitter.as_ref().and_then(|submitter| submitter.take())
                && !self.took(own, batch, result, refused)
            {
                return false;
            }
            // There is one batch: where none is handed out, the worker's end is clear.
            if own.waits()
                && let Some(batch) = self.next_batch(own, slots, files)
                && let Some(submitter) = &self.submitter
            {
                submitter.hand_over(batch);
            }
            return true;
        }
        while own.waits()
            && let Some(mut batch) = self.next_batch(own, slots, files)
        {
            let result = batch.run();
            if !self.took(own, batch, result, refused) {
                return false;
            }
        }
        true
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

    /// What came of a batch: whether the kernel may take more now.
    fn took(
        &mut self,
        lane: &mut Lane,
        batch: Box<Batch>,
        result: Result<usize, Errno>,
        refused: &mut impl FnMut(u32, Errno),
    ) -> bool {
        let taken = result.unwrap_or(0).min(batch.count);
        lane.staged.drain(..taken);
        self.in_flight = self.in_flight.saturating_sub(batch.count - taken);
        lane.handed = 0;
        lane.batch = Some(batch);
        match result {
            // Not the first of a batch is refused with `Ok`, so this is "later" as well.
            Ok(taken) => taken > 0,
            // The error is that of the first, or there is no room yet.
            Err(Errno::INTR) => true,
            Err(Errno::AGAIN) => false,
            Err(errno) => {
                if let Some(place) = lane.staged.pop_front() {
                    refused(place, errno);
                }
                true
            }
        }
    }

    /// Calls `done` for each operation that has completed. Waits for one at least if `wait`; the error of a wait that cannot
    /// be.
    pub(crate) fn reap(
        &mut self,
        wait: bool,
        mut done: impl FnMut(u32, Result<u32, Errno>),
    ) -> Result<(), Errno> {
        // Before the look at what has completed: what comes after it signals again. Also with nothing in flight: the kernel
        // signals after it has shown a completion, which may have been taken by then.
        self.event.clear();
        if self.in_flight == 0 {
            return Ok(());
        }
        let mut wait = wait;
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
                done(event.data as u32, result);
            }
            if count < BATCH {
                return Ok(());
            }
            wait = false;
        }
    }

    /// Forgets what the kernel has not been told of, and returns the places. Nothing is submitted afterwards, and no thread has a batch of
    /// a lane any more.
    pub(crate) fn take_staged(&mut self) -> impl Iterator<Item = u32> + '_ {
        if let Some((batch, result)) = self.submitter.take().and_then(|mut submitter| submitter.finish()) {
            let mut own = std::mem::take(&mut self.own);
            let mut refused = None;
            self.took(&mut own, batch, result, &mut |place, _| refused = Some(place));
            own.staged.extend(refused);
            self.own = own;
        }
        self.in_lanes = 0;
        let lanes = self.lanes.iter_mut().flat_map(|lane| lane.staged.drain(..));
        self.own.staged.drain(..).chain(lanes)
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
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
        transfers: Transfers,
        slots: Slots,
        files: Files,
        _epoll: OwnedFd,
    }

    impl Rig {
        /// With so many reads staged.
        fn new(completion: CompletionMode, staged: usize) -> Self {
            let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
            let mut transfers = Transfers::open(8, completion, &epoll).unwrap();
            let (mut slots, mut files) = (Slots::new(8), Files::new(Shares::new(8, 0, 0)));
            let file = files.insert(Arc::new(File::open("/proc/self/exe").unwrap()), Owner::unique()).0;
            for _ in 0..staged {
                let buffers = Buffers::Owned(AlignedBuf::new(512, 512).unwrap());
                let op = Op { file, kind: OpKind::Read, offset: 0, buffers };
                let operation = InFlight::new(Token::default(), files.hold(file), op, false);
                transfers.queue(slots.insert(operation));
            }
            Self { transfers, slots, files, _epoll: epoll }
        }

        fn submit(&mut self) {
            assert!(self.transfers.submit(&mut self.slots, &self.files, |_, errno| panic!("{errno}")));
        }

        fn next_batch(&mut self) -> Box<Batch> {
            let mut own = std::mem::take(&mut self.transfers.own);
            let batch = self.transfers.next_batch(&mut own, &mut self.slots, &self.files).unwrap();
            self.transfers.own = own;
            batch
        }

        fn took(&mut self, batch: Box<Batch>, result: Result<usize, Errno>) -> bool {
            let mut own = std::mem::take(&mut self.transfers.own);
            let more = self.transfers.took(&mut own, batch, result, &mut |_, errno| panic!("{errno}"));
            self.transfers.own = own;
            more
        }

        fn is_readable(&self) -> bool {
            let mut event = [PollFd::new(&self.transfers.event, PollFlags::IN)];
            poll(&mut event, Some(&Timespec::default())).unwrap() == 1
        }
    }

    impl Drop for Rig {
        /// The kernel has finished with the buffers before they go.
        fn drop(&mut self) {
            if thread::panicking() {
                return std::mem::forget(std::mem::take(&mut self.slots));
            }
            drop(self.transfers.take_staged());
            while self.transfers.in_flight() > 0 {
                self.transfers.reap(true, |_, _| {}).unwrap();
            }
        }
    }

    /// Nothing may be merged with what a thread is telling the kernel of at this moment.
    #[test]
    fn the_last_is_not_one_that_the_thread_has() {
        let mut rig = Rig::new(CompletionMode::Thread, 2);
        assert_eq!(rig.transfers.last(None), Some(1));
        rig.submit();
        assert_eq!((rig.transfers.own.staged.len(), rig.transfers.last(None)), (2, None));
        rig.transfers.queue(7);
        assert_eq!(rig.transfers.last(None), Some(7));
        rig.transfers.own.staged.pop_back();
    }

    /// Nothing may be asked again at once that the kernel has not taken, and it is not lost.
    #[test]
    fn none_taken_means_later() {
        for later in [Ok(0), Err(Errno::AGAIN)] {
            let mut rig = Rig::new(CompletionMode::Worker, 3);
            let batch = rig.next_batch();
            assert_eq!((batch.count, rig.transfers.in_flight()), (3, 3));
            assert!(!rig.took(batch, later));
            assert_eq!((rig.transfers.own.staged.len(), rig.transfers.in_flight()), (3, 0));
            rig.submit();
            assert_eq!((rig.transfers.own.staged.len(), rig.transfers.in_flight()), (0, 3));
        }
    }

    /// The kernel has taken some, or a signal has come before it took any: it may be asked for the others at once.
    #[test]
    fn some_taken_means_more() {
        for (result, left) in [(Ok(2), 1), (Err(Errno::INTR), 3)] {
            let mut rig = Rig::new(CompletionMode::Worker, 3);
            let batch = rig.next_batch();
            assert!(rig.took(batch, result));
            assert_eq!((rig.transfers.own.staged.len(), rig.transfers.in_flight()), (left, 3 - left));
            // Nobody has told the kernel of them in fact.
            rig.transfers.in_flight = 0;
        }
    }

    /// A signal that comes late, when its completion has been taken, wakes nobody again and again.
    #[test]
    fn a_signal_with_nothing_in_flight_is_cleared() {
        let mut rig = Rig::new(CompletionMode::Worker, 0);
        rig.transfers.event.wake();
        assert!(rig.is_readable());
        rig.transfers.reap(false, |_, _| panic!("nothing is in flight")).unwrap();
        assert!(!rig.is_readable());
    }
}
