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
use crate::{Completion, EngineOptions, Error, FileId, Op, Token};
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
    /// Places of merged operations that are to be done each by itself.
    again: Vec<u32>,
    /// Completed without the kernel.
    failed: Vec<Completion>,
    stall: Stall,
    reason: Option<Error>,
}

impl Aio {
    /// With a context for so many operations, or fewer where others have used up what the system has (`fs.aio-max-nr`).
    pub(crate) fn open(options: EngineOptions) -> Result<Self, Error> {
        let EngineOptions { depth, completion, .. } = options;
        let failed = |step| move |source: io::Error| Error::Aio { step, source };
        kernel_aio::try_one().map_err(failed("io_submit"))?;
        let event = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|e| failed("epoll")(e.into()))?;
        let mut least = depth;
        let transfers = loop {
            match Transfers::open(least as usize, completion, &event) {
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
            again: Vec::new(),
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

    pub(crate) fn merge(&mut self, file: FileId, merge: bool) {
        self.files.set_merge(file, merge);
    }

    pub(crate) fn queue(&mut self, op: Op, token: Token) -> Result<(), Op> {
        if self.room() == 0 {
            return Err(op);
        }
        if !op.kind.is_transfer() || !self.files.is_aio_file(op.file) {
            self.jobs.queue(op, token, &mut self.files);
            return Ok(());
        }
        let mut operation = InFlight::new(token, self.files.hold(op.file), op);
        if self.files.merges(operation.held)
            && let Some(last) = self.transfers.last()
        {
            match self.slots.join(last, operation) {
                Ok(()) => return Ok(()),
                Err(back) => operation = back,
            }
        }
        if self.transfers.is_time() {
            self.submit();
        }
        self.transfers.queue(self.slots.insert(operation));
        Ok(())
    }

    pub(crate) fn stall(&mut self) {
        self.stall.begin();
    }

    pub(crate) fn submit(&mut self) {
        self.stall.look();
        self.jobs.submit();
        let Self { transfers, slots, files, failed, again, .. } = self;
        let mut refused = Vec::new();
        let had_room = transfers.submit(slots, files, |place, errno| refused.push((place, errno)));
        for (place, errno) in refused {
            complete(slots, files, place, Err(errno), again, failed);
        }
        self.stage_again();
        if !had_room && !self.stall.is_on() {
            self.stall.begin();
        }
    }

    pub(crate) fn reap(&mut self, into: &mut Vec<Completion>) {
        let before = into.len();
        into.append(&mut self.failed);
        let Self { transfers, jobs, slots, files, again, .. } = self;
        // Its only failure is a context that is no context.
        let _ = transfers.reap(false, |place, result| complete(slots, files, place, result, again, into));
        jobs.reap(files, |completion, _| into.push(completion));
        self.stage_again();
        if into.len() > before {
            self.stall.end();
        }
    }

    /// Merged operations that are to be done each by itself.
    fn stage_again(&mut self) {
        self.again.drain(..).for_each(|place| self.transfers.queue(place));
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

/// The kernel has done what it was told of `place`.
fn complete(
    slots: &mut Slots,
    files: &mut Files,
    place: u32,
    result: Result<u32, Errno>,
    again: &mut Vec<u32>,
    into: &mut Vec<Completion>,
) {
    slots.complete(place, result, again, |InFlight { token, held, op, .. }, result| {
        files.release(held);
        into.push(Completion { token, result, buffers: op.buffers });
    });
}

impl Drop for Aio {
    fn drop(&mut self) {
        // What is staged has not been seen by the kernel, and never will be. The buffers of all are dropped last.
        drop(self.transfers.take_staged());
        while self.transfers.in_flight() > 0 {
            if self.transfers.reap(true, |_, _| {}).is_err() {
                // Nobody can tell when the kernel will have finished with these buffers.
                std::mem::forget(std::mem::take(&mut self.slots));
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AlignedBuf, Buffers, CompletionMode, EngineKind, OpKind};
    use kickless_memory::{Gpa, Iov, Map, Slot, UserAddr, View};
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use std::fs::OpenOptions;
    use std::os::unix::fs::OpenOptionsExt;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    const LEN: usize = 4096;

    fn queue(aio: &mut Aio, file: FileId, kind: OpKind, slot: u32) -> bool {
        let buffers = Buffers::Owned(AlignedBuf::new(LEN, LEN).unwrap());
        aio.queue(Op { file, kind, offset: 0, buffers }, Token { source: 0, slot }).is_ok()
    }

    #[test]
    fn direct_files_by_the_kernel_and_others_by_threads() {
        let mut aio = Aio::open(EngineOptions::new(EngineKind::Aio, 8)).unwrap();
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(LEN as u64).unwrap();
        let through_cache = aio.register(Arc::new(File::open(image.path()).unwrap()));
        assert!(queue(&mut aio, through_cache, OpKind::Read, 0));
        assert_eq!((aio.slots.used(), aio.jobs.in_flight(), aio.room()), (0, 1, 7));
        assert_eq!(aio.in_flight(), 1);
        let direct =
            OpenOptions::new().read(true).custom_flags(OFlags::DIRECT.bits() as i32).open(image.path());
        let Ok(direct) = direct else { return println!("SKIPPED: no direct I/O where temporary files are") };
        let direct = aio.register(Arc::new(direct));
        assert!(queue(&mut aio, direct, OpKind::Read, 1));
        assert!(queue(&mut aio, direct, OpKind::Flush, 2));
        assert_eq!((aio.slots.used(), aio.jobs.in_flight(), aio.room()), (1, 2, 5));
        assert_eq!(aio.in_flight(), 3);
    }

    /// An engine with a file that the kernel refuses to write to.
    fn refusing(completion: CompletionMode) -> (Aio, FileId) {
        let options = EngineOptions { completion, ..EngineOptions::new(EngineKind::Aio, 8) };
        let mut aio = Aio::open(options).unwrap();
        let file = aio.register(Arc::new(File::open("/proc/self/exe").unwrap()));
        aio.files.set_aio(0);
        (aio, file)
    }

    /// It is in flight until it has been reaped, and nobody sleeps before.
    #[test]
    fn a_refused_operation_is_to_be_reaped() {
        let (mut aio, file) = refusing(CompletionMode::Worker);
        assert!(queue(&mut aio, file, OpKind::Write { durable: false }, 3));
        aio.submit();
        assert_eq!((aio.slots.used(), aio.transfers.in_flight()), (0, 0));
        assert!(aio.needs_turn());
        assert_eq!(aio.in_flight(), 1);
        let mut done = Vec::new();
        aio.reap(&mut done);
        assert_eq!(
            done.iter().map(|done| (done.token.slot, done.result)).collect::<Vec<_>>(),
            [(3, Err(Errno::BADF))]
        );
        assert!(!aio.needs_turn());
        assert_eq!(aio.in_flight(), 0);
    }

    /// What the thread could not submit is not waited for.
    #[test]
    fn dropped_with_what_a_thread_is_refused() {
        let (mut aio, file) = refusing(CompletionMode::Thread);
        assert!(queue(&mut aio, file, OpKind::Write { durable: false }, 0));
        aio.submit();
        let (ended, end) = mpsc::channel();
        thread::spawn(move || {
            drop(aio);
            ended.send(()).unwrap();
        });
        end.recv_timeout(Duration::from_secs(60)).expect("the engine waits for what never completes");
    }

    /// Neighbours are one for the kernel, and one that is done again is not merged again.
    #[test]
    fn neighbours_are_one_operation() {
        let mut aio = Aio::open(EngineOptions::new(EngineKind::Aio, 16)).unwrap();
        let file = Arc::new(tempfile::tempfile().unwrap());
        file.set_len(4 * LEN as u64).unwrap();
        let file = aio.register(file);
        aio.files.set_aio(0);
        let memory = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&memory, 1 << 20).unwrap();
        let slot = Slot::map(&memory, 0, Gpa(0), UserAddr(0), 1 << 20).unwrap();
        let view = Arc::new(View::new(Map::new(vec![slot]).unwrap()));
        let read = |aio: &mut Aio, page: u32| {
            let mut iov = Iov::default();
            iov.push(&view, Gpa(u64::from(page) * 8192), LEN as u32).unwrap();
            let offset = u64::from(page) * LEN as u64;
            let op = Op { file, kind: OpKind::Read, offset, buffers: Buffers::Guest(iov) };
            aio.queue(op, Token { source: 0, slot: page }).unwrap();
        };
        for (merge, given) in [(false, 4), (true, 0)] {
            aio.merge(file, merge);
            (0..8).for_each(|page| read(&mut aio, page));
            assert_eq!(aio.transfers.in_flight(), given);
            let mut done = Vec::new();
            while aio.in_flight() > 0 {
                aio.submit();
                aio.reap(&mut done);
            }
            assert_eq!(done.len(), 8);
        }
        (0..8).for_each(|page| read(&mut aio, page));
        let mut done = Vec::new();
        let mut again = 0;
        while aio.in_flight() > 0 {
            aio.submit();
            aio.reap(&mut done);
            again = again.max(aio.transfers.take_staged().count());
            if again > 0 {
                break;
            }
        }
        assert_eq!((done.len(), again), (4, 4), "those behind the end are done again, each by itself");
        aio.slots = Slots::new(16);
    }

    /// Nobody sleeps on what a refused call has left to be done again.
    #[test]
    fn merged_transfers_that_are_refused() {
        let mut aio = Aio::open(EngineOptions::new(EngineKind::Aio, 16)).unwrap();
        let file = aio.register(Arc::new(File::open("/proc/self/exe").unwrap()));
        aio.files.set_aio(0);
        aio.merge(file, true);
        let memory = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&memory, 1 << 20).unwrap();
        let slot = Slot::map(&memory, 0, Gpa(0), UserAddr(0), 1 << 20).unwrap();
        let view = Arc::new(View::new(Map::new(vec![slot]).unwrap()));
        for page in 0..8 {
            let mut iov = Iov::default();
            iov.push(&view, Gpa(page * 8192), LEN as u32).unwrap();
            let (offset, buffers) = (page * LEN as u64, Buffers::Guest(iov));
            let op = Op { file, kind: OpKind::Write { durable: false }, offset, buffers };
            aio.queue(op, Token { source: 0, slot: page as u32 }).unwrap();
        }
        let mut done = Vec::new();
        while aio.in_flight() > 0 {
            aio.submit();
            assert!(aio.needs_turn());
            aio.reap(&mut done);
        }
        assert!(done.len() == 8 && done.iter().all(|done| done.result == Err(Errno::BADF)));
    }

    /// More is queued than the kernel has room for: the engine takes no more until something has been reaped, and all that it
    /// took is done in the end.
    #[test]
    fn a_full_context_makes_a_pause() {
        let mut aio = Aio::open(EngineOptions::new(EngineKind::Aio, 1)).unwrap();
        // A context of one has room for some hundred in fact; slots for more than that.
        (aio.slots, aio.depth) = (Slots::new(4000), 4000);
        let file = Arc::new(tempfile::tempfile().unwrap());
        file.set_len(LEN as u64).unwrap();
        let file = aio.register(file);
        aio.files.set_aio(0);
        let taken = (0..4000).take_while(|&slot| queue(&mut aio, file, OpKind::Read, slot)).count();
        assert!(taken < 4000, "there is no room for so many");
        assert!(aio.transfers.needs_turn() && aio.needs_turn());
        assert_eq!(aio.room(), 0);
        let mut done = Vec::new();
        aio.reap(&mut done);
        assert!(!done.is_empty() && aio.room() > 0);
        while aio.in_flight() > 0 {
            aio.submit();
            aio.reap(&mut done);
        }
        assert_eq!(done.len(), taken);
        assert!(done.iter().all(|done| done.result == Ok(LEN as u32)));
    }
}
