//! The path of a request through a file: direct if possible, otherwise piece by piece through a bounce
//! buffer.

use super::bounce::Bounce;
use super::disk::{Direct, FileDisk};
use super::operation::{Flow, bounce, queue};
use super::state::{FileState, Phase};
use crate::buffers::{IoBuffers, TransferBuffers};
use crate::op_sender::OpSender;
use crate::{IoError, Request, Step};
use kickless_io::{Buffers, Completion, Errno, OpKind};

/// The number of times in a row that the kernel may ask for a retry.
const RETRIES_MAX: u16 = 1000;

/// A request without the checks of a guest's: it may go beyond the end of the file, where reads find zeroes
/// unless the file has become shorter.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Unchecked {
    Read {
        at: u64,
    },
    Write {
        at: u64,
        durable: bool,
    },
    Flush,
    /// Makes the extents read as zeroes.
    Zero,
}

impl FileDisk {
    /// Starts a request on these buffers.
    #[inline]
    pub(crate) fn start(
        &self,
        sender: &mut impl OpSender,
        buffers: &mut IoBuffers,
        state: &mut FileState,
        request: Request,
    ) -> Step {
        let read_only = self.limits.read_only;
        let checked = buffers.check(request, self.accessible_size(), read_only).or_else(|_| {
            let at = buffers.check(request, self.size(), read_only)?;
            self.recheck_size().map(|()| at)
        });
        state.at = match checked {
            Ok(at) => at,
            Err(e) => return state.finish(buffers, Err(e)),
        };
        state.retries = 0;
        state.fill = false;
        (state.phase, state.write, state.durable) = match request {
            Request::Read { .. } => (Phase::Plan, false, false),
            Request::Write { durable, .. } => (Phase::Plan, true, durable),
            Request::Flush => (Phase::Flush, false, false),
            Request::Discard { durable } | Request::WriteZeroes { durable } => {
                state.work.get_or_insert_default().zeroes = matches!(request, Request::WriteZeroes { .. });
                (Phase::Extent, true, durable)
            }
        };
        self.drive(sender, buffers, state)
    }

    /// Starts a transfer of all bytes of `buffers`, or a flush, without the checks of a guest's request.
    pub(crate) fn start_unchecked(
        &self,
        sender: &mut impl OpSender,
        buffers: &mut impl TransferBuffers,
        state: &mut FileState,
        wanted: Unchecked,
    ) -> Step {
        state.retries = 0;
        (state.phase, state.at, state.write, state.durable) = match wanted {
            Unchecked::Read { at } => (Phase::Plan, at, false, false),
            Unchecked::Write { at, durable } => (Phase::Plan, at, true, durable),
            Unchecked::Flush => (Phase::Flush, 0, false, false),
            Unchecked::Zero => {
                state.work.get_or_insert_default().zeroes = true;
                (Phase::Extent, 0, true, false)
            }
        };
        state.fill = true;
        if matches!(wanted, Unchecked::Read { .. } | Unchecked::Write { .. }) {
            let (end, accessible) = (state.at.saturating_add(buffers.left()), self.accessible_size());
            if end > accessible && accessible < self.size() && self.recheck_size().is_err() {
                return state.finish(buffers, Err(IoError::Shrunk));
            }
        }
        self.drive(sender, buffers, state)
    }

    /// Continues a request as far as possible, or ends it if it was cancelled.
    pub(crate) fn retry(
        &self,
        sender: &mut impl OpSender,
        buffers: &mut impl TransferBuffers,
        state: &mut FileState,
    ) -> Step {
        // The engine has the buffers of an operation.
        if state.cancelled && !state.sent {
            return state.finish(buffers, Err(IoError::CANCELLED));
        }
        self.drive(sender, buffers, state)
    }

    fn drive(
        &self,
        sender: &mut impl OpSender,
        buffers: &mut impl TransferBuffers,
        state: &mut FileState,
    ) -> Step {
        if state.sent {
            return Step::Pending;
        }
        loop {
            // A damaged page reads as zeroes, which must not be stored.
            if state.write && matches!(state.phase, Phase::Direct | Phase::Store) && buffers.is_damaged() {
                return state.finish(buffers, Err(IoError::Damaged));
            }
            let flow = match state.phase {
                Phase::Plan => self.plan(buffers, state),
                Phase::Direct => self.direct(sender, buffers, state),
                Phase::Prepare => self.prepare(sender, buffers, state),
                Phase::Load => bounce(sender, state, OpKind::Read),
                Phase::Store => bounce(sender, state, OpKind::Write { durable: state.durable }),
                Phase::Flush => queue(sender, OpKind::Flush, 0, Buffers::None).map_err(|(step, _)| step),
                Phase::Extent => self.extent(sender, buffers, state),
                // No request was started.
                Phase::Idle => return Step::Busy,
            };
            if let Err(step) = flow {
                state.sent = step == Step::Pending;
                return if let Step::Done(result) = step { state.finish(buffers, result) } else { step };
            }
        }
    }

    /// Chooses the method for the next piece.
    fn plan(&self, buffers: &mut impl TransferBuffers, state: &mut FileState) -> Flow {
        state.range = None;
        state.bounce = None;
        if let Some(work) = &state.work {
            if work.to_write == 0 {
                state.phase = Phase::Extent;
                return Ok(());
            }
            state.bounce = Some(Bounce::new(state.at, work.to_write, self.unit(), true));
            state.phase = Phase::Prepare;
            return Ok(());
        }
        let left = buffers.left();
        if left == 0 {
            return Err(Step::Done(Ok(())));
        }
        state.phase = Phase::Direct;
        if let Some(Direct { block, address, .. }) = &self.direct
            && !(state.at.is_multiple_of(*block) && buffers.is_aligned(*address, *block as usize))
        {
            state.bounce = Some(Bounce::new(state.at, left, *block, state.write));
            state.phase = Phase::Prepare;
        }
        Ok(())
    }

    /// Transfers directly from or to the guest's buffers.
    fn direct(
        &self,
        sender: &mut impl OpSender,
        buffers: &mut impl TransferBuffers,
        state: &mut FileState,
    ) -> Flow {
        if state.write
            && let Some(ranges) = self.ranges()
        {
            let range = state.at..state.at + buffers.left();
            ranges.hold(&mut state.range, range, false, sender.waker())?;
        }
        let kind = if state.write { OpKind::Write { durable: state.durable } } else { OpKind::Read };
        let memory = buffers.give();
        queue(sender, kind, state.at, memory).map_err(|(step, back)| {
            // After a success, the engine has the buffers.
            if step != Step::Pending {
                buffers.take_back(back);
            }
            step
        })
    }

    /// Gets a buffer, *then* the range. So a request that waits for a range has all that it needs to release
    /// its own.
    fn prepare(
        &self,
        sender: &mut impl OpSender,
        buffers: &mut impl TransferBuffers,
        state: &mut FileState,
    ) -> Flow {
        let Some(bounce) = &mut state.bounce else { return Err(Step::Done(Err(IoError::Stuck))) };
        if bounce.permit.is_none() {
            bounce.permit = Some(self.pool.take(&mut bounce.waiting, sender.waker())?);
        }
        if !state.write {
            state.phase = Phase::Load;
            return Ok(());
        }
        let piece = bounce.piece;
        if let Some(ranges) = self.ranges() {
            ranges.hold(&mut state.range, piece.blocks(), piece.is_part(), sender.waker())?;
        }
        if piece.is_part() {
            state.phase = Phase::Load;
        } else {
            self.fill(buffers, state);
        }
        Ok(())
    }

    /// Copies the guest's bytes, or zeroes, to the bounce buffer.
    fn fill(&self, buffers: &mut impl TransferBuffers, state: &mut FileState) {
        state.phase = Phase::Store;
        if let Some(bounce) = &mut state.bounce {
            bounce.done = 0;
            let bytes = bounce.piece.bytes();
            if let Some(buffer) = bounce.permit.as_mut().and_then(|p| p.buffer.as_mut()) {
                match state.work {
                    Some(_) => buffer[bytes].fill(0),
                    None => buffers.read(&mut buffer[bytes]),
                }
            }
        }
    }

    /// Continues a request after the completion of an operation.
    pub(crate) fn resume(
        &self,
        sender: &mut impl OpSender,
        buffers: &mut impl TransferBuffers,
        state: &mut FileState,
        completion: Completion,
    ) -> Step {
        state.sent = false;
        match (completion.buffers, state.bounce.as_mut().and_then(|b| b.permit.as_mut())) {
            (Buffers::Owned(buffer), Some(permit)) => permit.buffer = Some(buffer),
            (memory, _) => buffers.take_back(memory),
        }
        let result = if state.phase == Phase::Flush || state.durable {
            self.synced(state.phase, completion.result)
        } else {
            completion.result
        };
        let bytes = match result {
            Ok(bytes) => bytes,
            Err(Errno::INTR) if state.retries < RETRIES_MAX => {
                state.retries += 1;
                return self.retry(sender, buffers, state);
            }
            Err(Errno::AGAIN | Errno::CANCELED) if state.cancelled => {
                return state.finish(buffers, Err(IoError::CANCELLED));
            }
            // The retry comes after another completion, or after a moment. io_uring cancels an operation by
            // itself if a cgroup's limit keeps it from starting a thread.
            Err(Errno::AGAIN | Errno::CANCELED) if state.retries < RETRIES_MAX => {
                state.retries += 1;
                sender.pause();
                return Step::Busy;
            }
            Err(errno) if state.phase == Phase::Extent && self.falls_back(state, errno) => {
                return self.retry(sender, buffers, state);
            }
            Err(Errno::AGAIN | Errno::CANCELED | Errno::INTR) => {
                return state.finish(buffers, Err(IoError::Stuck));
            }
            // The kernel had the guest's pages and found that one is missing.
            Err(Errno::FAULT) if state.phase == Phase::Direct => {
                return state.finish(buffers, Err(IoError::Damaged));
            }
            Err(errno) => return state.finish(buffers, Err(IoError::Os(errno))),
        };
        state.retries = 0;
        match state.phase {
            Phase::Flush => return state.finish(buffers, Ok(())),
            Phase::Extent => state.range_syscall_done(buffers),
            Phase::Direct | Phase::Load if state.fill && self.is_end(state, bytes) => {
                let from = state.bounce.as_ref().map_or(state.at, |bounce| bounce.next());
                if self.has_lost(from + u64::from(bytes)) {
                    return state.finish(buffers, Err(IoError::Shrunk));
                }
                self.fill_rest(sender, buffers, state, bytes);
            }
            // A read found an early end of the file. A write of nothing has no explanation.
            Phase::Direct | Phase::Store if bytes == 0 && state.write => {
                return state.finish(buffers, Err(IoError::Stuck));
            }
            _ if bytes == 0 => {
                self.found_end();
                return state.finish(buffers, Err(IoError::Shrunk));
            }
            Phase::Direct => {
                state.at += u64::from(bytes);
                buffers.advance(u64::from(bytes), sender.marks());
                if buffers.left() == 0 {
                    return state.finish(buffers, Ok(()));
                }
                state.phase = Phase::Plan;
            }
            Phase::Load | Phase::Store => self.bounced(sender, buffers, state, bytes as usize),
            Phase::Idle | Phase::Plan | Phase::Prepare => return Step::Pending,
        }
        self.retry(sender, buffers, state)
    }

    /// Returns whether a transfer of this many bytes is a read that has found the end of the file.
    fn is_end(&self, state: &FileState, bytes: u32) -> bool {
        // Only there does direct I/O end within a block.
        let in_block = || self.direct.as_ref().is_some_and(|d| !u64::from(bytes).is_multiple_of(d.block));
        (!state.write || state.phase == Phase::Load) && (bytes == 0 || in_block())
    }

    /// Replaces the bytes that a read did not find, beyond the end of the file, by zeroes.
    #[cold]
    fn fill_rest(
        &self,
        sender: &mut impl OpSender,
        buffers: &mut impl TransferBuffers,
        state: &mut FileState,
        bytes: u32,
    ) {
        let Some(bounce) = &mut state.bounce else {
            buffers.advance(bytes.into(), sender.marks());
            buffers.zero(u64::MAX, sender.marks());
            buffers.advance(u64::MAX, sender.marks());
            state.phase = Phase::Plan;
            return;
        };
        let (found, total) = (bounce.done + bytes as usize, bounce.piece.total as usize);
        if let Some(buffer) = bounce.permit.as_mut().and_then(|permit| permit.buffer.as_mut()) {
            buffer[found..total].fill(0);
        }
        let rest = total - bounce.done;
        self.bounced(sender, buffers, state, rest);
    }

    /// Returns the final result of an operation of a flush or a durable request, given its result in the
    /// kernel.
    fn synced(&self, phase: Phase, result: Result<u32, Errno>) -> Result<u32, Errno> {
        match (&self.writeback, phase, result) {
            (None, ..) | (.., Err(Errno::INTR | Errno::AGAIN | Errno::CANCELED)) => result,
            (Some(writeback), Phase::Flush, _) => writeback.flushed(result),
            (Some(writeback), Phase::Direct | Phase::Store, _) => writeback.written(result),
            _ => result,
        }
    }

    /// Records that `bytes` more have moved between the bounce buffer and the file.
    fn bounced(
        &self,
        sender: &mut impl OpSender,
        buffers: &mut impl TransferBuffers,
        state: &mut FileState,
        bytes: usize,
    ) {
        let Some(bounce) = &mut state.bounce else { return };
        bounce.done += bytes;
        let piece = bounce.piece;
        if bounce.done < piece.total as usize {
            return;
        }
        if state.write && state.phase == Phase::Load {
            return self.fill(buffers, state);
        }
        if !state.write
            && let Some(buffer) = bounce.permit.as_ref().and_then(|p| p.buffer.as_ref())
        {
            buffers.write(&buffer[piece.bytes()], sender.marks());
        }
        state.at += piece.len;
        match &mut state.work {
            Some(work) => {
                work.to_write = work.to_write.saturating_sub(piece.len);
                buffers.advance_extent(piece.len);
            }
            None => buffers.advance(piece.len, sender.marks()),
        }
        state.phase = Phase::Plan;
    }
}
