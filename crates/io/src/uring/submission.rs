//! Submissions to the ring.
#![expect(unsafe_code, reason = "island: buffers handed to the kernel")]

use super::Uring;
use super::entry::entry;
use crate::early_submit;
use crate::operations::Operations;
use rustix::io::Errno;
use std::io;

impl Uring {
    /// Returns whether the staged operations should be submitted before one more of an owner is staged. The
    /// owner has this many unfinished operations without that one.
    #[inline]
    pub(crate) fn is_due(&self, unfinished: usize) -> bool {
        let staged = self.staged.len() - self.pushed;
        let in_kernel = unfinished.saturating_sub(staged).min(self.in_flight);
        early_submit::is_due(staged, in_kernel)
    }

    /// Submits the staged operations.
    ///
    /// # Errors
    /// The ring has failed for good. All operations that the kernel cannot see have failed.
    pub(crate) fn submit(&mut self, ops: &mut Operations) -> io::Result<()> {
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
            self.push_staged(ops);
            let result = self.enter(self.pushed as u32, 0);
            if let Some(end) = self.note_submitted(ops, result) {
                return end;
            }
        }
    }

    /// Notes the result of a submitting call. Returns `None` if the kernel may take more.
    fn note_submitted(
        &mut self,
        ops: &mut Operations,
        result: Result<usize, Errno>,
    ) -> Option<io::Result<()>> {
        match result {
            Ok(taken) => {
                let taken = taken.min(self.pushed);
                self.staged.drain(..taken);
                self.pushed -= taken;
                self.in_flight += taken;
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
            let Some(entry) = entry(ops, op_slot) else {
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
    fn fail_staged(&mut self, ops: &mut Operations, errno: Errno) -> io::Error {
        self.broken = Some(errno);
        self.pushed = 0;
        self.staged.drain(..).for_each(|op_slot| ops.fail(op_slot, errno));
        errno.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::shares::Shares;
    use crate::operations::in_flight::InFlight;
    use crate::{
        AlignedBuf, Buffers, Completion, EngineKind, EngineOptions, FileId, Op, OpKind, Owner, Token,
    };
    use rustix::event::epoll;
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
        fn new() -> Self {
            let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
            let uring = Uring::open(&EngineOptions::new(EngineKind::Uring, 8), &epoll).unwrap();
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

    /// An operation stays staged if the kernel does not take it, for whichever transient reason.
    #[test]
    fn operations_that_the_kernel_does_not_take_stay_staged() {
        let later = [Ok(0), Err(Errno::AGAIN), Err(Errno::BUSY)].map(|result| (result, true));
        for (result, paused) in later.into_iter().chain([(Err(Errno::INTR), false)]) {
            let mut rig = Rig::new();
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

    /// The entries of completed operations stay in the submission ring. So no call may have the kernel read
    /// it again.
    #[test]
    fn a_failed_ring_is_not_used_again() {
        let mut rig = Rig::new();
        rig.queue(0);
        rig.push_staged();
        rig.fail_staged(Errno::PERM);
        rig.queue(1);
        assert_eq!(rig.submit().unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(rig.results(), [(0, Err(Errno::PERM)), (1, Err(Errno::PERM))]);
    }
}
