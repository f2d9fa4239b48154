//! The engine of Linux AIO, for hosts that forbid io_uring.
//!
//! `io_submit` only starts a transfer, and returns, where the file is open for direct I/O; on any other it does all of it. So
//! transfers of other files, and what AIO does not do, go to threads, as does what could wait ([`crate::files::route`]).

pub(crate) mod context;
pub(crate) mod transfers;

use crate::aio::transfers::Transfers;
use crate::files::Files;
use crate::files::route::{Route, Routes};
use crate::operations::in_flight::InFlight;
use crate::operations::slots::Slots;
use crate::threads::jobs::{Jobs, Other};
use crate::{BackingFile, Completion, EngineOptions, Error, FileId, Op, Token};
use rustix::event::epoll;
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// A context that is smaller than this is not worth having.
const DEPTH_MIN: usize = 8;

/// A Linux AIO context, and threads beside it.
#[derive(Debug)]
pub struct Aio {
    transfers: Transfers,
    jobs: Jobs,
    /// Readable when one of the two is.
    event: OwnedFd,
    slots: Slots,
    pub(crate) files: Files,
    /// Places of merged operations that are to be done each by itself.
    again: Vec<u32>,
    /// Places of operations that would have had to wait.
    missed: Vec<u32>,
    /// Completed without the kernel.
    failed: Vec<Completion>,
    reason: Option<Error>,
}

impl Aio {
    /// With a context for so many operations, or fewer where others have used up what the system has (`fs.aio-max-nr`).
    pub(crate) fn open(options: EngineOptions) -> Result<Self, Error> {
        let failed = |step| move |source: io::Error| Error::Aio { step, source };
        context::try_one().map_err(failed("io_submit"))?;
        let event = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|e| failed("epoll")(e.into()))?;
        let wanted = options.shares();
        let mut most = wanted.total();
        let transfers = loop {
            match Transfers::open(most, options.completion, &event) {
                Ok(transfers) => break transfers,
                Err(e) if e.raw_os_error() == Some(Errno::AGAIN.raw_os_error()) && most > DEPTH_MIN => {
                    most = (most / 2).max(DEPTH_MIN);
                }
                Err(e) => return Err(failed("io_setup")(e)),
            }
        };
        let jobs = Jobs::start(most, options.owners as usize).map_err(Error::Threads)?;
        epoll::add(&event, jobs.event(), epoll::EventData::new_u64(1), epoll::EventFlags::IN)
            .map_err(|e| failed("epoll")(e.into()))?;
        Ok(Self {
            transfers,
            jobs,
            event,
            slots: Slots::new(most),
            files: Files::new(wanted.within(most)),
            again: Vec::new(),
            missed: Vec::new(),
            failed: Vec::new(),
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

    pub(crate) fn register(&mut self, backing: &BackingFile) -> FileId {
        let BackingFile { file, owner, facts } = backing.clone();
        let routes = Routes::by_aio(facts);
        let (id, index) = self.files.insert(file, owner);
        self.files.set_routes(index, routes);
        id
    }

    pub(crate) fn unregister(&mut self, file: FileId) {
        self.files.remove(file);
    }

    pub(crate) fn merge(&mut self, file: FileId, merge: bool) {
        self.files.set_merge(file, merge);
    }

    pub(crate) fn queue(&mut self, op: Op, token: Token) -> Result<(), Op> {
        if self.files.room(op.file) == 0 {
            return Err(op);
        }
        let held = self.files.hold(op.file);
        let route = self.files.route(held, op.kind, op.buffers.len());
        if !op.kind.is_transfer() {
            self.jobs.queue(held, token, op, &self.files);
            return Ok(());
        }
        let mut operation = InFlight::new(token, held, op, route == Route::NoWait);
        let owner = (route == Route::Offload).then_some(held.owner());
        let last = || match route {
            Route::Blocking => self.jobs.last_place(),
            _ => self.transfers.last(owner),
        };
        if self.files.merges(held)
            && let Some(last) = last()
        {
            match self.slots.join(last, operation) {
                Ok(()) => return Ok(()),
                Err(back) => operation = back,
            }
        }
        let by_worker = matches!(route, Route::NoWait | Route::Memory | Route::Plain);
        if by_worker && self.transfers.is_time() {
            self.submit();
        }
        let place = self.slots.insert(operation);
        match owner {
            Some(owner) => self.transfers.queue_for(owner, place),
            None if by_worker => self.transfers.queue(place),
            None => self.jobs.queue_place(place),
        }
        Ok(())
    }

    pub(crate) fn submit(&mut self) {
        let Self { transfers, slots, files, jobs, .. } = self;
        jobs.stage_places(slots, files);
        jobs.submit();
        transfers.submit_lanes(slots, files, jobs);
        let mut refused = Vec::new();
        let had_room = transfers.submit(slots, files, |place, errno| refused.push((place, errno)));
        self.submitted(had_room, refused);
    }

    /// Takes note of the result of a call of `io_submit`.
    fn submitted(&mut self, had_room: bool, refused: Vec<(u32, Errno)>) {
        for (place, errno) in refused {
            let Self { slots, files, failed, again, missed, .. } = self;
            complete(slots, files, place, Err(errno), (again, missed), failed);
        }
        self.stage_again();
        if !had_room {
            self.files.stall_all();
        }
    }

    pub(crate) fn reap(&mut self, into: &mut Vec<Completion>) {
        into.append(&mut self.failed);
        let Self { transfers, jobs, slots, files, again, missed, .. } = self;
        // Its only failure is a context that is no context.
        let _ = transfers
            .reap(false, |place, result| complete(slots, files, place, result, (again, missed), into));
        for other in jobs.reap(files, |completion, _| into.push(completion)) {
            self.settle(other);
        }
        self.stage_again();
        into.append(&mut self.failed);
    }

    /// Takes note of what a thread has done.
    fn settle(&mut self, other: Other) {
        let Self { transfers, slots, files, failed, again, missed, .. } = self;
        match other {
            Other::Transferred(place, result) => {
                complete(slots, files, place, result, (again, missed), failed);
            }
            Other::Submitted(submitted) => {
                let mut refused = Vec::new();
                let had_room = transfers.submitted(submitted, |place, errno| refused.push((place, errno)));
                self.submitted(had_room, refused);
            }
        }
    }

    /// Merged operations that are to be done each by itself, and those for threads.
    fn stage_again(&mut self) {
        let Self { transfers, jobs, slots, files, again, missed, .. } = self;
        for place in again.drain(..) {
            let Some(operation) = slots.get_mut(place) else { continue };
            let held = operation.held;
            let route = files.route(held, operation.op.kind, operation.op.buffers.len());
            operation.nowait = route == Route::NoWait;
            match route {
                Route::Offload => transfers.queue_for(held.owner(), place),
                Route::Blocking => jobs.queue_place(place),
                Route::NoWait | Route::Memory | Route::Plain => transfers.queue(place),
            }
        }
        missed.drain(..).for_each(|place| jobs.queue_place(place));
    }

    pub(crate) fn needs_turn(&self) -> bool {
        self.transfers.needs_turn() || self.jobs.needs_turn() || !self.failed.is_empty()
    }

    pub(crate) fn failed(&self) -> usize {
        self.failed.len()
    }
}

/// The kernel has done what it was told of `place`.
fn complete(
    slots: &mut Slots,
    files: &mut Files,
    place: u32,
    result: Result<u32, Errno>,
    (again, missed): (&mut Vec<u32>, &mut Vec<u32>),
    into: &mut Vec<Completion>,
) {
    if slots.is_missed(place, result, files) {
        return missed.push(place);
    }
    slots.complete(place, result, again, |InFlight { token, held, op, .. }, result| {
        files.release(held);
        into.push(Completion { token, result, buffers: op.buffers });
    });
}

impl Drop for Aio {
    fn drop(&mut self) {
        // What is staged for threads has not been seen by them. They are ended first, for they tell the kernel of operations.
        drop(self.jobs.take_places());
        self.jobs.finish();
        for other in self.jobs.reap(&mut self.files, |_, _| {}) {
            self.settle(other);
        }
        // What is staged has not been seen by the kernel, and never will be. The buffers of all are dropped last.
        drop(self.transfers.take_staged());
        while self.transfers.in_flight() > 0 {
            let Self { transfers, slots, files, again, missed, .. } = self;
            let mut done = Vec::new();
            let complete = |place, result| complete(slots, files, place, result, (again, missed), &mut done);
            if transfers.reap(true, complete).is_err() {
                // Nobody can tell when the kernel will have finished with these buffers.
                std::mem::forget(std::mem::take(&mut self.slots));
                return;
            }
        }
        self.missed.drain(..).for_each(|place| self.slots.perform(place, &self.files));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::shares::Shares;
    use crate::{AlignedBuf, Buffers, CompletionMode, EngineKind, OpKind, Owner};
    use kickless_memory::{Gpa, Iov, Map, Slot, UserAddr, View};
    use rustix::fs::{MemfdFlags, OFlags, ftruncate, memfd_create};
    use std::fs::{File, OpenOptions};
    use std::os::unix::fs::OpenOptionsExt;
    use std::sync::{Arc, mpsc};
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
        let through_cache =
            aio.register(&BackingFile::new(Arc::new(File::open(image.path()).unwrap()), Owner::unique()));
        assert!(queue(&mut aio, through_cache, OpKind::Read, 0));
        assert_eq!(
            (aio.transfers.last(None), aio.jobs.in_flight(), aio.files.room(through_cache)),
            (None, 1, 7)
        );
        assert_eq!(in_flight(&aio), 1);
        let direct =
            OpenOptions::new().read(true).custom_flags(OFlags::DIRECT.bits() as i32).open(image.path());
        let Ok(direct) = direct else { return println!("SKIPPED: no direct I/O where temporary files are") };
        let direct = aio.register(&BackingFile::new(Arc::new(direct), Owner::unique()));
        assert!(queue(&mut aio, direct, OpKind::Read, 1));
        assert!(queue(&mut aio, direct, OpKind::Flush, 2));
        assert_eq!((aio.transfers.last(None), aio.jobs.in_flight(), aio.files.room(direct)), (Some(1), 2, 5));
        assert_eq!(in_flight(&aio), 3);
    }

    fn in_flight(aio: &Aio) -> usize {
        aio.files.in_flight() + aio.failed()
    }

    /// An engine with a file that the kernel refuses to write to.
    fn refusing(completion: CompletionMode) -> (Aio, FileId) {
        let options = EngineOptions { completion, ..EngineOptions::new(EngineKind::Aio, 8) };
        let mut aio = Aio::open(options).unwrap();
        let file =
            aio.register(&BackingFile::new(Arc::new(File::open("/proc/self/exe").unwrap()), Owner::unique()));
        aio.files.set_routes(0, Routes::all(Route::Memory));
        (aio, file)
    }

    /// A call that a thread makes without waiting is over when `submit` returns, so completions of the batch do not interrupt it. In some of many
    /// cases at least, for the host can keep the thread from running.
    #[test]
    fn a_prompt_call_of_a_thread_is_waited_for() {
        let mut aio = Aio::open(EngineOptions::new(EngineKind::Aio, 64)).unwrap();
        let file = Arc::new(tempfile::tempfile().unwrap());
        file.set_len(LEN as u64).unwrap();
        let file = aio.register(&BackingFile::new(file, Owner::unique()));
        aio.files.set_routes(0, Routes::all(Route::Offload));
        let prompt = (0..10_000).any(|_| {
            (0..32).for_each(|slot| assert!(queue(&mut aio, file, OpKind::Read, slot)));
            aio.submit();
            let prompt = aio.jobs.has_submitted();
            let mut done = Vec::new();
            while in_flight(&aio) > 0 {
                aio.submit();
                aio.reap(&mut done);
            }
            assert!(done.len() == 32 && done.iter().all(|done| done.result == Ok(LEN as u32)));
            prompt
        });
        assert!(prompt);
    }

    /// It is in flight until it has been reaped, and nobody sleeps before.
    #[test]
    fn a_refused_operation_is_to_be_reaped() {
        let (mut aio, file) = refusing(CompletionMode::Worker);
        assert!(queue(&mut aio, file, OpKind::Write { durable: false }, 3));
        aio.submit();
        assert_eq!((aio.slots.used(), aio.transfers.in_flight()), (0, 0));
        assert!(aio.needs_turn());
        assert_eq!(in_flight(&aio), 1);
        let mut done = Vec::new();
        aio.reap(&mut done);
        assert_eq!(
            done.iter().map(|done| (done.token.slot, done.result)).collect::<Vec<_>>(),
            [(3, Err(Errno::BADF))]
        );
        assert!(!aio.needs_turn());
        assert_eq!(in_flight(&aio), 0);
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
        let file = aio.register(&BackingFile::new(file, Owner::unique()));
        aio.files.set_routes(0, Routes::all(Route::Memory));
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
            while in_flight(&aio) > 0 {
                aio.submit();
                aio.reap(&mut done);
            }
            assert_eq!(done.len(), 8);
        }
        (0..8).for_each(|page| read(&mut aio, page));
        let mut done = Vec::new();
        let mut again = 0;
        while in_flight(&aio) > 0 {
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
        let file =
            aio.register(&BackingFile::new(Arc::new(File::open("/proc/self/exe").unwrap()), Owner::unique()));
        aio.files.set_routes(0, Routes::all(Route::Memory));
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
        while in_flight(&aio) > 0 {
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
        (aio.slots, aio.files) = (Slots::new(4000), Files::new(Shares::new(4000, 0, 0)));
        let file = Arc::new(tempfile::tempfile().unwrap());
        file.set_len(LEN as u64).unwrap();
        let file = aio.register(&BackingFile::new(file, Owner::unique()));
        aio.files.set_routes(0, Routes::all(Route::Memory));
        let taken = (0..4000).take_while(|&slot| queue(&mut aio, file, OpKind::Read, slot)).count();
        assert!(taken < 4000, "there is no room for so many");
        assert!(aio.transfers.needs_turn() && aio.needs_turn());
        assert_eq!(aio.files.room(file), 0);
        let mut done = Vec::new();
        aio.reap(&mut done);
        assert!(!done.is_empty() && aio.files.room(file) > 0);
        while in_flight(&aio) > 0 {
            aio.submit();
            aio.reap(&mut done);
        }
        assert_eq!(done.len(), taken);
        assert!(done.iter().all(|done| done.result == Ok(LEN as u32)));
    }
}
