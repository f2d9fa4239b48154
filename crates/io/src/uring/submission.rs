//! Submissions to the ring, by the worker or by a thread.
#![expect(unsafe_code, reason = "island: buffers handed to the kernel")]

use super::Uring;
use super::enter::Enter;
use super::entry::entry;
use crate::early_submit;
use crate::operations::Operations;
use crate::submit_thread::SubmitThread;
use crate::waker::Waker;
use rustix::event::epoll;
use rustix::io::Errno;
use std::io;
use std::os::fd::AsFd;

impl Uring {
    /// Starts the thread that makes the submitting calls from now on.
    pub(super) fn start_submitter(&mut self, epoll: impl AsFd) -> io::Result<()> {
        let submitter_done = Waker::new()?;
        epoll::add(epoll, submitter_done.as_fd(), epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        self.submitter = Some(SubmitThread::start(submitter_done.clone())?);
        self.submitter_done = Some(submitter_done);
        Ok(())
    }

    /// Ends that thread. The result of its last call is known afterwards.
    pub(super) fn stop_submitter(&mut self) {
        if let Some((_, result)) = self.submitter.take().and_then(|mut submitter| submitter.finish()) {
            self.note_taken(result.unwrap_or(0));
            self.pushed = 0;
        }
    }

    /// Notes that the kernel has taken this many of the pushed operations.
    fn note_taken(&mut self, taken: usize) -> usize {
        let taken = taken.min(self.pushed);
        self.staged.drain(..taken);
        self.pushed -= taken;
        self.in_flight += taken as isize;
        taken
    }

    /// Returns whether the staged operations should be submitted before one more of an owner is staged. The
    /// owner has this many unfinished operations without that one.
    #[inline]
    pub(crate) fn is_due(&self, unfinished: usize) -> bool {
        let staged = self.staged.len() - self.pushed;
        let in_kernel = unfinished.saturating_sub(staged).min(self.in_flight as usize);
        self.submitter.is_none() && early_submit::is_due(staged, in_kernel)
    }

    /// Submits the staged operations.
    ///
    /// # Errors
    /// The ring has failed for good. All operations that the kernel cannot see have failed.
    pub(crate) fn submit(&mut self, ops: &mut Operations) -> io::Result<()> {
        if let Some((_, result)) = self.submitter.as_ref().and_then(|submitter| submitter.take())
            && let Some(end) = self.note_submitted(ops, result)
        {
            return end;
        }
        while let Some(request) = self.cancels.next(&ops.slots) {
            self.staged.push_back(request);
        }
        if self.staged.is_empty() {
            return Ok(());
        }
        if let Some(errno) = self.broken {
            return Err(self.fail_staged(ops, errno));
        }
        if !self.enabled {
            if let Err(e) = self.ring.submitter().register_enable_rings() {
                return Err(self.fail_staged(ops, Errno::from_io_error(&e).unwrap_or(Errno::IO)));
            }
            self.enabled = true;
        }
        loop {
            // A result that has come meanwhile is taken in the next turn, which is due.
            if self.submitter.as_ref().is_some_and(|submitter| !submitter.is_clear()) {
                return Ok(());
            }
            self.push_staged(ops);
            if let Some(submitter) = &self.submitter {
                let ring = self.ring_fd.clone();
                submitter.hand_over(Enter { ring, count: self.pushed as u32 });
                return Ok(());
            }
            let result = if self.sqpoll { self.wake_kernel() } else { self.enter(self.pushed as u32, 0) };
            if let Some(end) = self.note_submitted(ops, result) {
                return end;
            }
        }
    }

    /// Wakes the kernel's thread if it sleeps, so that it takes pushed operations.
    pub(super) fn wake_kernel(&mut self) -> Result<usize, Errno> {
        loop {
            match self.ring.submit() {
                Ok(_) => return Ok(self.pushed),
                Err(e) => match Errno::from_io_error(&e).unwrap_or(Errno::IO) {
                    Errno::INTR => {}
                    errno => return Err(errno),
                },
            }
        }
    }

    /// Notes the result of a submitting call. Returns `None` if the kernel may take more.
    pub(super) fn note_submitted(
        &mut self,
        ops: &mut Operations,
        result: Result<usize, Errno>,
    ) -> Option<io::Result<()>> {
        match result {
            Ok(taken) => {
                let taken = self.note_taken(taken);
                if self.staged.is_empty() {
                    return Some(Ok(()));
                }
                // Nothing taken and no error also means "later".
                if taken == 0 {
                    ops.files.pause_all();
                    return Some(Ok(()));
                }
                None
            }
            Err(Errno::INTR) => None,
            // No memory for requests, or completions must be taken out first.
            Err(Errno::AGAIN | Errno::BUSY) => {
                ops.files.pause_all();
                Some(Ok(()))
            }
            Err(errno) => Some(Err(self.fail_staged(ops, errno))),
        }
    }

    /// Moves staged operations into the submission ring, as many as fit.
    pub(crate) fn push_staged(&mut self, ops: &mut Operations) {
        let mut queue = self.ring.submission();
        while let Some(&op_slot) = self.staged.get(self.pushed) {
            let Some(entry) = entry(ops, &mut self.buffers, op_slot) else {
                debug_assert!(false, "a staged operation has its slot");
                self.staged.remove(self.pushed);
                continue;
            };
            // SAFETY: the buffers and the file belong to the slot, which keeps them unchanged until the
            // completion has been reaped. A dropped engine waits for that or leaks them.
            if unsafe { queue.push(&entry) }.is_err() {
                return;
            }
            self.pushed += 1;
        }
    }

    /// Completes everything that the kernel has not taken, with an error. Entries in the submission ring stay
    /// there, and the kernel never reads them without another call.
    pub(super) fn fail_staged(&mut self, ops: &mut Operations, errno: Errno) -> io::Error {
        self.broken = Some(errno);
        // The kernel's own thread reads the ring without a call, unless it has ended. So operations that it
        // can see are not completed.
        let first = if self.sqpoll { self.pushed } else { 0 };
        self.in_flight += first as isize;
        self.pushed = 0;
        let mut staged = std::mem::take(&mut self.staged);
        for op_slot in staged.drain(..).skip(first) {
            self.release_buffer(ops, op_slot);
            ops.fail(op_slot, errno);
        }
        self.staged = staged;
        errno.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::shares::Shares;
    use crate::operations::in_flight::InFlight;
    use crate::{
        AlignedBuf, Buffers, Completion, CompletionMode, EngineKind, EngineOptions, FileId, Op, OpKind,
        Owner, Token,
    };
    use std::fs::File;
    use std::os::fd::OwnedFd;
    use std::sync::Arc;
    use std::thread;

    struct Rig {
        uring: Uring,
        ops: Operations,
        file: FileId,
        _epoll: OwnedFd,
    }

    impl Rig {
        fn new(options: EngineOptions) -> Self {
            let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
            let uring = Uring::open(&options, &epoll).unwrap();
            let mut ops = Operations::new(Shares::new(8, 0, 0));
            let file = ops.files.insert(Arc::new(File::open("/proc/self/exe").unwrap()), Owner::unique()).0;
            Self { uring, ops, file, _epoll: epoll }
        }

        fn queue(&mut self, slot: u32) {
            let buffers = Buffers::Owned(AlignedBuf::new(512, 512).unwrap());
            let op = Op { file: self.file, kind: OpKind::Read, offset: 0, buffers };
            let held = self.ops.files.hold(self.file).unwrap();
            let operation = InFlight::new(Token { source: 0, slot }, held, op, false);
            self.uring.queue(self.ops.slots.insert(operation));
        }

        fn push_staged(&mut self) {
            self.uring.push_staged(&mut self.ops);
        }

        fn fail_staged(&mut self, errno: Errno) {
            self.uring.fail_staged(&mut self.ops, errno);
        }

        fn submit(&mut self) -> io::Result<()> {
            self.uring.submit(&mut self.ops)
        }

        fn results(&mut self) -> Vec<(u32, Result<u32, Errno>)> {
            let mut done: Vec<Completion> = Vec::new();
            self.ops.reap_failed(&mut done);
            while self.ops.in_flight() > 0 {
                self.submit().unwrap();
                self.uring.reap(&mut self.ops, &mut done);
                thread::yield_now();
            }
            let mut results: Vec<_> = done.iter().map(|done| (done.token.slot, done.result)).collect();
            results.sort_by_key(|(slot, _)| *slot);
            results
        }
    }

    fn engine(sqpoll: bool) -> Rig {
        Rig::new(EngineOptions { sqpoll, ..EngineOptions::new(EngineKind::Uring, 8) })
    }

    /// An operation stays staged if the kernel does not take it, for whichever transient reason.
    #[test]
    fn operations_that_the_kernel_does_not_take_stay_staged() {
        let later = [Ok(0), Err(Errno::AGAIN), Err(Errno::BUSY)].map(|result| (result, true));
        for (result, paused) in later.into_iter().chain([(Err(Errno::INTR), false)]) {
            let mut rig = engine(false);
            rig.queue(5);
            rig.push_staged();
            assert_eq!((rig.uring.staged.len(), rig.uring.pushed), (1, 1));
            let end = rig.uring.note_submitted(&mut rig.ops, result);
            assert!(matches!(end, Some(Ok(()))) == paused && end.is_none() != paused, "{result:?}");
            assert_eq!(
                (rig.uring.staged.len(), rig.uring.pushed, rig.ops.files.any_paused()),
                (1, 1, paused)
            );
            assert_eq!(rig.results(), [(5, Ok(512))]);
        }
    }

    /// Operations that the kernel's thread can see may be done at any time, so they are not completed.
    #[test]
    fn a_failed_ring_keeps_operations_that_the_kernel_sees() {
        let mut rig = engine(true);
        rig.queue(0);
        rig.push_staged();
        assert_eq!(rig.uring.wake_kernel(), Ok(1));
        rig.queue(1);
        assert_eq!((rig.uring.staged.len(), rig.uring.pushed), (2, 1));
        rig.fail_staged(Errno::PERM);
        assert_eq!((rig.ops.files.in_flight(), rig.ops.in_flight()), (1, 2));
        assert_eq!(rig.results(), [(0, Ok(512)), (1, Err(Errno::PERM))]);
    }

    /// The entries of completed operations stay in the submission ring. So no call may have the kernel read
    /// it again.
    #[test]
    fn a_failed_ring_is_not_used_again() {
        let mut rig = engine(false);
        rig.queue(0);
        rig.push_staged();
        rig.fail_staged(Errno::PERM);
        rig.queue(1);
        assert_eq!(rig.submit().unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(rig.results(), [(0, Err(Errno::PERM)), (1, Err(Errno::PERM))]);
    }

    /// The kernel has the operations that the thread has submitted last. If a drop treated them as staged, it
    /// would free their buffers.
    #[test]
    fn the_last_submission_of_the_thread_is_known() {
        let options =
            EngineOptions { completion: CompletionMode::Thread, ..EngineOptions::new(EngineKind::Uring, 8) };
        let mut rig = Rig::new(options);
        rig.queue(4);
        rig.submit().unwrap();
        assert_eq!((rig.uring.staged.len(), rig.uring.pushed), (1, 1));
        rig.uring.stop_submitter();
        assert_eq!((rig.uring.staged.len(), rig.uring.pushed, rig.ops.in_flight()), (0, 0, 1));
        assert_eq!(rig.results(), [(4, Ok(512))]);
    }
}
