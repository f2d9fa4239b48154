//! The io_uring engine: one ring for each worker.
#![expect(unsafe_code, reason = "island: buffers handed to the kernel")]

mod buffers;
mod enter;
mod entry;
mod operations;
mod probe;
mod ring;
mod submission;
#[cfg(test)]
mod tests;

use crate::aio::transfers::Transfers;
use crate::files::Files;
use crate::files::route::{Route, Routes};
use crate::operations::in_flight::InFlight;
use crate::operations::slots::Slots;
use crate::submit_thread::SubmitThread;
use crate::threads::jobs::{Jobs, Other};
use crate::{BackingFile, Completion, CompletionMode, EngineOptions, Error, FileId, Op, Token, Waker};
use buffers::Registered;
use enter::Enter;
use io_uring::{EnterFlags, IoUring};

use kickless_memory::View;
use operations::{Operations, forget};
use rustix::event::epoll;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use tracing::debug;

/// Files that the kernel knows by index, which spares it a look-up for each operation. Later ones go by
/// descriptor.
const FIXED_FILES: u32 = 64;

/// An io_uring and the operations that are in it.
pub struct Uring {
    ring: IoUring,
    /// The same ring, for the thread that submits.
    ring_fd: Arc<OwnedFd>,
    options: EngineOptions,
    /// For files on which the ring would be slow; made with the first of them.
    aio: Option<Transfers>,
    /// For what waits.
    jobs: Jobs,
    /// Readable when one of the three is, or `called`.
    event: OwnedFd,
    /// The ring belongs to a thread, the first one that submits.
    enabled: bool,
    /// It makes the calls that submit, and signals `called` then.
    submitter: Option<SubmitThread<Enter>>,
    called: Option<Waker>,
    pub(crate) ops: Operations,
    /// The kernel can know files by index.
    fixed: bool,
    /// Queued and not taken by the kernel, oldest first. The first `pushed` are in the submission ring already.
    staged: VecDeque<u32>,
    pushed: usize,
    /// Completed without the kernel.
    failed: Vec<Completion>,
    /// `io_uring_enter` failed for good: nothing is submitted any more.
    broken: Option<Errno>,
}

impl std::fmt::Debug for Uring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uring")
            .field("options", &self.options)
            .field("in_flight", &self.ops.files.in_flight())
            .field("staged", &self.staged.len())
            .field("broken", &self.broken)
            .finish_non_exhaustive()
    }
}

impl Uring {
    pub(crate) fn open(options: EngineOptions) -> Result<Self, Error> {
        probe::try_one()?;
        let failed = |step| move |source| Error::Uring { step, source };
        let (ring, enabled) = ring::make(&options)?;
        let fixed = ring.submitter().register_files_sparse(FIXED_FILES).is_ok();
        let buffers = options.fixed_buffers.then(|| Registered::new(&ring.submitter())).transpose();
        let buffers = buffers.map_err(failed("a table of buffers"))?;
        let event = event_of(&ring).map_err(failed("epoll"))?;
        let ring_fd = rustix::io::fcntl_dupfd_cloexec(&ring, 0).map_err(|e| failed("dup")(e.into()))?;
        let jobs = Jobs::start(options.depth as usize, options.owners as usize).map_err(Error::Threads)?;
        epoll::add(&event, jobs.event(), epoll::EventData::new_u64(0), epoll::EventFlags::IN)
            .map_err(|e| failed("epoll")(e.into()))?;
        let shares = options.shares();
        let depth = shares.total();
        let ops = Operations {
            slots: Slots::new(depth),
            files: Files::new(shares),
            buffers,
            again: Vec::new(),
            missed: Vec::new(),
        };
        let mut uring = Self {
            ring,
            ring_fd: Arc::new(ring_fd),
            options,
            aio: None,
            jobs,
            event,
            enabled,
            submitter: None,
            called: None,
            ops,
            fixed,
            staged: VecDeque::with_capacity(depth),
            pushed: 0,
            failed: Vec::new(),
            broken: None,
        };
        // A ring with a thread of the kernel's needs none of ours.
        if options.completion == CompletionMode::Thread && !options.sqpoll {
            uring.start_submitter().map_err(failed("a thread that submits"))?;
        }
        Ok(uring)
    }

    pub(crate) fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    pub(crate) fn register(&mut self, backing: &BackingFile) -> FileId {
        let BackingFile { file, owner, facts } = backing.clone();
        let (fd, mut routes) = (file.as_raw_fd(), Routes::by_ring(facts));
        if routes.use_aio() && !self.open_aio() {
            routes = Routes::all(Route::Blocking);
        }
        let (id, index) = self.ops.files.insert(file, owner);
        self.ops.files.set_routes(index, routes);
        if self.fixed
            && index < FIXED_FILES
            && matches!(self.ring.submitter().register_files_update(index, &[fd]), Ok(1))
        {
            self.ops.files.set_fixed(index);
        }
        id
    }

    /// Whether there is kernel AIO. Where it cannot be had threads serve.
    fn open_aio(&mut self) -> bool {
        if self.aio.is_none() {
            let depth = self.options.shares().total();
            self.aio = Transfers::open(depth, self.options.completion, &self.event)
                .inspect_err(|error| debug!(%error, "no kernel AIO for a device on which io_uring is slow"))
                .ok();
        }
        self.aio.is_some()
    }

    pub(crate) fn unregister(&mut self, file: FileId) {
        let gone = self.ops.files.remove(file);
        forget(&self.ring.submitter(), gone);
    }

    pub(crate) fn merge(&mut self, file: FileId, merge: bool) {
        self.ops.files.set_merge(file, merge);
    }

    pub(crate) fn hold_memory(&mut self, view: &Arc<View>) {
        if let Some(buffers) = &mut self.ops.buffers {
            buffers.hold(&self.ring.submitter(), view);
        }
    }

    pub(crate) fn release_memory(&mut self, view: &Arc<View>) {
        if let Some(buffers) = &mut self.ops.buffers {
            buffers.release(&self.ring.submitter(), view);
        }
    }

    #[inline]
    pub(crate) fn queue(&mut self, op: Op, token: Token) -> Result<(), Op> {
        if self.ops.files.room(op.file) == 0 {
            return Err(op);
        }
        let Operations { slots, files, .. } = &mut self.ops;
        let held = files.hold(op.file);
        let route = files.route(held, op.kind, op.buffers.len());
        if !op.kind.is_transfer() {
            self.jobs.queue(held, token, op, files);
            return Ok(());
        }
        let mut operation = InFlight::new(token, held, op, route == Route::NoWait);
        let owner = (route == Route::Offload).then_some(held.owner());
        let aio = self.aio.as_mut().filter(|_| matches!(route, Route::Memory | Route::Offload));
        if files.merges(held) {
            let last = match &aio {
                Some(aio) => aio.last(owner),
                None if route == Route::Blocking => self.jobs.last_place(),
                None if self.staged.len() > self.pushed => self.staged.back().copied(),
                None => None,
            };
            if let Some(last) = last {
                match slots.join(last, operation) {
                    Ok(()) => return Ok(()),
                    Err(back) => operation = back,
                }
            }
        }
        let place = slots.insert(operation);
        match (aio, owner) {
            (Some(aio), Some(owner)) => aio.queue_for(owner, place),
            (Some(aio), None) => aio.queue(place),
            (None, _) if route == Route::Blocking => self.jobs.queue_place(place),
            (None, _) => {
                self.submit_early();
                self.staged.push_back(place);
            }
        }
        Ok(())
    }

    pub(crate) fn submit(&mut self) -> io::Result<()> {
        self.submit_aio();
        self.jobs.stage_places(&mut self.ops.slots, &self.ops.files);
        self.jobs.submit();
        self.submit_ring()
    }

    fn submit_aio(&mut self) {
        let Self { aio: Some(aio), jobs, ops, .. } = self else { return };
        aio.submit_lanes(&mut ops.slots, &ops.files, jobs);
        let mut refused = Vec::new();
        let had_room = aio.submit(&mut ops.slots, &ops.files, |place, errno| refused.push((place, errno)));
        self.submitted(had_room, refused);
    }

    /// Takes note of the result of a call of `io_submit`.
    fn submitted(&mut self, had_room: bool, refused: Vec<(u32, Errno)>) {
        let Self { ops, failed, ring, .. } = self;
        for (place, errno) in refused {
            ops.complete(&ring.submitter(), place, Err(errno), failed);
        }
        self.stage_again();
        if !had_room {
            self.ops.files.stall_all();
        }
    }

    /// Merged operations that are to be done each by itself, and those for threads.
    fn stage_again(&mut self) {
        let Operations { slots, files, again, missed, .. } = &mut self.ops;
        for place in again.drain(..) {
            let Some(operation) = slots.get_mut(place) else { continue };
            let held = operation.held;
            let route = files.route(held, operation.op.kind, operation.op.buffers.len());
            operation.nowait = route == Route::NoWait;
            match (&mut self.aio, route) {
                (Some(aio), Route::Memory) => aio.queue(place),
                (Some(aio), Route::Offload) => aio.queue_for(held.owner(), place),
                (_, Route::Blocking) => self.jobs.queue_place(place),
                _ => self.staged.push_back(place),
            }
        }
        missed.drain(..).for_each(|place| self.jobs.queue_place(place));
    }

    /// One `io_uring_enter`, which also runs what the kernel has put off.
    fn enter(&mut self, submit: u32, wait: u32) -> Result<usize, Errno> {
        let asks = wait > 0 || self.kernel_waits();
        let flags = if asks { EnterFlags::GETEVENTS } else { EnterFlags::empty() };
        // SAFETY: no argument is passed, and the flags need none.
        unsafe { self.ring.submitter().enter::<libc::sigset_t>(submit, wait, flags.bits(), None) }
            .map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))
    }

    /// Whether the kernel has completions that it puts into the ring only when asked.
    fn kernel_waits(&mut self) -> bool {
        let queue = self.ring.submission();
        queue.taskrun() || queue.cq_overflow()
    }

    pub(crate) fn reap(&mut self, into: &mut Vec<Completion>) {
        self.reap_all(into);
        if !self.ops.again.is_empty() || !self.ops.missed.is_empty() {
            self.stage_again();
        }
    }

    fn reap_all(&mut self, into: &mut Vec<Completion>) {
        into.append(&mut self.failed);
        self.reap_jobs(into);
        // Before the look at the ring, and before anybody asks whether the thread is busy.
        if let Some(called) = &self.called {
            called.clear();
        }
        // Its only failure is a context that is no context.
        let _ = self.reap_aio(false, into);
        if !self.drain(into) && self.kernel_waits() {
            // A failure shows itself again in the next submission.
            let _ = self.enter(0, 0);
            self.drain(into);
        }
    }

    fn reap_jobs(&mut self, into: &mut Vec<Completion>) {
        let Self { jobs, ops, ring, .. } = self;
        let submitter = ring.submitter();
        let others = jobs.reap(&mut ops.files, |completion, gone| {
            into.push(completion);
            forget(&submitter, gone);
        });
        for other in others {
            match (other, &mut self.aio) {
                (Other::Transferred(place, result), _) => {
                    self.ops.complete(&self.ring.submitter(), place, result, into);
                }
                (Other::Submitted(submitted), Some(aio)) => {
                    let mut refused = Vec::new();
                    let had_room = aio.submitted(submitted, |place, errno| refused.push((place, errno)));
                    self.submitted(had_room, refused);
                }
                // It has no batches.
                (Other::Submitted(_), None) => {}
            }
        }
    }

    fn reap_aio(&mut self, wait: bool, into: &mut Vec<Completion>) -> Result<(), Errno> {
        let Self { aio: Some(aio), ops, ring, .. } = self else { return Ok(()) };
        let submitter = ring.submitter();
        aio.reap(wait, |place, result| ops.complete(&submitter, place, result, into))
    }

    /// Empties the completion ring; whether anything was in it.
    fn drain(&mut self, into: &mut Vec<Completion>) -> bool {
        let (submitter, _, ring) = self.ring.split();
        let mut any = false;
        for done in ring {
            any = true;
            let result = match done.result() {
                bytes @ 0.. => Ok(bytes as u32),
                errno => Err(Errno::from_raw_os_error(-errno)),
            };
            // `user_data` comes back as it went in: a place.
            self.ops.complete(&submitter, done.user_data() as u32, result, into);
        }
        any
    }

    pub(crate) fn needs_turn(&self) -> bool {
        let waits_for_thread = || self.submitter.as_ref().is_some_and(|submitter| submitter.is_busy());
        (!self.staged.is_empty() && !waits_for_thread())
            || !self.failed.is_empty()
            || self.aio.as_ref().is_some_and(Transfers::needs_turn)
            || self.jobs.needs_turn()
    }

    pub(crate) fn failed(&self) -> usize {
        self.failed.len()
    }
}

/// A descriptor that is readable when the ring is, with room for others beside it.
fn event_of(ring: &IoUring) -> io::Result<OwnedFd> {
    let event = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(&event, ring, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
    Ok(event)
}

impl Drop for Uring {
    fn drop(&mut self) {
        self.stop_submitter();
        let mut done = Vec::new();
        // What is staged for threads has not been seen by them. They are ended first, for they tell the kernel of operations, too.
        self.jobs.take_places().for_each(|place| self.ops.slots.take(place, drop));
        self.jobs.finish();
        self.reap_jobs(&mut done);
        loop {
            // What has come back may have staged more for threads, which there are none of any more.
            self.jobs.take_places().for_each(|place| self.ops.slots.take(place, drop));
            // What is staged has not been seen by the kernel, and never will be.
            let again = self.ops.again.drain(..).chain(self.staged.drain(..));
            for place in again.chain(self.aio.iter_mut().flat_map(Transfers::take_staged)) {
                self.ops.slots.take(place, drop);
            }
            self.ops.missed.drain(..).for_each(|place| self.ops.slots.perform(place, &self.ops.files));
            done.clear();
            if self.aio.as_ref().is_some_and(|aio| aio.in_flight() > 0)
                && self.reap_aio(true, &mut done).is_ok()
            {
                continue;
            }
            self.reap_all(&mut done);
            if !self.ops.again.is_empty() || !self.ops.missed.is_empty() {
                continue;
            }
            if self.ops.slots.used() == 0 {
                // The kernel takes the ring apart later; files are not to stay open until then, nor memory to stay pinned.
                if self.fixed {
                    let _ = self.ring.submitter().unregister_files();
                }
                if self.ops.buffers.is_some() {
                    let _ = self.ring.submitter().unregister_buffers();
                }
                return;
            }
            match self.enter(0, 1) {
                Ok(_) | Err(Errno::INTR | Errno::AGAIN | Errno::BUSY) => {}
                Err(_) => break,
            }
        }
        // Nobody can tell when the kernel will have finished with these buffers.
        std::mem::forget(std::mem::take(&mut self.ops.slots));
    }
}
