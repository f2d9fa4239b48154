//! Discarding and zeroing: the calls that a file or a device has for it, and what is done where it has none.

use super::request::{Flow, hold, piece, queue};
use super::{Direct, FileDisk};
use crate::io::{Bounce, Phase, Work};
use crate::lane::Outlet;
use crate::{Extent, Io, SECTOR, Step};
use kickless_io::{Buffers, Errno, OpKind, RangeCall};
use std::sync::atomic::{AtomicU8, Ordering};

/// Calls that are not to be tried again.
#[derive(Debug, Default)]
pub(super) struct Lacks(AtomicU8);

impl Lacks {
    fn bit(call: RangeCall) -> u8 {
        1 << call as u8
    }

    /// Relaxed: who does not know yet finds out.
    fn has(&self, call: RangeCall) -> bool {
        self.0.load(Ordering::Relaxed) & Self::bit(call) == 0
    }

    fn forget(&self, call: RangeCall) {
        self.0.fetch_or(Self::bit(call), Ordering::Relaxed);
    }
}

/// How to do the beginning of an extent: so many bytes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Call(RangeCall, u64),
    /// By writing zeroes.
    Write(u64),
    /// A discard that can be left out.
    Skip(u64),
}

impl Work {
    /// So many bytes of the next extent are done.
    pub(crate) fn advance(&mut self, bytes: u64) {
        if let Some(extent) = self.extents.last_mut() {
            extent.advance(bytes);
            if extent.len == 0 {
                self.extents.pop();
            }
        }
    }

    /// So many zeroes have been written.
    pub(super) fn wrote(&mut self, bytes: u64) {
        self.to_write = self.to_write.saturating_sub(bytes);
        self.advance(bytes);
    }
}

/// The call that was on its way is done.
pub(super) fn called(io: &mut Io) {
    io.range = None;
    if let Some(work) = &mut io.work
        && let Some((_, bytes)) = work.call.take()
    {
        work.advance(bytes);
    }
}

impl FileDisk {
    /// Goes on with the next extent.
    pub(super) fn extent(&self, lane: &mut impl Outlet, io: &mut Io) -> Flow {
        let Some(work) = &mut io.work else { return Err(Step::Done(Ok(()))) };
        let Some(&extent) = work.extents.last() else {
            if io.durable {
                io.phase = Phase::Flush;
                return Ok(());
            }
            return Err(Step::Done(Ok(())));
        };
        match self.way(extent, work.zeroes) {
            _ if extent.len == 0 => work.advance(0),
            Way::Skip(bytes) => work.advance(bytes),
            Way::Write(bytes) => {
                work.to_write = bytes;
                io.at = extent.offset;
                io.phase = Phase::Plan;
            }
            Way::Call(call, len) => {
                work.call = Some((call, len));
                if let (Some(ranges), Some(Direct { block, .. })) = (self.ranges(), &self.direct) {
                    let (start, end) = (extent.offset, extent.offset + len);
                    let blocks = start - start % block..end.next_multiple_of(*block);
                    let part = blocks != (start..end);
                    hold(lane, io, ranges, blocks, part)?;
                }
                return queue(lane, OpKind::Range { call, len }, extent.offset, Buffers::None)
                    .map_err(|(step, _)| step);
            }
        }
        Ok(())
    }

    /// How to do the beginning of an extent that is not empty.
    fn way(&self, extent: Extent, zeroes: bool) -> Way {
        let Extent { offset, len, unmap } = extent;
        let calls: &[RangeCall] = match (self.device, zeroes, unmap) {
            (true, false, _) => &[RangeCall::DeviceDiscard],
            (true, true, true) => &[RangeCall::PunchHole, RangeCall::DeviceZeroes],
            (true, true, false) => &[RangeCall::DeviceZeroes],
            (false, false, _) => &[RangeCall::PunchHole],
            (false, true, true) => &[RangeCall::PunchHole, RangeCall::ZeroRange],
            (false, true, false) => &[RangeCall::ZeroRange],
        };
        let otherwise = |bytes| if zeroes { Way::Write(bytes) } else { Way::Skip(bytes) };
        let Some(&call) = calls.iter().find(|&&call| self.lacks.has(call)) else { return otherwise(len) };
        // A device takes whole blocks only.
        let block = if self.device { u64::from(self.limits.block_size) } else { SECTOR };
        let first = offset.next_multiple_of(block);
        let end = offset + len;
        match end - end % block {
            last if offset == first && first < last => Way::Call(call, last - first),
            last if first < last => otherwise(first - offset),
            _ => otherwise(len),
        }
    }

    /// Whether a call that failed is one that is lacking here, so that it is to be done in another way.
    pub(super) fn goes_otherwise(&self, io: &mut Io, errno: Errno) -> bool {
        let lacking = matches!(errno, Errno::OPNOTSUPP | Errno::NOSYS | Errno::NOTTY);
        let Some((call, _)) = io.work.as_mut().and_then(|work| work.call.take()) else { return false };
        io.range = None;
        if lacking {
            tracing::debug!(?call, %errno, "the host lacks a call for discards or zeroes");
            self.lacks.forget(call);
        }
        lacking
    }

    /// Cuts the next piece off so many zeroes that are to be written at `at`; none: all are.
    pub(super) fn plan_zeroes(&self, at: u64, left: u64) -> Option<Bounce> {
        (left > 0).then(|| piece(at, left, self.unit(), true))
    }
}
