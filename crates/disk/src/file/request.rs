//! A request's way through a file. Direct where it can be; through a bounce buffer, piece by piece, where it
//! cannot.

use super::extents::called;
use super::{Direct, FileDisk};
use crate::buffer_pool::BUFFER_BYTES;
use crate::io::{Bounce, Phase};
use crate::lane::Outlet;
use crate::range::Ranges;
use crate::{Io, IoError, Request, Step};
use kickless_io::{Buffers, Completion, Errno, OpKind};
use std::ops::Range;
use std::sync::Arc;

/// So often in a row may the kernel say "again".
const RETRIES_MAX: u16 = 1000;

/// Either go on at once, or tell the device.
pub(super) type Flow = Result<(), Step>;

impl FileDisk {
    #[inline]
    pub(crate) fn start(&self, lane: &mut impl Outlet, io: &mut Io, request: Request) -> Step {
        let read_only = self.limits.read_only;
        let checked = io.check(request, self.reach(), read_only).or_else(|_| {
            let at = io.check(request, self.size(), read_only)?;
            self.look_again().map(|()| at)
        });
        io.at = match checked {
            Ok(at) => at,
            Err(e) => return io.finish(Err(e)),
        };
        io.retries = 0;
        if matches!(request, Request::Read { .. } | Request::Write { .. }) {
            io.work = None;
        }
        (io.phase, io.write, io.durable) = match request {
            Request::Read { .. } => (Phase::Plan, false, false),
            Request::Write { durable, .. } => (Phase::Plan, true, durable),
            Request::Flush => (Phase::Flush, false, false),
            Request::Discard { durable } | Request::WriteZeroes { durable } => {
                io.work.get_or_insert_default().zeroes = matches!(request, Request::WriteZeroes { .. });
                (Phase::Extent, true, durable)
            }
            Request::SecureErase => return io.finish(Err(IoError::Unsupported)),
        };
        self.drive(lane, io)
    }

    /// Goes as far as it can.
    pub(crate) fn drive(&self, lane: &mut impl Outlet, io: &mut Io) -> Step {
        if io.sent {
            return Step::Pending;
        }
        loop {
            // Zeroes in the place of the guest's data are not to be stored.
            if io.write && matches!(io.phase, Phase::Direct | Phase::Store) && io.buffers.is_damaged() {
                return io.finish(Err(IoError::Damaged));
            }
            let flow = match io.phase {
                Phase::Plan => self.plan(io),
                Phase::Direct => self.direct(lane, io),
                Phase::Prepare => self.prepare(lane, io),
                Phase::Load => bounce(lane, io, OpKind::Read),
                Phase::Store => bounce(lane, io, OpKind::Write { durable: io.durable }),
                Phase::Flush => queue(lane, OpKind::Flush, 0, Buffers::None).map_err(|(step, _)| step),
                Phase::Extent => self.extent(lane, io),
                // Nothing was started.
                Phase::Idle | Phase::Held | Phase::Offloaded | Phase::Steps(_) => return Step::Busy,
            };
            if let Err(step) = flow {
                io.sent = step == Step::Pending;
                return if let Step::Done(result) = step { io.finish(result) } else { step };
            }
        }
    }

    /// Decides how to do the next piece.
    fn plan(&self, io: &mut Io) -> Flow {
        io.range = None;
        io.bounce = None;
        if let Some(work) = &io.work {
            io.phase = match self.plan_zeroes(io.at, work.to_write) {
                Some(bounce) => {
                    io.bounce = Some(Box::new(bounce));
                    Phase::Prepare
                }
                None => Phase::Extent,
            };
            return Ok(());
        }
        let left = io.buffers.len();
        if left == 0 {
            return Err(Step::Done(Ok(())));
        }
        io.phase = Phase::Direct;
        if let Some(Direct { block, address, .. }) = &self.direct
            && !(io.at.is_multiple_of(*block) && io.buffers.is_aligned(*address, *block as usize))
        {
            io.bounce = Some(Box::new(piece(io.at, left, *block, io.write)));
            io.phase = Phase::Prepare;
        }
        Ok(())
    }

    /// The guest's buffers, as they are.
    fn direct(&self, lane: &mut impl Outlet, io: &mut Io) -> Flow {
        if io.write
            && let Some(ranges) = self.ranges()
        {
            let range = io.at..io.at + io.buffers.len();
            hold(lane, io, ranges, range, false)?;
        }
        let kind = if io.write { OpKind::Write { durable: io.durable } } else { OpKind::Read };
        let buffers = Buffers::Guest(std::mem::take(&mut io.buffers));
        queue(lane, kind, io.at, buffers).map_err(|(step, back)| {
            if let Buffers::Guest(back) = back {
                io.buffers = back;
            }
            step
        })
    }

    pub(super) fn ranges(&self) -> Option<&Arc<Ranges>> {
        self.direct.as_ref()?.ranges.as_ref()
    }

    /// Gets a buffer, *then* the range: who waits for a range has all that it takes to give its own back.
    fn prepare(&self, lane: &mut impl Outlet, io: &mut Io) -> Flow {
        let Some(bounce) = &mut io.bounce else { return Err(Step::Done(Err(IoError::Stuck))) };
        if bounce.permit.is_none() {
            match self.pool.take(&mut bounce.waiting, lane.waker()) {
                Ok(Some(permit)) => bounce.permit = Some(permit),
                Ok(None) => return Err(Step::Busy),
                Err(_) => return Err(Step::Done(Err(IoError::Os(Errno::NOMEM)))),
            }
        }
        if !io.write {
            io.phase = Phase::Load;
            return Ok(());
        }
        let (range, part) = (bounce.at..bounce.at + bounce.total as u64, bounce.is_part());
        if let Some(ranges) = self.ranges() {
            hold(lane, io, ranges, range, part)?;
        }
        if part {
            io.phase = Phase::Load;
        } else {
            self.fill(io);
        }
        Ok(())
    }

    /// Puts the guest's bytes into the bounce buffer, to be written.
    fn fill(&self, io: &mut Io) {
        io.phase = Phase::Store;
        if let Some(bounce) = &mut io.bounce {
            bounce.done = 0;
            let (skip, len) = (bounce.skip, bounce.len);
            if let Some(buffer) = bounce.permit.as_mut().and_then(|p| p.buffer.as_mut()) {
                match io.work {
                    Some(_) => buffer[skip..skip + len].fill(0),
                    None => drop(io.buffers.read(0, &mut buffer[skip..skip + len])),
                }
            }
        }
    }

    pub(crate) fn resume(&self, lane: &mut impl Outlet, io: &mut Io, completion: Completion) -> Step {
        io.sent = false;
        match completion.buffers {
            Buffers::Guest(buffers) => io.buffers = buffers,
            Buffers::Owned(buffer) => {
                if let Some(permit) = io.bounce.as_mut().and_then(|b| b.permit.as_mut()) {
                    permit.buffer = Some(buffer);
                }
            }
            Buffers::None => {}
        }
        let result = if io.phase == Phase::Flush || io.durable {
            self.synced(io.phase, completion.result)
        } else {
            completion.result
        };
        let bytes = match result {
            Ok(bytes) => bytes,
            Err(Errno::INTR) if io.retries < RETRIES_MAX => {
                io.retries += 1;
                return self.drive(lane, io);
            }
            // Not at once: when something has completed, or in a moment. We cancel nothing: io_uring cancels what it finds no
            // thread for, where a cgroup has as many as it may.
            Err(Errno::AGAIN | Errno::CANCELED) if io.retries < RETRIES_MAX => {
                io.retries += 1;
                lane.stall();
                return Step::Busy;
            }
            Err(errno) if io.phase == Phase::Extent && self.goes_otherwise(io, errno) => {
                return self.drive(lane, io);
            }
            Err(Errno::AGAIN | Errno::CANCELED | Errno::INTR) => return io.finish(Err(IoError::Stuck)),
            // The kernel was given the guest's pages, and found that one is missing.
            Err(Errno::FAULT) if io.phase == Phase::Direct => return io.finish(Err(IoError::Damaged)),
            Err(errno) => return io.finish(Err(IoError::Os(errno))),
        };
        io.retries = 0;
        match io.phase {
            Phase::Flush => return io.finish(Ok(())),
            Phase::Extent => called(io),
            // A read has come to an end of the file that was not there before; a write has nothing to say.
            Phase::Direct | Phase::Store if bytes == 0 && io.write => return io.finish(Err(IoError::Stuck)),
            _ if bytes == 0 => {
                self.found_end();
                return io.finish(Err(IoError::Shrunk));
            }
            Phase::Direct => {
                io.at += u64::from(bytes);
                io.buffers.advance(u64::from(bytes), lane.marks());
                if io.buffers.is_empty() {
                    return io.finish(Ok(()));
                }
                io.phase = Phase::Plan;
            }
            Phase::Load | Phase::Store => self.bounced(lane, io, bytes as usize),
            Phase::Idle | Phase::Held | Phase::Offloaded | Phase::Steps(_) | Phase::Plan | Phase::Prepare => {
                return Step::Pending;
            }
        }
        self.drive(lane, io)
    }

    /// Returns how an operation of a flush or of a durable request ends that ended like this in the kernel.
    fn synced(&self, phase: Phase, result: Result<u32, Errno>) -> Result<u32, Errno> {
        match (&self.writeback, phase, result) {
            (None, ..) | (.., Err(Errno::INTR | Errno::AGAIN | Errno::CANCELED)) => result,
            (Some(writeback), Phase::Flush, _) => writeback.flushed(result),
            (Some(writeback), Phase::Direct | Phase::Store, _) => writeback.written(result),
            _ => result,
        }
    }

    /// So many bytes more have gone between the bounce buffer and the file.
    fn bounced(&self, lane: &mut impl Outlet, io: &mut Io, bytes: usize) {
        let Some(bounce) = &mut io.bounce else { return };
        bounce.done += bytes;
        if bounce.done < bounce.total {
            return;
        }
        let (skip, len) = (bounce.skip, bounce.len);
        if io.write && io.phase == Phase::Load {
            return self.fill(io);
        }
        if !io.write
            && let Some(buffer) = bounce.permit.as_ref().and_then(|p| p.buffer.as_ref())
        {
            io.buffers.write(0, &buffer[skip..skip + len], lane.marks());
        }
        io.at += len as u64;
        match &mut io.work {
            Some(work) => work.wrote(len as u64),
            None => io.buffers.advance(len as u64, lane.marks()),
        }
        io.phase = Phase::Plan;
    }
}

/// Cuts the next piece for a bounce buffer off the `left` bytes at `at`.
///
/// A read takes all blocks that it touches. A write takes whole blocks as they come, and a part of a block by
/// itself, so that what has to be read first and kept from others is one block.
pub(super) fn piece(at: u64, left: u64, block: u64, write: bool) -> Bounce {
    let start = at - at % block;
    let skip = at - start;
    let room = BUFFER_BYTES as u64 - skip;
    let len = match write {
        false => left.min(room),
        true if skip > 0 || left < block => left.min(block - skip),
        true => (left - left % block).min(BUFFER_BYTES as u64),
    };
    // All of it fits into a buffer: a block does, and buffers are a multiple of it.
    let total = (skip + len).next_multiple_of(block);
    Bounce { at: start, total: total as usize, skip: skip as usize, len: len as usize, ..Bounce::default() }
}

impl Bounce {
    /// Whether it is a part of a block.
    fn is_part(&self) -> bool {
        self.len < self.total
    }
}

/// Holds the range of the present piece, or waits for it.
pub(super) fn hold(
    lane: &impl Outlet,
    io: &mut Io,
    ranges: &Arc<Ranges>,
    range: Range<u64>,
    exclusive: bool,
) -> Flow {
    let claim = io.range.get_or_insert_with(|| ranges.ask(range, exclusive, lane.waker()));
    if claim.is_held() { Ok(()) } else { Err(Step::Busy) }
}

/// Transfers what is left of the bounce buffer.
fn bounce(lane: &mut impl Outlet, io: &mut Io, kind: OpKind) -> Flow {
    let Some(bounce) = &mut io.bounce else { return Err(Step::Done(Err(IoError::Stuck))) };
    let Some(permit) = &mut bounce.permit else { return Err(Step::Done(Err(IoError::Stuck))) };
    let Some(mut buffer) = permit.buffer.take() else { return Err(Step::Done(Err(IoError::Stuck))) };
    buffer.set_window(bounce.done..bounce.total);
    queue(lane, kind, bounce.at + bounce.done as u64, Buffers::Owned(buffer)).map_err(|(step, back)| {
        if let Buffers::Owned(back) = back {
            permit.buffer = Some(back);
        }
        step
    })
}

/// Puts one operation into the engine. Never goes on at once; the buffers come back where it is full.
pub(super) fn queue(
    lane: &mut impl Outlet,
    kind: OpKind,
    offset: u64,
    buffers: Buffers,
) -> Result<(), (Step, Buffers)> {
    match lane.send(kind, offset, buffers) {
        Ok(()) => Err((Step::Pending, Buffers::None)),
        Err(back) => Err(back),
    }
}
