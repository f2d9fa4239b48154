//! What the ring is told, and by whom.
#![expect(unsafe_code, reason = "island: buffers handed to the kernel")]

use super::Uring;
use super::enter::Enter;
use super::entry::entry;
use crate::early_submit;
use crate::submit_thread::SubmitThread;
use crate::{Errno, Waker};
use rustix::event::epoll;
use std::io;
use std::os::fd::AsFd;

impl Uring {
    /// From now on a thread makes the calls that submit.
    pub(super) fn start_submitter(&mut self) -> io::Result<()> {
        let called = Waker::new()?;
        epoll::add(&self.event, called.as_fd(), epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        self.submitter = Some(SubmitThread::start(called.clone())?);
        self.called = Some(called);
        Ok(())
    }

    /// For ever: what the thread submits last is known afterwards.
    pub(super) fn stop_submitter(&mut self) {
        if let Some((_, result)) = self.submitter.take().and_then(|mut submitter| submitter.finish()) {
            let taken = result.unwrap_or(0).min(self.pushed);
            self.staged.drain(..taken);
            self.pushed = 0;
        }
    }

    /// Submits what is staged before one more is, if it is time. Its slot is taken.
    #[inline]
    pub(super) fn submit_early(&mut self) {
        let waiting = self.staged.len() - self.pushed;
        let given = self.ops.slots.used().saturating_sub(1 + waiting);
        if self.submitter.is_none() && early_submit::is_time(waiting, given) {
            // Where the ring has failed the next call says so again.
            let _ = self.submit_ring();
        }
    }

    pub(super) fn submit_ring(&mut self) -> io::Result<()> {
        if let Some((_, result)) = self.submitter.as_ref().and_then(|submitter| submitter.take())
            && let Some(end) = self.took(result)
        {
            return end;
        }
        if self.staged.is_empty() {
            return Ok(());
        }
        if let Some(errno) = self.broken {
            return Err(self.fail_staged(errno));
        }
        if !self.enabled {
            if let Err(e) = self.ring.submitter().register_enable_rings() {
                return Err(self.fail_staged(Errno::from_io_error(&e).unwrap_or(Errno::IO)));
            }
            self.enabled = true;
        }
        loop {
            // A result that has come since it was looked for is taken in the next turn, which is due.
            if self.submitter.as_ref().is_some_and(|submitter| !submitter.is_clear()) {
                return Ok(());
            }
            self.push_staged();
            if let Some(submitter) = &self.submitter {
                let ring = self.ring_fd.clone();
                submitter.hand_over(Enter { ring, count: self.pushed as u32 });
                return Ok(());
            }
            let result =
                if self.options.sqpoll { self.wake_kernel() } else { self.enter(self.pushed as u32, 0) };
            if let Some(end) = self.took(result) {
                return end;
            }
        }
    }

    /// The kernel's thread takes what has been pushed; where it sleeps it is woken.
    fn wake_kernel(&mut self) -> Result<usize, Errno> {
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

    /// What came of a call that submits what was pushed: `None`, the kernel may take more.
    fn took(&mut self, result: Result<usize, Errno>) -> Option<io::Result<()>> {
        match result {
            Ok(taken) => {
                let taken = taken.min(self.pushed);
                self.staged.drain(..taken);
                self.pushed -= taken;
                if self.staged.is_empty() {
                    return Some(Ok(()));
                }
                // Nothing taken and no error: "later" as well.
                if taken == 0 {
                    self.ops.files.stall_all();
                    return Some(Ok(()));
                }
                None
            }
            Err(Errno::INTR) => None,
            // Out of memory for requests, or completions must be taken out first.
            Err(Errno::AGAIN | Errno::BUSY) => {
                self.ops.files.stall_all();
                Some(Ok(()))
            }
            Err(errno) => Some(Err(self.fail_staged(errno))),
        }
    }

    /// Moves staged operations into the submission ring, as many as fit.
    pub(super) fn push_staged(&mut self) {
        let mut queue = self.ring.submission();
        while let Some(&place) = self.staged.get(self.pushed) {
            let Some(entry) = entry(&mut self.ops, place) else {
                debug_assert!(false, "a staged operation has its slot");
                self.staged.remove(self.pushed);
                continue;
            };
            // SAFETY: the buffers and the file belong to the slot, which keeps them unchanged until the
            // completion has been reaped; a dropped engine waits for that or leaks them.
            if unsafe { queue.push(&entry) }.is_err() {
                return;
            }
            self.pushed += 1;
        }
    }

    /// Completes everything that the kernel has not taken. What is in the submission ring stays there, and is
    /// never looked at again: without a call the kernel does not.
    fn fail_staged(&mut self, errno: Errno) -> io::Error {
        self.broken = Some(errno);
        // The kernel's own thread looks without a call, unless it is gone: what it can see is not given back.
        let first = if self.options.sqpoll { self.pushed } else { 0 };
        self.pushed = 0;
        for place in self.staged.drain(..).skip(first) {
            self.ops.fail(&self.ring.submitter(), place, errno, &mut self.failed);
        }
        errno.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::route::{Route, Routes};
    use crate::{
        AlignedBuf, BackingFile, Buffers, Completion, CompletionMode, EngineKind, EngineOptions, FileId, Op,
        OpKind, Owner, Token,
    };
    use std::fs::File;
    use std::sync::Arc;
    use std::thread;

    fn engine(sqpoll: bool) -> (Uring, FileId) {
        let options = EngineOptions { sqpoll, ..EngineOptions::new(EngineKind::Uring, 8) };
        let mut uring = Uring::open(options).unwrap();
        let file = uring
            .register(&BackingFile::new(Arc::new(File::open("/proc/self/exe").unwrap()), Owner::unique()));
        uring.ops.files.set_routes(0, Routes::all(Route::Plain));
        (uring, file)
    }

    fn queue(uring: &mut Uring, file: FileId, slot: u32) {
        let buffers = Buffers::Owned(AlignedBuf::new(512, 512).unwrap());
        let op = Op { file, kind: OpKind::Read, offset: 0, buffers };
        uring.queue(op, Token { source: 0, slot }).unwrap();
    }

    fn in_flight(uring: &Uring) -> usize {
        uring.ops.files.in_flight() + uring.failed()
    }

    fn results(uring: &mut Uring) -> Vec<(u32, Result<u32, Errno>)> {
        let mut done: Vec<Completion> = Vec::new();
        while in_flight(uring) > 0 {
            uring.submit().unwrap();
            uring.reap(&mut done);
            thread::yield_now();
        }
        let mut results: Vec<_> = done.iter().map(|done| (done.token.slot, done.result)).collect();
        results.sort_by_key(|(slot, _)| *slot);
        results
    }

    /// Whatever keeps the kernel from taking an operation for now, it stays staged.
    #[test]
    fn what_is_not_taken_stays() {
        let later = [Ok(0), Err(Errno::AGAIN), Err(Errno::BUSY)].map(|result| (result, true));
        for (result, stalled) in later.into_iter().chain([(Err(Errno::INTR), false)]) {
            let (mut uring, file) = engine(false);
            queue(&mut uring, file, 5);
            uring.push_staged();
            assert_eq!((uring.staged.len(), uring.pushed), (1, 1));
            let end = uring.took(result);
            assert!(matches!(end, Some(Ok(()))) == stalled && end.is_none() != stalled, "{result:?}");
            assert_eq!((uring.staged.len(), uring.pushed, uring.ops.files.any_stalled()), (1, 1, stalled));
            assert_eq!(results(&mut uring), [(5, Ok(512))]);
        }
    }

    /// What the kernel's thread can see may be done at any time, so it is not given back.
    #[test]
    fn a_failed_ring_keeps_what_the_kernel_sees() {
        let (mut uring, file) = engine(true);
        queue(&mut uring, file, 0);
        uring.push_staged();
        assert_eq!(uring.wake_kernel(), Ok(1));
        queue(&mut uring, file, 1);
        assert_eq!((uring.staged.len(), uring.pushed), (2, 1));
        uring.fail_staged(Errno::PERM);
        assert_eq!((uring.failed.len(), in_flight(&uring)), (1, 2));
        assert_eq!(results(&mut uring), [(0, Ok(512)), (1, Err(Errno::PERM))]);
    }

    /// What was given back is in the submission ring for ever, so no call may have the kernel look there again.
    #[test]
    fn a_failed_ring_is_not_used_again() {
        let (mut uring, file) = engine(false);
        queue(&mut uring, file, 0);
        uring.push_staged();
        uring.fail_staged(Errno::PERM);
        queue(&mut uring, file, 1);
        assert_eq!(uring.submit().unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(results(&mut uring), [(0, Err(Errno::PERM)), (1, Err(Errno::PERM))]);
    }

    /// What the thread has submitted last is the kernel's: a drop that took it for staged would free its buffers.
    #[test]
    fn what_the_thread_submits_last_is_known() {
        let options =
            EngineOptions { completion: CompletionMode::Thread, ..EngineOptions::new(EngineKind::Uring, 8) };
        let mut uring = Uring::open(options).unwrap();
        let file = uring
            .register(&BackingFile::new(Arc::new(File::open("/proc/self/exe").unwrap()), Owner::unique()));
        uring.ops.files.set_routes(0, Routes::all(Route::Plain));
        queue(&mut uring, file, 4);
        uring.submit().unwrap();
        assert_eq!((uring.staged.len(), uring.pushed), (1, 1));
        uring.stop_submitter();
        assert_eq!((uring.staged.len(), uring.pushed, in_flight(&uring)), (0, 0, 1));
        assert_eq!(results(&mut uring), [(4, Ok(512))]);
    }
}
