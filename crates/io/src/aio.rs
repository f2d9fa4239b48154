//! The engine of Linux AIO, for hosts that forbid io_uring.
//!
//! `io_submit` only starts a transfer, and returns, where the file is open for direct I/O; on any other it does all of it. So
//! transfers of other files, and what AIO does not do, go to threads.

use crate::files::Files;
use crate::jobs::Jobs;
use crate::kernel_aio;
use crate::slots::{InFlight, Slots};
use crate::stall::Stall;
use crate::transfers::Transfers;
use crate::{Completion, Error, FileId, Op, Token};
use rustix::event::epoll;
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// A context that is smaller than this is not worth having.
const DEPTH_MIN: u32 = 8;

/// A Linux AIO context, and threads beside it.
#[derive(Debug)]
pub struct Aio {
    transfers: Transfers,
    jobs: Jobs,
    /// Readable when one of the two is.
    event: OwnedFd,
    slots: Slots,
    depth: usize,
    files: Files,
    /// Completed without the kernel.
    failed: Vec<Completion>,
    stall: Stall,
    reason: Option<Error>,
}

impl Aio {
    /// With a context for `depth` operations, or fewer where others have used up what the system has (`fs.aio-max-nr`).
    pub(crate) fn open(depth: u32) -> Result<Self, Error> {
        let failed = |step| move |source: io::Error| Error::Aio { step, source };
        kernel_aio::try_one().map_err(failed("io_submit"))?;
        let event = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|e| failed("epoll")(e.into()))?;
        let mut least = depth;
        let transfers = loop {
            match Transfers::open(least as usize, &event) {
                Ok(transfers) => break transfers,
                Err(e) if e.raw_os_error() == Some(Errno::AGAIN.raw_os_error()) && least > DEPTH_MIN => {
                    least = (least / 2).max(DEPTH_MIN);
                }
                Err(e) => return Err(failed("io_setup")(e)),
            }
        };
        let depth = least as usize;
        let jobs = Jobs::start(depth).map_err(Error::Threads)?;
        epoll::add(&event, jobs.event(), epoll::EventData::new_u64(1), epoll::EventFlags::IN)
            .map_err(|e| failed("epoll")(e.into()))?;
        Ok(Self {
            transfers,
            jobs,
            event,
            slots: Slots::new(depth),
            depth,
            files: Files::default(),
            failed: Vec::new(),
            stall: Stall::default(),
            reason: None,
        })
    }

    /// It is there because a better one is not.
    pub(crate) fn instead_of(mut self, reason: Error) -> Self {
        self.reason = Some(reason);
        self
    }

    pub(crate) fn reason(&self) -> Option<&Error> {
        self.reason.as_ref()
    }

    pub(crate) fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    pub(crate) fn register(&mut self, file: Arc<File>) -> FileId {
        let direct = fcntl_getfl(&file).is_ok_and(|flags| flags.contains(OFlags::DIRECT));
        let (id, index) = self.files.insert(file);
        if direct {
            self.files.set_aio(index);
        }
        id
    }

    pub(crate) fn unregister(&mut self, file: FileId) {
        self.files.remove(file);
    }

    pub(crate) fn queue(&mut self, op: Op, token: Token) -> Result<(), Op> {
        if self.room() == 0 {
            return Err(op);
        }
        if !op.kind.is_transfer() || !self.files.is_aio_file(op.file) {
            self.jobs.queue(op, token, &mut self.files);
            return Ok(());
        }
        let held = self.files.hold(op.file);
        let place = self.slots.insert(InFlight { token, held, op });
        self.transfers.queue(place);
        Ok(())
    }

    pub(crate) fn stall(&mut self) {
        self.stall.begin();
    }

    pub(crate) fn submit(&mut self) {
        self.stall.look();
        self.jobs.submit();
        let Self { transfers, slots, files, failed, .. } = self;
        let mut refused = Vec::new();
        transfers.submit(slots, files, |place, errno| refused.push((place, errno)));
        for (place, errno) in refused {
            failed.extend(complete(slots, files, place, Err(errno)));
        }
        if self.transfers.needs_turn() && !self.stall.is_on() {
            self.stall.begin();
        }
    }

    pub(crate) fn reap(&mut self, into: &mut Vec<Completion>) {
        let before = into.len();
        into.append(&mut self.failed);
        let Self { transfers, jobs, slots, files, .. } = self;
        // Its only failure is a context that is no context.
        let _ = transfers.reap(false, |place, result| into.extend(complete(slots, files, place, result)));
        jobs.reap(files, |completion, _| into.push(completion));
        if into.len() > before {
            self.stall.end();
        }
    }

    pub(crate) fn needs_turn(&self) -> bool {
        self.stall.is_on() || self.transfers.needs_turn() || self.jobs.needs_turn() || !self.failed.is_empty()
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.slots.used() + self.jobs.in_flight() + self.failed.len()
    }

    pub(crate) fn room(&self) -> usize {
        if self.stall.is_on() { 0 } else { self.depth - self.slots.used() - self.jobs.in_flight() }
    }
}

/// Frees a slot; its completion.
fn complete(
    slots: &mut Slots,
    files: &mut Files,
    place: u32,
    result: Result<u32, Errno>,
) -> Option<Completion> {
    let InFlight { token, held, op } = slots.remove(place)?;
    files.release(held);
    Some(Completion { token, result, buffers: op.buffers })
}

impl Drop for Aio {
    fn drop(&mut self) {
        // What is staged has not been seen by the kernel, and never will be.
        for place in self.transfers.take_staged() {
            drop(self.slots.remove(place));
        }
        let Self { transfers, slots, files, .. } = self;
        while transfers.in_flight() > 0 {
            let waited = transfers.reap(true, |place, result| drop(complete(slots, files, place, result)));
            if waited.is_err() {
                // Nobody can tell when the kernel will have finished with these buffers.
                std::mem::forget(std::mem::take(slots));
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AlignedBuf, Buffers, OpKind};
    use std::fs::OpenOptions;
    use std::os::unix::fs::OpenOptionsExt;

    const LEN: usize = 4096;

    fn queue(aio: &mut Aio, file: FileId, kind: OpKind, slot: u32) -> bool {
        let buffers = Buffers::Owned(AlignedBuf::new(LEN, LEN).unwrap());
        aio.queue(Op { file, kind, offset: 0, buffers }, Token { source: 0, slot }).is_ok()
    }

    #[test]
    fn direct_files_by_the_kernel_and_others_by_threads() {
        let mut aio = Aio::open(8).unwrap();
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(LEN as u64).unwrap();
        let through_cache = aio.register(Arc::new(File::open(image.path()).unwrap()));
        assert!(queue(&mut aio, through_cache, OpKind::Read, 0));
        assert_eq!((aio.slots.used(), aio.jobs.in_flight(), aio.room()), (0, 1, 7));
        let direct =
            OpenOptions::new().read(true).custom_flags(OFlags::DIRECT.bits() as i32).open(image.path());
        let Ok(direct) = direct else { return println!("SKIPPED: no direct I/O where temporary files are") };
        let direct = aio.register(Arc::new(direct));
        assert!(queue(&mut aio, direct, OpKind::Read, 1));
        assert!(queue(&mut aio, direct, OpKind::Flush, 2));
        assert_eq!((aio.slots.used(), aio.jobs.in_flight(), aio.room()), (1, 2, 5));
    }

    /// More is queued than the kernel has room for: the engine takes no more until something has been reaped, and all that it
    /// took is done in the end.
    #[test]
    fn a_full_context_makes_a_pause() {
        let mut aio = Aio::open(1).unwrap();
        // A context of one has room for some hundred in fact; slots for more than that.
        (aio.slots, aio.depth) = (Slots::new(4000), 4000);
        let file = Arc::new(tempfile::tempfile().unwrap());
        file.set_len(LEN as u64).unwrap();
        let file = aio.register(file);
        aio.files.set_aio(0);
        let taken = (0..2000).filter(|&slot| queue(&mut aio, file, OpKind::Read, slot)).count();
        assert_eq!(taken, 2000);
        aio.submit();
        assert!(aio.transfers.needs_turn() && aio.needs_turn());
        assert_eq!(aio.room(), 0);
        assert!(!queue(&mut aio, file, OpKind::Read, 2000), "there is no room");
        let mut done = Vec::new();
        aio.reap(&mut done);
        assert!(!done.is_empty() && aio.room() > 0);
        while aio.in_flight() > 0 {
            aio.submit();
            aio.reap(&mut done);
        }
        assert_eq!(done.len(), 2000);
        assert!(done.iter().all(|done| done.result == Ok(LEN as u32)));
    }
}
