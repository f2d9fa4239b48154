//! Submits the operations of a request, one after the other.

use super::op_sizes::RangePart;
use super::{Flow, Offload, OffloadKind, OffloadOp, OffloadState, SHORT_BYTES};
use crate::buffers::{IoBuffers, TransferBuffers};
use crate::piece::Piece;
use crate::{IoContext, IoError, Request, SECTOR, Step};

impl Offload {
    /// Submits the next operation. Continues at once only after a part of an extent that needs none.
    pub(super) fn submit_next(
        &self,
        context: &IoContext<'_>,
        buffers: &mut IoBuffers,
        state: &mut OffloadState,
        submit: impl Fn(OffloadOp),
    ) -> Flow {
        match state.request {
            Some(Request::Read { .. }) if !buffers.guest.is_empty() => {
                state.piece = self.sizes.piece(state.at, buffers.guest.len(), false);
                self.take_buffer(context, state)?;
                transfer(context, state, OffloadKind::Read, submit)
            }
            Some(Request::Write { durable, .. }) if !buffers.guest.is_empty() => {
                state.piece = self.sizes.piece(state.at, buffers.guest.len(), true);
                self.write(context, state, durable, submit, |bytes| {
                    buffers.guest.read(0, bytes);
                    // A damaged page reads as zeroes, which must not be stored.
                    !buffers.guest.is_damaged()
                })
            }
            Some(request @ (Request::Discard { .. } | Request::WriteZeroes { .. })) => {
                self.submit_range(context, buffers, state, request, submit)
            }
            _ => self.flush_or_end(context, state, submit),
        }
    }

    /// Submits the next operation of a request on extents.
    fn submit_range(
        &self,
        context: &IoContext<'_>,
        buffers: &mut IoBuffers,
        state: &mut OffloadState,
        request: Request,
        submit: impl Fn(OffloadOp),
    ) -> Flow {
        let Some(&extent) = buffers.extents.last() else {
            return self.flush_or_end(context, state, submit);
        };
        if extent.len == 0 {
            buffers.advance_extent(0);
            return Ok(());
        }
        let (at, part) = (extent.offset, self.sizes.range_part(extent.offset, extent.len));
        let (kind, len) = match (request, part) {
            (Request::Discard { durable }, RangePart::Blocks(len)) => {
                (OffloadKind::Discard { durable: durable && self.durable }, len)
            }
            (Request::WriteZeroes { durable }, RangePart::Blocks(len)) => {
                (OffloadKind::Zeroes { unmap: extent.unmap, durable: durable && self.durable }, len)
            }
            (Request::WriteZeroes { durable }, RangePart::Rest(len)) => {
                state.piece = self.sizes.piece(at, len, true);
                return self.write(context, state, durable, submit, |bytes| {
                    bytes.fill(0);
                    true
                });
            }
            // A discard is a hint. A part of a block stays as it is.
            (_, RangePart::Rest(len)) => {
                buffers.advance_extent(len);
                return Ok(());
            }
            _ => return Err(Step::Done(Err(IoError::Unsupported))),
        };
        state.piece = Piece { at, total: len, skip: 0, len };
        self.claim(context, state)?;
        state.submitted = Some(kind);
        submit(state.slot.op(kind, (at, len), None, context.waker));
        Err(Step::Busy)
    }

    /// Writes the current piece. `fill` stores the request's bytes, and returns whether they are valid.
    fn write(
        &self,
        context: &IoContext<'_>,
        state: &mut OffloadState,
        durable: bool,
        submit: impl Fn(OffloadOp),
        fill: impl FnOnce(&mut [u8]) -> bool,
    ) -> Flow {
        // The buffer comes *before* the blocks. So a request that waits for blocks has all that it needs to
        // release its own.
        self.take_buffer(context, state)?;
        self.claim(context, state)?;
        let piece = state.piece;
        if piece.is_part() && !state.loaded {
            return transfer(context, state, OffloadKind::Read, submit);
        }
        let buffer = state.permit.as_mut().and_then(|permit| permit.buffer.as_mut());
        if buffer.and_then(|buffer| buffer.get_mut(piece.bytes())).is_some_and(|bytes| !fill(bytes)) {
            return Err(Step::Done(Err(IoError::Damaged)));
        }
        transfer(context, state, OffloadKind::Write { durable: durable && self.durable }, submit)
    }

    /// Takes a buffer for the current piece, or waits for one.
    fn take_buffer(&self, context: &IoContext<'_>, state: &mut OffloadState) -> Flow {
        if state.permit.is_some() {
            return Ok(());
        }
        let pool = if state.piece.total <= SHORT_BYTES as u64 { &self.short } else { &self.long };
        state.permit = Some(pool.take(&mut state.waiting, context.waker)?);
        Ok(())
    }

    /// Takes the blocks of the current piece, or waits for them. Blocks of one sector need no order, because
    /// no request writes a part of one.
    fn claim(&self, context: &IoContext<'_>, state: &mut OffloadState) -> Flow {
        if self.sizes.block() == SECTOR {
            return Ok(());
        }
        let piece = state.piece;
        self.ranges.hold(&mut state.claim, piece.blocks(), piece.is_part(), context.waker)
    }

    /// Flushes if necessary, and ends the request.
    fn flush_or_end(
        &self,
        context: &IoContext<'_>,
        state: &mut OffloadState,
        submit: impl Fn(OffloadOp),
    ) -> Flow {
        if !state.flush {
            return Err(Step::Done(Ok(())));
        }
        state.submitted = Some(OffloadKind::Flush);
        submit(state.slot.op(OffloadKind::Flush, (0, 0), None, context.waker));
        Err(Step::Busy)
    }
}

/// Submits a read or write of the current piece with its buffer.
fn transfer(
    context: &IoContext<'_>,
    state: &mut OffloadState,
    kind: OffloadKind,
    submit: impl Fn(OffloadOp),
) -> Flow {
    let buffer = state.permit.as_mut().and_then(|permit| permit.buffer.take());
    state.submitted = Some(kind);
    submit(state.slot.op(kind, (state.piece.at, state.piece.total), buffer, context.waker));
    // The library may have answered already. Then it has also signalled the waker.
    Err(Step::Busy)
}

#[cfg(test)]
mod tests {
    use super::super::{OpSizes, WakeBatch};
    use super::*;
    use crate::{Attached, Io, Limits};
    use kickless_io::{Engine, EngineKind, Waker};
    use kickless_memory::{Gpa, Marks};
    use kickless_testing::guest_memory;
    use std::cell::RefCell;
    use std::collections::VecDeque;

    /// Runs a request, and collects its operations.
    struct TestRequest {
        io: Io,
        ops: RefCell<VecDeque<OffloadOp>>,
    }

    impl TestRequest {
        /// Starts a write of `len` times this byte.
        fn write(offload: &Offload, offset: u64, len: u64, byte: u8) -> Self {
            let view = guest_memory(4096, 0);
            view.map().write(Gpa(0), &vec![byte; len as usize]).unwrap();
            let mut new = Self { io: Io::default(), ops: RefCell::default() };
            new.io.buffers_mut().push(&view, Gpa(0), len as u32).unwrap();
            assert_eq!(new.step(offload, Some(Request::Write { offset, durable: false })), Step::Busy);
            new
        }

        fn step(&mut self, offload: &Offload, request: Option<Request>) -> Step {
            let waker = Waker::new().unwrap();
            let mut context = IoContext {
                engine: &mut Engine::open(EngineKind::Threads, 1).unwrap(),
                task: 0,
                slot: 0,
                attached: &mut Attached::default(),
                waker: &waker,
                lost_writes: &mut offload.lost_writes_seen(0),
                marks: &mut Marks::off(),
            };
            let submit = |op| self.ops.borrow_mut().push_back(op);
            let (buffers, state) = (&mut self.io.buffers, self.io.state.offload());
            match request {
                Some(request) => offload.start(&mut context, buffers, state, request, submit),
                None => offload.drive(&mut context, buffers, state, submit),
            }
        }

        /// Answers the operation of the request, which is a read of `block` or a write to it.
        fn answer(&mut self, offload: &Offload, kind: OffloadKind, block: &mut [u8]) -> Step {
            let mut op = self.ops.borrow_mut().pop_front().unwrap();
            assert_eq!((op.kind, op.at, op.len), (kind, 0, 4096));
            match kind {
                OffloadKind::Read => op.bytes_mut().copy_from_slice(block),
                _ => block.copy_from_slice(op.bytes()),
            }
            op.answer(Ok(()), &mut WakeBatch::default());
            self.step(offload, None)
        }

        fn waits(&mut self, offload: &Offload) -> bool {
            self.step(offload, None) == Step::Busy && self.ops.borrow().is_empty()
        }
    }

    /// Otherwise, the second write would undo the first.
    #[test]
    fn writes_of_one_block_come_one_after_the_other() {
        const WRITE: OffloadKind = OffloadKind::Write { durable: false };
        let sizes = OpSizes::new(4096, u32::MAX);
        let offload = Offload::with_sizes(Limits::plain(false), 8192, true, sizes);
        let mut block = vec![9; 4096];
        let mut one = TestRequest::write(&offload, 0, 512, 1);
        let mut two = TestRequest::write(&offload, 512, 512, 2);
        let mut whole = TestRequest::write(&offload, 0, 4096, 3);
        assert!(two.waits(&offload) && whole.waits(&offload));
        assert_eq!(one.answer(&offload, OffloadKind::Read, &mut block), Step::Busy);
        assert!(two.waits(&offload));
        assert_eq!(one.answer(&offload, WRITE, &mut block), Step::Done(Ok(())));
        assert_eq!(two.step(&offload, None), Step::Busy);
        assert!(whole.waits(&offload));
        assert_eq!(two.answer(&offload, OffloadKind::Read, &mut block), Step::Busy);
        assert_eq!(two.answer(&offload, WRITE, &mut block), Step::Done(Ok(())));
        assert_eq!(block, [vec![1; 512], vec![2; 512], vec![9; 3072]].concat());
        assert_eq!(whole.step(&offload, None), Step::Busy);
        assert_eq!(whole.answer(&offload, WRITE, &mut block), Step::Done(Ok(())));
        assert_eq!(block, [3; 4096]);
    }
}
