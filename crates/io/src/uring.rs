//! The io_uring engine: one ring for each worker.
#![expect(unsafe_code, reason = "island: buffers handed to the kernel")]

mod probe;
mod ring;
mod suits;

use crate::files::{Files, Gone};
use crate::jobs::Jobs;
use crate::op::{BYTES_MAX, OpKind, View};
use crate::slots::{InFlight, Slots};
use crate::stall::Stall;
use crate::transfers::Transfers;
use crate::{Completion, Error, FileId, Op, Token};
use io_uring::{EnterFlags, IoUring, Submitter, opcode, squeue, types};
use rustix::event::epoll;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use tracing::debug;

/// Files that the kernel knows by index, which spares it a look-up for each operation. Later ones go by
/// descriptor.
const FIXED_FILES: u32 = 64;

/// Operations that are left to threads at a time.
const JOBS_MAX: usize = 64;

/// An io_uring and the operations that are in it.
pub struct Uring {
    ring: IoUring,
    /// For files on which the ring would be slow; made with the first of them.
    aio: Option<Transfers>,
    /// For calls that the ring does not make; made with the first of them.
    jobs: Option<Jobs>,
    /// Readable when one of the three is.
    event: OwnedFd,
    /// The ring belongs to a thread, the first one that submits.
    enabled: bool,
    slots: Slots,
    files: Files,
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

impl std::fmt::Debug for Uring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uring")
            .field("depth", &(self.slots.used() + self.slots.room()))
            .field("in_flight", &self.in_flight())
            .field("staged", &self.staged.len())
            .field("broken", &self.broken)
            .finish_non_exhaustive()
    }
}

impl Uring {
    pub(crate) fn open(depth: u32) -> Result<Self, Error> {
        probe::try_one()?;
        let (ring, enabled) = ring::make(depth)?;
        let fixed = ring.submitter().register_files_sparse(FIXED_FILES).is_ok();
        let event = event_of(&ring).map_err(|source| Error::Uring { step: "epoll", source })?;
        let depth = depth as usize;
        Ok(Self {
            ring,
            aio: None,
            jobs: None,
            event,
            enabled,
            slots: Slots::new(depth),
            files: Files::default(),
            fixed,
            staged: VecDeque::with_capacity(depth),
            pushed: 0,
            failed: Vec::new(),
            broken: None,
            stall: Stall::default(),
        })
    }

    pub(crate) fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    pub(crate) fn register(&mut self, file: Arc<File>) -> FileId {
        let (fd, by_aio) = (file.as_raw_fd(), suits::aio_suits(&file) && self.open_aio());
        let (id, index) = self.files.insert(file);
        if by_aio {
            self.files.set_aio(index);
        }
        if self.fixed
            && index < FIXED_FILES
            && matches!(self.ring.submitter().register_files_update(index, &[fd]), Ok(1))
        {
            self.files.set_fixed(index);
        }
        id
    }

    /// Whether there is kernel AIO. Where it cannot be had the ring serves.
    fn open_aio(&mut self) -> bool {
        if self.aio.is_none() {
            let depth = self.slots.used() + self.slots.room();
            self.aio = Transfers::open(depth, &self.event)
                .inspect_err(|error| debug!(%error, "no kernel AIO for a device on which io_uring is slow"))
                .ok();
        }
        self.aio.is_some()
    }

    pub(crate) fn unregister(&mut self, file: FileId) {
        forget(&self.ring.submitter(), self.files.remove(file));
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
        let held = self.files.hold(op.file);
        let place = self.slots.insert(InFlight { token, held, op });
        match &mut self.aio {
            Some(aio) if transfer && self.files.is_aio(held) => aio.queue(place),
            _ => self.staged.push_back(place),
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
            Some(jobs) => jobs.queue(op, token, &mut self.files),
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
            self.push_staged();
            match self.enter(self.pushed as u32, 0) {
                Ok(taken) => {
                    let taken = taken.min(self.pushed);
                    self.staged.drain(..taken);
                    self.pushed -= taken;
                    if self.staged.is_empty() {
                        return Ok(());
                    }
                    // Nothing taken and no error: "later" as well.
                    if taken == 0 {
                        self.stall.begin();
                        return Ok(());
                    }
                }
                Err(Errno::INTR) => {}
                // Out of memory for requests, or completions must be taken out first.
                Err(Errno::AGAIN | Errno::BUSY) => {
                    self.stall.begin();
                    return Ok(());
                }
                Err(errno) => return Err(self.fail_staged(errno)),
            }
        }
    }

    fn submit_aio(&mut self) {
        let Self { aio: Some(aio), slots, files, failed, ring, stall, .. } = self else { return };
        let mut refused = Vec::new();
        aio.submit(slots, files, |place, errno| refused.push((place, errno)));
        if aio.needs_turn() && !stall.is_on() {
            stall.begin();
        }
        for (place, errno) in refused {
            if let Some((completion, gone)) = complete(slots, files, place, Err(errno)) {
                failed.push(completion);
                forget(&ring.submitter(), gone);
            }
        }
    }

    /// Moves staged operations into the submission ring, as many as fit.
    fn push_staged(&mut self) {
        let mut queue = self.ring.submission();
        while let Some(&place) = self.staged.get(self.pushed) {
            let Some(operation) = self.slots.get_mut(place) else {
                debug_assert!(false, "a staged operation has its slot");
                self.staged.remove(self.pushed);
                continue;
            };
            let entry = entry(operation, &self.files).user_data(u64::from(place));
            // SAFETY: the buffers and the file belong to the slot, which keeps them unchanged until the
            // completion has been reaped; a dropped engine waits for that or leaks them.
            if unsafe { queue.push(&entry) }.is_err() {
                return;
            }
            self.pushed += 1;
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

    /// Completes everything that the kernel has not taken. What is in the submission ring stays there, and is
    /// never looked at again: without a call the kernel does not.
    fn fail_staged(&mut self, errno: Errno) -> io::Error {
        self.broken = Some(errno);
        self.pushed = 0;
        for place in self.staged.drain(..) {
            let Some((completion, gone)) = complete(&mut self.slots, &mut self.files, place, Err(errno))
            else {
                continue;
            };
            self.failed.push(completion);
            forget(&self.ring.submitter(), gone);
        }
        errno.into()
    }

    pub(crate) fn reap(&mut self, into: &mut Vec<Completion>) {
        let before = into.len();
        self.reap_all(into);
        if into.len() > before {
            self.stall.end();
        }
    }

    fn reap_all(&mut self, into: &mut Vec<Completion>) {
        into.append(&mut self.failed);
        if let Some(jobs) = &mut self.jobs {
            let submitter = self.ring.submitter();
            jobs.reap(&mut self.files, |completion, gone| {
                into.push(completion);
                forget(&submitter, gone);
            });
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
        let Self { aio: Some(aio), slots, files, ring, .. } = self else { return Ok(()) };
        let submitter = ring.submitter();
        aio.reap(wait, |place, result| {
            if let Some((completion, gone)) = complete(slots, files, place, result) {
                into.push(completion);
                forget(&submitter, gone);
            }
        })
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
            let place = done.user_data() as u32;
            if let Some((completion, gone)) = complete(&mut self.slots, &mut self.files, place, result) {
                into.push(completion);
                forget(&submitter, gone);
            }
        }
        any
    }

    pub(crate) fn needs_turn(&self) -> bool {
        !self.staged.is_empty()
            || !self.failed.is_empty()
            || self.stall.is_on()
            || self.aio.as_ref().is_some_and(Transfers::needs_turn)
            || self.jobs.as_ref().is_some_and(Jobs::needs_turn)
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.slots.used() + self.failed.len() + self.jobs.as_ref().map_or(0, Jobs::in_flight)
    }

    #[inline]
    pub(crate) fn room(&self) -> usize {
        if self.stall.is_on() { 0 } else { self.slots.room() }
    }
}

/// A descriptor that is readable when the ring is, with room for others beside it.
fn event_of(ring: &IoUring) -> io::Result<OwnedFd> {
    let event = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(&event, ring, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
    Ok(event)
}

/// Frees a slot; its completion, and the file that went with it.
#[inline]
fn complete(
    slots: &mut Slots,
    files: &mut Files,
    place: u32,
    result: Result<u32, Errno>,
) -> Option<(Completion, Option<Gone>)> {
    let InFlight { token, held, op } = slots.remove(place)?;
    Some((Completion { token, result, buffers: op.buffers }, files.release(held)))
}

/// The kernel lets go of a file as well. Should it refuse, the next file that gets the place replaces it.
#[inline]
fn forget(submitter: &Submitter<'_>, gone: Option<Gone>) {
    if let Some(Gone { index, fixed: true }) = gone {
        let _ = submitter.register_files_update(index, &[-1]);
    }
}

/// The submission for an operation.
fn entry(operation: &mut InFlight, files: &Files) -> squeue::Entry {
    let (fd, fixed) = match files.get(operation.held) {
        Some((_, index, true)) => (index as i32, squeue::Flags::FIXED_FILE),
        Some((file, _, false)) => (file.as_raw_fd(), squeue::Flags::empty()),
        // The kernel completes it with EBADF.
        None => (-1, squeue::Flags::empty()),
    };
    let fd = types::Fd(fd);
    let Op { kind, offset, buffers, .. } = &mut operation.op;
    let offset = *offset;
    let flags = if *kind == (OpKind::Write { durable: true }) { libc::RWF_DSYNC } else { 0 };
    let short = |len: usize| len.min(BYTES_MAX) as u32;
    let entry = match (*kind, buffers.view(*kind)) {
        (OpKind::Range { call, len }, _) => {
            opcode::Fallocate::new(fd, len).offset(offset).mode(call.mode().unwrap_or_default()).build()
        }
        (OpKind::Flush, _) => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
        (OpKind::Read, View::One(at, len)) => opcode::Read::new(fd, at, short(len)).offset(offset).build(),
        (OpKind::Read, View::Many(at, count)) => {
            opcode::Readv::new(fd, at, count as u32).offset(offset).build()
        }
        (OpKind::Write { .. }, View::One(at, len)) => {
            opcode::Write::new(fd, at, short(len)).offset(offset).rw_flags(flags).build()
        }
        (OpKind::Write { .. }, View::Many(at, count)) => {
            opcode::Writev::new(fd, at, count as u32).offset(offset).rw_flags(flags).build()
        }
    };
    entry.flags(fixed)
}

impl Drop for Uring {
    fn drop(&mut self) {
        // What is staged has not been seen by the kernel, and never will be.
        for place in self.staged.drain(..).chain(self.aio.iter_mut().flat_map(Transfers::take_staged)) {
            drop(self.slots.remove(place));
        }
        let mut done = Vec::new();
        while self.aio.as_ref().is_some_and(|aio| aio.in_flight() > 0)
            && self.reap_aio(true, &mut done).is_ok()
        {
            done.clear();
        }
        loop {
            self.reap(&mut done);
            done.clear();
            if self.slots.used() == 0 {
                // The kernel takes the ring apart later; the files are not to stay open until then.
                if self.fixed {
                    let _ = self.ring.submitter().unregister_files();
                }
                return;
            }
            match self.enter(0, 1) {
                Ok(_) | Err(Errno::INTR | Errno::AGAIN | Errno::BUSY) => {}
                Err(_) => break,
            }
        }
        // Nobody can tell when the kernel will have finished with these buffers.
        std::mem::forget(std::mem::take(&mut self.slots));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AlignedBuf, Buffers};
    use kickless_memory::{Gpa, Iov, Map, Slot, UserAddr, View};
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    const DEPTH: u32 = 200;
    const LEN: usize = 4096;

    fn engine() -> (Uring, FileId, Arc<File>) {
        let mut uring = Uring::open(DEPTH).unwrap();
        let file = Arc::new(tempfile::tempfile().unwrap());
        file.set_len(u64::from(DEPTH) * LEN as u64).unwrap();
        let id = uring.register(file.clone());
        // The path of a device that io_uring is slow with, which need not be at hand here.
        assert!(uring.open_aio());
        uring.files.set_aio(0);
        (uring, id, file)
    }

    fn buffer(number: u32) -> Buffers {
        let mut buffer = AlignedBuf::new(LEN, LEN).unwrap();
        buffer.fill(number as u8);
        Buffers::Owned(buffer)
    }

    fn queue(uring: &mut Uring, file: FileId, kind: OpKind, number: u32, buffers: Buffers) {
        let op = Op { file, kind, offset: u64::from(number) * LEN as u64, buffers };
        assert!(uring.queue(op, Token { source: 0, slot: number }).is_ok());
    }

    /// All that is in flight, sleeping for it.
    fn finish(uring: &mut Uring) -> Vec<Completion> {
        let mut done = Vec::new();
        uring.submit().unwrap();
        while uring.in_flight() > 0 {
            let limit = Timespec { tv_sec: 30, tv_nsec: 0 };
            let mut event = [PollFd::from_borrowed_fd(uring.event(), PollFlags::IN)];
            assert!(uring.needs_turn() || poll(&mut event, Some(&limit)).unwrap() == 1, "nothing completes");
            uring.submit().unwrap();
            uring.reap(&mut done);
        }
        done
    }

    #[test]
    fn every_transfer_by_kernel_aio() {
        let (mut uring, file, _) = engine();
        for number in 0..DEPTH {
            let durable = number % 2 == 0;
            queue(&mut uring, file, OpKind::Write { durable }, number, buffer(number));
        }
        assert!(
            uring
                .queue(Op { file, kind: OpKind::Read, offset: 0, buffers: buffer(0) }, Token::default())
                .is_err()
        );
        let done = finish(&mut uring);
        assert_eq!(done.len(), DEPTH as usize);
        assert!(done.iter().all(|completion| completion.result == Ok(LEN as u32)));

        queue(&mut uring, file, OpKind::Flush, 0, Buffers::None);
        assert_eq!(finish(&mut uring)[0].result, Ok(0));

        let memory = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&memory, 1 << 20).unwrap();
        let slot = Slot::map(&memory, 0, Gpa(0), UserAddr(0), 1 << 20).unwrap();
        let view = Arc::new(View::new(Map::new(vec![slot]).unwrap()));
        let mut iov = Iov::default();
        iov.push(&view, Gpa(0), 1024).unwrap();
        iov.push(&view, Gpa(8192), 3072).unwrap();
        queue(&mut uring, file, OpKind::Read, 7, Buffers::Guest(iov));
        queue(&mut uring, file, OpKind::Read, 9, buffer(0));
        for Completion { token, result, buffers } in finish(&mut uring) {
            assert_eq!(result, Ok(LEN as u32));
            let mut read = vec![0; LEN];
            match &buffers {
                Buffers::Guest(iov) => assert_eq!(iov.read(0, &mut read), LEN),
                Buffers::Owned(buffer) => read.copy_from_slice(buffer),
                Buffers::None => panic!("the buffers are lost"),
            }
            assert!(read.iter().all(|byte| u32::from(*byte) == token.slot), "{token:?}");
        }
        // Nothing is left that would wake anybody.
        let mut event = [PollFd::from_borrowed_fd(uring.event(), PollFlags::IN)];
        assert_eq!(poll(&mut event, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap(), 0);
    }

    #[test]
    fn refused_and_failed_transfers_by_kernel_aio() {
        let (mut uring, file, ours) = engine();
        queue(&mut uring, file, OpKind::Read, 0, buffer(0));
        let read_only = Arc::new(File::open("/proc/self/exe").unwrap());
        let other = uring.register(read_only);
        uring.files.set_aio(1);
        queue(&mut uring, other, OpKind::Write { durable: false }, 1, buffer(0));
        queue(&mut uring, file, OpKind::Read, 2, buffer(0));
        uring.unregister(file);
        let mut results: Vec<_> = finish(&mut uring).iter().map(|c| (c.token.slot, c.result)).collect();
        results.sort_by_key(|(slot, _)| *slot);
        assert_eq!(results, [(0, Ok(LEN as u32)), (1, Err(Errno::BADF)), (2, Ok(LEN as u32))]);
        assert_eq!(Arc::strong_count(&ours), 1, "the engine keeps a file that it was told to forget");
    }

    #[test]
    fn dropped_with_transfers_in_kernel_aio() {
        let (mut uring, file, ours) = engine();
        for number in 0..DEPTH / 2 {
            queue(&mut uring, file, OpKind::Read, number, buffer(0));
        }
        uring.submit().unwrap();
        for number in 0..DEPTH / 2 {
            queue(&mut uring, file, OpKind::Read, number, buffer(0));
        }
        drop(uring);
        assert_eq!(Arc::strong_count(&ours), 1);
    }

    #[test]
    fn files_on_which_the_ring_is_fast_stay_with_it() {
        let mut uring = Uring::open(1).unwrap();
        uring.register(Arc::new(tempfile::tempfile().unwrap()));
        uring.register(Arc::new(File::open("/dev/null").unwrap()));
        assert!(uring.aio.is_none());
    }
}
