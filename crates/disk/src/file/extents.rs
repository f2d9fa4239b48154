//! Discards and zeroes: through the calls of a file or a device, or by other means if it has none.

use super::disk::{Direct, FileDisk};
use super::operation::{Flow, queue};
use super::state::{FileState, Phase};
use crate::buffers::TransferBuffers;
use crate::op_sender::OpSender;
use crate::{Extent, SECTOR, Step};
use kickless_io::{Buffers, Errno, OpKind, RangeSyscall};

/// The method for the first bytes of an extent, and their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    Syscall(RangeSyscall, u64),
    /// Write zeroes.
    Write(u64),
    /// Skip a discard that is impossible.
    Skip(u64),
}

impl FileDisk {
    /// Continues with the next extent.
    pub(super) fn extent(
        &self,
        sender: &mut impl OpSender,
        buffers: &mut impl TransferBuffers,
        state: &mut FileState,
    ) -> Flow {
        let Some(work) = &mut state.work else { return Err(Step::Done(Ok(()))) };
        let Some(&extent) = buffers.extents().last() else {
            if state.durable {
                state.phase = Phase::Flush;
                return Ok(());
            }
            return Err(Step::Done(Ok(())));
        };
        match self.method(extent, work.zeroes) {
            _ if extent.len == 0 => buffers.advance_extent(0),
            Method::Skip(bytes) => buffers.advance_extent(bytes),
            Method::Write(bytes) => {
                work.to_write = bytes;
                state.at = extent.offset;
                state.phase = Phase::Plan;
            }
            Method::Syscall(syscall, len) => {
                work.range_syscall = Some((syscall, len));
                if let (Some(ranges), Some(Direct { block, .. })) = (self.ranges(), &self.direct) {
                    let (start, end) = (extent.offset, extent.offset + len);
                    let blocks = start - start % block..end.next_multiple_of(*block);
                    let part = blocks != (start..end);
                    ranges.hold(&mut state.range, blocks, part, sender.waker())?;
                }
                return queue(sender, OpKind::Range { syscall, len }, extent.offset, Buffers::None)
                    .map_err(|(step, _)| step);
            }
        }
        Ok(())
    }

    /// Returns the method for the beginning of an extent that is not empty.
    fn method(&self, extent: Extent, zeroes: bool) -> Method {
        let Extent { offset, len, unmap } = extent;
        let syscalls: &[RangeSyscall] = match (self.device, zeroes, unmap) {
            (true, false, _) => &[RangeSyscall::DeviceDiscard],
            (true, true, true) => &[RangeSyscall::PunchHole, RangeSyscall::DeviceZeroes],
            (true, true, false) => &[RangeSyscall::DeviceZeroes],
            (false, false, _) => &[RangeSyscall::PunchHole],
            (false, true, true) => &[RangeSyscall::PunchHole, RangeSyscall::ZeroRange],
            (false, true, false) => &[RangeSyscall::ZeroRange],
        };
        let otherwise = |bytes| if zeroes { Method::Write(bytes) } else { Method::Skip(bytes) };
        let Some(&syscall) = syscalls.iter().find(|&&syscall| self.missing_syscalls.may_try(syscall)) else {
            return otherwise(len);
        };
        // A device accepts only whole blocks.
        let block = if self.device { u64::from(self.limits.block_size) } else { SECTOR };
        let first = offset.next_multiple_of(block);
        let end = offset + len;
        match end - end % block {
            last if offset == first && first < last => Method::Syscall(syscall, last - first),
            last if first < last => otherwise(first - offset),
            _ => otherwise(len),
        }
    }

    /// Returns whether a failed call is unsupported here, so that another method is needed.
    pub(super) fn falls_back(&self, state: &mut FileState, errno: Errno) -> bool {
        let lacking = matches!(errno, Errno::OPNOTSUPP | Errno::NOSYS | Errno::NOTTY);
        let Some((syscall, _)) = state.work.as_mut().and_then(|work| work.range_syscall.take()) else {
            return false;
        };
        state.range = None;
        if lacking {
            tracing::debug!(?syscall, %errno, "the host lacks a system call for discards or zeroes");
            self.missing_syscalls.add(syscall);
        }
        lacking
    }
}
