//! The io_uring engine: one ring for each worker.
#![expect(unsafe_code, reason = "island: buffers handed to the kernel")]

mod buffers;
mod entry;
mod probe;
mod ring;
mod submission;
mod suits;
#[cfg(test)]
mod tests;

use crate::files::{Files, Gone};
use crate::jobs::Jobs;
use crate::op::OpKind;
use crate::slots::{InFlight, Slots};
use crate::stall::Stall;
use crate::submitter::SubmitThread;
use crate::transfers::Transfers;
use crate::{Completion, CompletionMode, EngineOptions, Error, FileId, Op, Token, Waker};
use buffers::Registered;
use io_uring::{EnterFlags, IoUring, Submitter};
use kickless_memory::View;
use rustix::event::epoll;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use submission::Enter;
use tracing::debug;

/// Files that the kernel knows by index, which spares it a look-up for each operation. Later ones go by
/// descriptor.
const FIXED_FILES: u32 = 64;

/// Operations that are left to threads at a time.
const JOBS_MAX: usize = 64;

/// An io_uring and the operations that are in it.
pub struct Uring {
    ring: IoUring,
    /// The same ring, for the thread that submits.
    ring_fd: Arc<OwnedFd>,
    options: EngineOptions,
    /// For files on which the ring would be slow; made with the first of them.
    aio: Option<Transfers>,
    /// For calls that the ring does not make; made with the first of them.
    jobs: Option<Jobs>,
    /// Readable when one of the three is, or `called`.
    event: OwnedFd,
    /// The ring belongs to a thread, the first one that submits.
    enabled: bool,
    /// It makes the calls that submit, and signals `called` then.
    submitter: Option<SubmitThread<Enter>>,
    called: Option<Waker>,
    ops: Operations,
    /// The kernel can know files by index.
    fixed: bool,
    /// Queued and not taken by the kernel, oldest first. The first `pushed` are in the submission ring already.
    staged: VecDeque<u32>,
    pushed: usize,
    /// Completed without the kernel.
    failed: Vec<Completion>,
    /// `io_uring_enter` failed for good: nothing is submitted any more.
    broken: Option<Errno>,
    stall: Stall,
}

/// Operations in flight, and what they use.
struct Operations {
    slots: Slots,
    files: Files,
    /// Guest memory that the kernel has pinned, where that is asked for.
    buffers: Option<Registered>,
    /// Places of merged operations that are to be done each by itself.
    again: Vec<u32>,
}

impl std::fmt::Debug for Uring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uring")
            .field("options", &self.options)
            .field("in_flight", &self.in_flight())
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
        let depth = options.depth as usize;
        let mut uring = Self {
            ring,
            ring_fd: Arc::new(ring_fd),
            options,
            aio: None,
            jobs: None,
            event,
            enabled,
            submitter: None,
            called: None,
            ops: Operations { slots: Slots::new(depth), files: Files::default(), buffers, again: Vec::new() },
            fixed,
            staged: VecDeque::with_capacity(depth),
            pushed: 0,
            failed: Vec::new(),
            broken: None,
            stall: Stall::default(),
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

    pub(crate) fn register(&mut self, file: Arc<File>) -> FileId {
        let (fd, by_aio) = (file.as_raw_fd(), suits::aio_suits(&file) && self.open_aio());
        let (id, index) = self.ops.files.insert(file);
        if by_aio {
            self.ops.files.set_aio(index);
        }
        if self.fixed
            && index < FIXED_FILES
            && matches!(self.ring.submitter().register_files_update(index, &[fd]), Ok(1))
        {
            self.ops.files.set_fixed(index);
        }
        id
    }

    /// Whether there is kernel AIO. Where it cannot be had the ring serves.
    fn open_aio(&mut self) -> bool {
        if self.aio.is_none() {
            let depth = self.options.depth as usize;
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
        if self.room() == 0 {
            return Err(op);
        }
        let transfer = op.kind.is_transfer();
        if let OpKind::Range { call, .. } = op.kind
            && call.mode().is_none()
        {
            return self.queue_job(op, token);
        }
        let Operations { slots, files, .. } = &mut self.ops;
        let mut operation = InFlight::new(token, files.hold(op.file), op);
        let aio = self.aio.as_mut().filter(|_| transfer && files.is_aio(operation.held));
        if files.merges(operation.held) {
            let last = match &aio {
                Some(aio) => aio.last(),
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
        if let Some(aio) = aio {
            aio.queue(place);
        } else {
            self.submit_ahead();
            self.staged.push_back(place);
        }
        Ok(())
    }

    /// For a thread. Where there is none to be had the operation fails.
    fn queue_job(&mut self, op: Op, token: Token) -> Result<(), Op> {
        if self.jobs.is_none() {
            let jobs = Jobs::start(JOBS_MAX).and_then(|jobs| {
                epoll::add(&self.event, jobs.event(), epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
                Ok(jobs)
            });
            self.jobs = jobs.inspect_err(|error| debug!(%error, "no threads for discards")).ok();
        }
        match &mut self.jobs {
            Some(jobs) if jobs.in_flight() >= JOBS_MAX => return Err(op),
            Some(jobs) => jobs.queue(op, token, &mut self.ops.files),
            None => self.failed.push(Completion { token, result: Err(Errno::NOMEM), buffers: op.buffers }),
        }
        Ok(())
    }

    pub(crate) fn stall(&mut self) {
        self.stall.begin();
    }

    pub(crate) fn submit(&mut self) -> io::Result<()> {
        self.stall.look();
        self.submit_aio();
        if let Some(jobs) = &mut self.jobs {
            jobs.submit();
        }
        self.submit_ring()
    }

    fn submit_aio(&mut self) {
        let Self { aio: Some(aio), ops, failed, ring, .. } = self else { return };
        let mut refused = Vec::new();
        let had_room = aio.submit(&mut ops.slots, &ops.files, |place, errno| refused.push((place, errno)));
        for (place, errno) in refused {
            ops.complete(&ring.submitter(), place, Err(errno), failed);
        }
        self.stage_again();
        if !had_room && !self.stall.is_on() {
            self.stall.begin();
        }
    }

    /// Merged operations that are to be done each by itself.
    fn stage_again(&mut self) {
        let Operations { slots, files, again, .. } = &mut self.ops;
        for place in again.drain(..) {
            match (&mut self.aio, slots.get_mut(place)) {
                (Some(aio), Some(operation)) if files.is_aio(operation.held) => aio.queue(place),
                _ => self.staged.push_back(place),
            }
        }
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
        let before = into.len();
        self.reap_all(into);
        if !self.ops.again.is_empty() {
            self.stage_again();
        }
        if into.len() > before {
            self.stall.end();
        }
    }

    fn reap_all(&mut self, into: &mut Vec<Completion>) {
        into.append(&mut self.failed);
        if let Some(jobs) = &mut self.jobs {
            jobs.reap(&mut self.ops.files, |completion, gone| {
                into.push(completion);
                forget(&self.ring.submitter(), gone);
            });
        }
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
            || self.stall.is_on()
            || self.aio.as_ref().is_some_and(Transfers::needs_turn)
            || self.jobs.as_ref().is_some_and(Jobs::needs_turn)
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.ops.slots.used() + self.failed.len() + self.jobs.as_ref().map_or(0, Jobs::in_flight)
    }

    #[inline]
    pub(crate) fn room(&self) -> usize {
        if self.stall.is_on() { 0 } else { self.ops.slots.room() }
    }
}

impl Operations {
    /// The kernel has done what it was told of `place`.
    #[inline]
    fn complete(
        &mut self,
        submitter: &Submitter<'_>,
        place: u32,
        result: Result<u32, Errno>,
        into: &mut Vec<Completion>,
    ) {
        self.let_go(submitter, place);
        let Self { slots, files, again, .. } = self;
        slots.complete(place, result, again, |InFlight { token, held, op, .. }, result| {
            into.push(Completion { token, result, buffers: op.buffers });
            forget(submitter, files.release(held));
        });
    }

    /// The operation at `place` is over, with all that are one with it.
    fn fail(&mut self, submitter: &Submitter<'_>, place: u32, errno: Errno, into: &mut Vec<Completion>) {
        self.let_go(submitter, place);
        let Self { slots, files, .. } = self;
        slots.take(place, |InFlight { token, held, op, .. }| {
            into.push(Completion { token, result: Err(errno), buffers: op.buffers });
            forget(submitter, files.release(held));
        });
    }

    /// The kernel uses no registered buffer for `place` any more.
    #[inline]
    fn let_go(&mut self, submitter: &Submitter<'_>, place: u32) {
        if let Some(buffers) = &mut self.buffers
            && let Some(operation) = self.slots.get_mut(place)
            && let Some(index) = operation.buffer.take()
        {
            buffers.done(submitter, index);
        }
    }
}

/// A descriptor that is readable when the ring is, with room for others beside it.
fn event_of(ring: &IoUring) -> io::Result<OwnedFd> {
    let event = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(&event, ring, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
    Ok(event)
}

/// The kernel lets go of a file as well. Should it refuse, the next file that gets the place replaces it.
#[inline]
fn forget(submitter: &Submitter<'_>, gone: Option<Gone>) {
    if let Some(Gone { index, fixed: true }) = gone {
        let _ = submitter.register_files_update(index, &[-1]);
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        self.stop_submitter();
        let mut done = Vec::new();
        loop {
            // What is staged has not been seen by the kernel, and never will be.
            for place in self.staged.drain(..).chain(self.aio.iter_mut().flat_map(Transfers::take_staged)) {
                self.ops.slots.take(place, drop);
            }
            done.clear();
            if self.aio.as_ref().is_some_and(|aio| aio.in_flight() > 0)
                && self.reap_aio(true, &mut done).is_ok()
            {
                self.stage_again();
                continue;
            }
            self.reap(&mut done);
            if !self.staged.is_empty() {
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
