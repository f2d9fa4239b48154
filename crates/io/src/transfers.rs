//! Reads and writes by Linux AIO.
#![expect(unsafe_code, reason = "island: buffers handed to the kernel")]

use crate::ahead;
use crate::desk::Call;
use crate::files::Files;
use crate::kernel_aio::{
    BATCH, Batch, Context, Control, Event, PREAD, PREADV, PWRITE, PWRITEV, SIGNAL_EVENT,
};
use crate::op::{BYTES_MAX, OpKind, View};
use crate::slots::{InFlight, Slots};
use crate::submitter::SubmitThread;
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
    /// The first `handed` are with that thread.
    staged: VecDeque<u32>,
    handed: usize,
    /// With the kernel, as far as is known: those that are with the thread are counted.
    in_flight: usize,
    /// For the next batch.
    batch: Option<Box<Batch>>,
    submitter: Option<SubmitThread<Box<Batch>>>,
}

impl Call for Box<Batch> {
    type Result = Result<usize, Errno>;

    fn make(&mut self) -> Self::Result {
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
        let batch = Some(Batch::new(context.clone()));
        let staged = VecDeque::with_capacity(depth);
        Ok(Self { context, event, staged, handed: 0, in_flight: 0, batch, submitter })
    }

    pub(crate) fn queue(&mut self, place: u32) {
        self.staged.push_back(place);
    }

    /// The place that was queued last, if nobody has been told of it.
    pub(crate) fn last(&self) -> Option<u32> {
        if self.staged.len() > self.handed { self.staged.back().copied() } else { None }
    }

    /// Whether what is staged is to be submitted before one more is.
    pub(crate) fn is_time(&self) -> bool {
        self.submitter.is_none() && ahead::is_time(self.staged.len(), self.in_flight)
    }

    /// Whether operations wait that the kernel could not take.
    pub(crate) fn needs_turn(&self) -> bool {
        !self.staged.is_empty() && !self.submitter.as_ref().is_some_and(|submitter| submitter.is_busy())
    }

    /// Starts what is staged. Operations that the kernel refuses go to `refused` with its reason. Whether it had room for all that
    /// it was told of.
    pub(crate) fn submit(
        &mut self,
        slots: &mut Slots,
        files: &Files,
        mut refused: impl FnMut(u32, Errno),
    ) -> bool {
        if let Some(submitter) = &self.submitter {
            if let Some((batch, result)) = submitter.take()
                && !self.took(batch, result, &mut refused)
            {
                return false;
            }
            // There is one batch: where it is here, nothing lies on the desk.
            if !self.staged.is_empty()
                && let Some(batch) = self.next_batch(slots, files)
                && let Some(submitter) = &self.submitter
            {
                submitter.ask(batch);
            }
            return true;
        }
        while !self.staged.is_empty()
            && let Some(mut batch) = self.next_batch(slots, files)
        {
            let result = batch.make();
            if !self.took(batch, result, &mut refused) {
                return false;
            }
        }
        true
    }

    /// Describes to the kernel what comes next. It counts as being in flight.
    fn next_batch(&mut self, slots: &mut Slots, files: &Files) -> Option<Box<Batch>> {
        let mut batch = self.batch.take()?;
        let event_fd = self.event.as_fd().as_raw_fd();
        for (control, &place) in batch.controls.iter_mut().zip(&self.staged) {
            debug_assert!(slots.get_mut(place).is_some(), "a staged operation has its slot");
            // The kernel refuses one without a file.
            let none = Control { fd: -1, ..Control::default() };
            let filled = slots.get_mut(place).map_or(none, |operation| filled(operation, files));
            *control = Control { data: place.into(), event_fd, ..filled };
        }
        batch.count = self.staged.len().min(BATCH);
        self.handed = batch.count;
        self.in_flight += batch.count;
        Some(batch)
    }

    /// What came of a batch: whether the kernel may take more now.
    fn took(
        &mut self,
        batch: Box<Batch>,
        result: Result<usize, Errno>,
        refused: &mut impl FnMut(u32, Errno),
    ) -> bool {
        let taken = result.unwrap_or(0).min(batch.count);
        self.staged.drain(..taken);
        self.in_flight = self.in_flight.saturating_sub(batch.count - taken);
        self.handed = 0;
        self.batch = Some(batch);
        match result {
            // Not the first of a batch is refused with `Ok`, so this is "later" as well.
            Ok(taken) => taken > 0,
            // The error is that of the first, or there is no room yet.
            Err(Errno::INTR) => true,
            Err(Errno::AGAIN) => false,
            Err(errno) => {
                if let Some(place) = self.staged.pop_front() {
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

    /// Forgets what the kernel has not been told of, and returns the places. Nothing is submitted afterwards.
    pub(crate) fn take_staged(&mut self) -> impl Iterator<Item = u32> + '_ {
        if let Some((batch, result)) = self.submitter.take().and_then(|mut submitter| submitter.finish()) {
            let mut refused = None;
            self.took(batch, result, &mut |place, _| refused = Some(place));
            self.staged.extend(refused);
        }
        self.staged.drain(..)
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
    let durable = operation.op.kind == OpKind::Write { durable: true };
    let (opcode, buf, nbytes) = match (operation.view(), write) {
        (View::One(at, len), write) => {
            (if write { PWRITE } else { PREAD }, at as u64, len.min(BYTES_MAX) as u64)
        }
        (View::Many(at, count), write) => (if write { PWRITEV } else { PREADV }, at as u64, count as u64),
    };
    let rw_flags = if durable { libc::RWF_DSYNC as u32 } else { 0 };
    let flags = SIGNAL_EVENT;
    Control { rw_flags, opcode, fd, buf, nbytes, offset: operation.op.offset, flags, ..Control::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AlignedBuf, Buffers, Op, Token};
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
            let (mut slots, mut files) = (Slots::new(8), Files::default());
            let file = files.insert(Arc::new(File::open("/proc/self/exe").unwrap())).0;
            for _ in 0..staged {
                let buffers = Buffers::Owned(AlignedBuf::new(512, 512).unwrap());
                let op = Op { file, kind: OpKind::Read, offset: 0, buffers };
                let operation = InFlight::new(Token::default(), files.hold(file), op);
                transfers.queue(slots.insert(operation));
            }
            Self { transfers, slots, files, _epoll: epoll }
        }

        fn submit(&mut self) {
            assert!(self.transfers.submit(&mut self.slots, &self.files, |_, errno| panic!("{errno}")));
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
        assert_eq!(rig.transfers.last(), Some(1));
        rig.submit();
        assert_eq!((rig.transfers.staged.len(), rig.transfers.last()), (2, None));
        rig.transfers.queue(7);
        assert_eq!(rig.transfers.last(), Some(7));
        rig.transfers.staged.pop_back();
    }

    /// Nothing may be asked again at once that the kernel has not taken, and it is not lost.
    #[test]
    fn none_taken_means_later() {
        for later in [Ok(0), Err(Errno::AGAIN)] {
            let mut rig = Rig::new(CompletionMode::Worker, 3);
            let batch = rig.transfers.next_batch(&mut rig.slots, &rig.files).unwrap();
            assert_eq!((batch.count, rig.transfers.in_flight()), (3, 3));
            assert!(!rig.transfers.took(batch, later, &mut |_, errno| panic!("{errno}")));
            assert_eq!((rig.transfers.staged.len(), rig.transfers.in_flight()), (3, 0));
            rig.submit();
            assert_eq!((rig.transfers.staged.len(), rig.transfers.in_flight()), (0, 3));
        }
    }

    /// The kernel has taken some, or a signal has come before it took any: it may be asked for the others at once.
    #[test]
    fn some_taken_means_more() {
        for (result, left) in [(Ok(2), 1), (Err(Errno::INTR), 3)] {
            let mut rig = Rig::new(CompletionMode::Worker, 3);
            let batch = rig.transfers.next_batch(&mut rig.slots, &rig.files).unwrap();
            assert!(rig.transfers.took(batch, result, &mut |_, errno| panic!("{errno}")));
            assert_eq!((rig.transfers.staged.len(), rig.transfers.in_flight()), (left, 3 - left));
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
