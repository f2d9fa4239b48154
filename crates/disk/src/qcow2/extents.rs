//! Discards and zeroes: whole clusters through the tables, parts of clusters as data.

use super::layer::{Chain, Image, Place};
use super::local_buffers::LocalBuffers;
use super::write::{WriteState, written};
use crate::buffer_pool::{BufferPermit, BufferWait};
use crate::buffers::{IoBuffers, TransferBuffers};
use crate::op_sender::OpSender;
use crate::{Extent, IoError, Step};
use kickless_io::{Completion, Errno};
use kickless_qcow2::{Clear, ClearPlan, GuestOffset};

/// The progress of a request on extents.
#[derive(Debug, Default)]
pub(super) struct ExtentState {
    /// Write zeroes instead of discarding.
    zeroes: bool,
    durable: bool,
    phase: ExtentPhase,
    /// The bytes of the current part of the next extent.
    len: u64,
    wait: Option<BufferWait>,
    permit: Option<BufferPermit>,
    local: LocalBuffers,
    front: LocalBuffers,
}

/// The next action of a request on extents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ExtentPhase {
    #[default]
    Next,
    /// Wait until the tables are written.
    Tables,
    /// Write zeroes as data.
    Data,
    /// Continue writing zeroes.
    Write,
    /// Write everything to stable storage.
    Sync,
}

impl ExtentState {
    pub(super) fn begin(&mut self, zeroes: bool, durable: bool) {
        (self.zeroes, self.durable, self.phase) = (zeroes, durable, ExtentPhase::Next);
    }

    /// Ends a cancelled request that waits. It has no operation in flight.
    pub(super) fn give_up(&mut self, buffers: &mut IoBuffers) -> Step {
        self.finish(buffers, Err(IoError::CANCELLED))
    }

    /// Ends the request.
    fn finish(&mut self, buffers: &mut IoBuffers, result: Result<(), IoError>) -> Step {
        self.release();
        self.phase = ExtentPhase::Next;
        buffers.drop_extents();
        Step::Done(result)
    }

    /// Returns the buffer with zeroes.
    fn release(&mut self) {
        if let Some(permit) = &mut self.permit {
            permit.buffer = self.local.take();
        }
        (self.permit, self.wait) = (None, None);
    }
}

/// The next part of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// Less than a unit of clearing.
    Small(u64),
    /// Whole units. The second number counts those beyond the end of the disk too.
    Whole(u64, u64),
}

/// Returns the first part of an extent that is not empty. Units have `unit` bytes, and the disk `size`.
fn part(extent: Extent, unit: u64, size: u64) -> Part {
    let Extent { offset, len, .. } = extent;
    let end = offset + len;
    let to_unit = offset.next_multiple_of(unit) - offset;
    if to_unit > 0 {
        return Part::Small(to_unit.min(len));
    }
    // The last unit may be cut by the end of the disk.
    let rounded = if end == size { end.next_multiple_of(unit) } else { end - end % unit };
    if rounded > offset { Part::Whole(len.min(rounded - offset), rounded - offset) } else { Part::Small(len) }
}

impl Chain {
    /// Continues a request on extents.
    pub(super) fn drive_extents<S: OpSender>(
        &self,
        sender: &mut S,
        (shard, size): (u32, u64),
        buffers: &mut IoBuffers,
        state: &mut ExtentState,
        write: &mut WriteState,
    ) -> Step {
        let Some(image) = self.top() else { return Step::Done(Err(IoError::Os(Errno::IO))) };
        loop {
            let step = match state.phase {
                ExtentPhase::Next => match self.next_extent(sender, image, size, buffers, state, write) {
                    Ok(()) => continue,
                    Err(step) => step,
                },
                ExtentPhase::Tables => match written(image, write.ticket, sender.waker()) {
                    Ok(()) => {
                        buffers.advance_extent(state.len);
                        state.phase = ExtentPhase::Next;
                        // Other requests go on between two tables.
                        if buffers.extents.is_empty() {
                            continue;
                        }
                        Step::More
                    }
                    Err(step) => step,
                },
                ExtentPhase::Data => match self.start_zeroes(sender, image, buffers, state, write) {
                    Ok(()) => continue,
                    Err(step) => step,
                },
                ExtentPhase::Write => {
                    let memory = (&mut state.local, &mut state.front);
                    let step = self.drive_write(sender, shard, memory, write);
                    match end_zeroes(buffers, state, step) {
                        None => continue,
                        Some(step) => step,
                    }
                }
                ExtentPhase::Sync => {
                    let memory = (&mut state.local, &mut state.front);
                    self.drive_write(sender, shard, memory, write)
                }
            };
            return if let Step::Done(result) = step { state.finish(buffers, result) } else { step };
        }
    }

    /// Continues a request on extents after the completion of an operation.
    pub(super) fn resume_extents<S: OpSender>(
        &self,
        sender: &mut S,
        (shard, size): (u32, u64),
        buffers: &mut IoBuffers,
        state: &mut ExtentState,
        write: &mut WriteState,
        completion: Completion,
    ) -> Step {
        let memory = (&mut state.local, &mut state.front);
        let step = self.resume_write(sender, shard, memory, write, completion);
        let step = match state.phase {
            ExtentPhase::Write => end_zeroes(buffers, state, step),
            _ => Some(step),
        };
        match step {
            None => self.drive_extents(sender, (shard, size), buffers, state, write),
            Some(Step::Done(result)) => state.finish(buffers, result),
            Some(step) => step,
        }
    }

    /// Begins with the next part of the next extent. Leaves the phase if the part is skipped.
    fn next_extent(
        &self,
        sender: &mut impl OpSender,
        image: &Image,
        size: u64,
        buffers: &mut IoBuffers,
        state: &mut ExtentState,
        write: &mut WriteState,
    ) -> Result<(), Step> {
        let Some(&extent) = buffers.extents.last() else {
            if !state.durable {
                return Err(Step::Done(Ok(())));
            }
            write.begin_sync();
            state.phase = ExtentPhase::Sync;
            return Ok(());
        };
        if extent.len == 0 {
            buffers.advance_extent(0);
            return Ok(());
        }
        let how = match (state.zeroes, extent.unmap) {
            (false, _) => Clear::Discard,
            (true, true) => Clear::Unmap,
            (true, false) => Clear::Zero,
        };
        let plan = match part(extent, image.geometry.subcluster(), size) {
            Part::Small(len) => ClearPlan::Data { len },
            Part::Whole(len, rounded) => {
                let at = GuestOffset(extent.offset);
                match image.with_tables(|tables| tables.clear(at, rounded, how, sender.waker())) {
                    ClearPlan::Done { len: done, ticket } => ClearPlan::Done { len: done.min(len), ticket },
                    ClearPlan::Data { len: data } => ClearPlan::Data { len: data.min(len) },
                    plan => plan,
                }
            }
        };
        match plan {
            ClearPlan::Done { len: 0, .. } | ClearPlan::Data { len: 0 } => {
                return Err(Step::Done(Err(IoError::Stuck)));
            }
            ClearPlan::Done { len, ticket } => {
                (state.len, write.ticket) = (len, ticket);
                state.phase = ExtentPhase::Tables;
            }
            ClearPlan::Data { len } if !state.zeroes => buffers.advance_extent(len),
            ClearPlan::Data { len } => {
                state.len = len;
                state.phase = ExtentPhase::Data;
            }
            ClearPlan::Wait => return Err(Step::Busy),
            ClearPlan::Fail(errno) => return Err(Step::Done(Err(IoError::Os(errno)))),
        }
        Ok(())
    }

    /// Begins to write zeroes as data to the current part, unless it reads as zeroes.
    fn start_zeroes(
        &self,
        sender: &mut impl OpSender,
        image: &Image,
        buffers: &mut IoBuffers,
        state: &mut ExtentState,
        write: &mut WriteState,
    ) -> Result<(), Step> {
        let Some(&extent) = buffers.extents.last() else { return Err(Step::Done(Err(IoError::Stuck))) };
        // The answer is of this moment. A write at the same time has no order with this request.
        let len = match self.find(0, extent.offset, state.len) {
            Place::Zero { len } => {
                // Another request may have cleared it. Its change counts as ours (R4).
                let at = GuestOffset(extent.offset);
                write.ticket = image.with_tables(|tables| tables.ticket_at(at));
                (state.len, state.phase) = (len, ExtentPhase::Tables);
                return Ok(());
            }
            Place::Data { len, .. } | Place::Compressed { len, .. } => {
                len.min(image.pools.zeroes.bytes() as u64)
            }
            place => return Err(self.missing(place, sender.waker())),
        };
        let permit = state.permit.insert(image.pools.zeroes.take(&mut state.wait, sender.waker())?);
        let Some(mut buffer) = permit.buffer.take() else { return Err(Step::Done(Err(IoError::Stuck))) };
        buffer[..len as usize].fill(0);
        state.local = LocalBuffers::of_range(buffer, 0..len as usize);
        state.len = len;
        write.begin(extent.offset, false);
        state.phase = ExtentPhase::Write;
        Ok(())
    }
}

/// Goes on after a step of writing zeroes. `None`: there is a next phase.
fn end_zeroes(buffers: &mut IoBuffers, state: &mut ExtentState, step: Step) -> Option<Step> {
    if step != Step::Done(Ok(())) {
        return Some(step);
    }
    state.release();
    buffers.advance_extent(state.len);
    state.phase = ExtentPhase::Next;
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_extents() {
        let part = |offset, len| part(Extent { offset, len, unmap: true }, 4096, 10_240);
        assert_eq!(part(512, 512), Part::Small(512));
        assert_eq!(part(512, 8192), Part::Small(3584));
        assert_eq!(part(0, 512), Part::Small(512));
        assert_eq!(part(0, 5120), Part::Whole(4096, 4096));
        assert_eq!(part(4096, 6144), Part::Whole(6144, 8192));
        assert_eq!(part(8192, 2048), Part::Whole(2048, 4096));
        assert_eq!(part(8192, 1024), Part::Small(1024));
    }
}
