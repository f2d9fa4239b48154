//! Requests of disks behind libraries that do their own I/O.
//!
//! Operations are submitted to a library, which answers them at any later time. A library gets no guest
//! memory, because that can change and vanish meanwhile. It uses buffers of this crate instead, so it may
//! keep an operation for any time. A request goes piece by piece, each as long as a buffer. When a piece is
//! done, the library wakes the worker, which checks all its waiting requests.
//!
//! A library can require blocks larger than a sector. A write of a part of a block then reads the block,
//! changes it and writes it back. It excludes other writes of the block meanwhile, as [`crate::range`] says.

mod flushes;
mod op;
mod op_sizes;
mod submit;

use crate::buffer_pool::{BUFFER_BYTES, BufferPermit, BufferPool, BufferWait, PoolLimits};
use crate::buffers::{IoBuffers, TransferBuffers};
use crate::lost_writes::{LostWritesReported, LostWritesSeen};
use crate::piece::Piece;
use crate::range::{RangeClaim, Ranges};
use crate::{IoContext, IoError, Limits, Request, Step};
pub(crate) use flushes::Flushes;
use kickless_io::Errno;
pub(crate) use op::{AnswerSlot, OffloadKind, OffloadOp, WakeBatch};
pub(crate) use op_sizes::OpSizes;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The largest short piece in bytes. Most requests are short.
const SHORT_BYTES: usize = 16 << 10;
/// The largest number of short pieces at a time, so 4 MiB. A disk keeps the buffers that it has once used.
const SHORT_MAX: usize = 256;
/// The largest number of long pieces at a time, so 16 MiB.
const LONG_MAX: usize = 64;

/// The state of a request of a library's disk.
#[derive(Debug, Default)]
pub(crate) struct OffloadState {
    /// The place for answers. It is reused for the next request.
    slot: Arc<AnswerSlot>,
    /// The next byte on the disk.
    at: u64,
    /// The kind of the operation that is submitted and not answered.
    submitted: Option<OffloadKind>,
    /// The bytes of that operation.
    piece: Piece,
    /// The buffer has the block of which the request writes a part.
    loaded: bool,
    /// The blocks that the request writes, if blocks are larger than a sector.
    claim: Option<RangeClaim>,
    /// The request. `None` if there is none.
    request: Option<Request>,
    /// Flush when everything else is done.
    flush: bool,
    /// The flush fails if its answer has a higher loss count: see [`crate::lost_writes`].
    lost_writes: u64,
    permit: Option<BufferPermit>,
    waiting: Option<BufferWait>,
}

/// The common part of all libraries' disks.
#[derive(Debug)]
pub(crate) struct Offload {
    limits: Limits,
    size: AtomicU64,
    /// The library supports durable operations.
    durable: bool,
    sizes: OpSizes,
    ranges: Arc<Ranges>,
    short: Arc<BufferPool>,
    long: Arc<BufferPool>,
    lost_writes_reported: LostWritesReported,
}

impl OffloadState {
    pub(crate) fn is_active(&self) -> bool {
        self.request.is_some()
    }

    /// Frees what a piece needed. The next one may need a buffer of the other kind, or none.
    fn release(&mut self) {
        (self.permit, self.loaded, self.claim) = (None, false, None);
    }

    /// Ends the request.
    fn finish(&mut self, buffers: &mut IoBuffers, result: Result<(), IoError>) -> Step {
        self.release();
        (self.waiting, self.request) = (None, None);
        buffers.drop_extents();
        Step::Done(result)
    }
}

/// Continue at once, or return a step to the device.
type Flow = Result<(), Step>;

impl Offload {
    /// Makes the common part for a disk of `size` bytes. `durable`: the library supports durable operations.
    pub(crate) fn new(limits: Limits, size: u64, durable: bool) -> Arc<Self> {
        Self::with_sizes(limits, size, durable, OpSizes::default())
    }

    /// Makes the common part for a disk whose library limits the sizes of operations. `size` is a multiple of
    /// its block.
    pub(crate) fn with_sizes(limits: Limits, size: u64, durable: bool, sizes: OpSizes) -> Arc<Self> {
        let align = rustix::param::page_size();
        let short = PoolLimits { bytes: SHORT_BYTES, align, in_use_max: SHORT_MAX, kept_max: SHORT_MAX };
        let long = PoolLimits { bytes: BUFFER_BYTES, align, in_use_max: LONG_MAX, kept_max: LONG_MAX / 4 };
        let (short, long) = (Arc::new(BufferPool::of(short)), Arc::new(BufferPool::of(long)));
        Arc::new(Self {
            limits,
            size: AtomicU64::new(size),
            durable,
            sizes,
            ranges: Arc::default(),
            short,
            long,
            lost_writes_reported: LostWritesReported::default(),
        })
    }

    /// Returns whether a queue of the current driver has reported this many losses.
    pub(crate) fn has_reported(&self, lost_writes: u64) -> bool {
        self.lost_writes_reported.by_any_queue() >= lost_writes
    }

    /// Returns the lost writes that a starting queue need not report.
    pub(crate) fn lost_writes_seen(&self, queue: u16) -> LostWritesSeen {
        self.lost_writes_reported.seen(queue)
    }

    /// Begins with a fresh driver, while no queue runs.
    pub(crate) fn new_driver(&self) {
        self.lost_writes_reported.new_driver();
    }

    /// Returns the losses that the queues have reported ([`LostWritesReported::counts`]).
    pub(crate) fn reported_losses(&self) -> (u64, Vec<Option<u64>>) {
        self.lost_writes_reported.counts()
    }

    /// Takes the losses that the queues of another process have reported.
    pub(crate) fn set_reported_losses(&self, at_driver_start: u64, reported: &[Option<u64>]) {
        self.lost_writes_reported.set_counts(at_driver_start, reported);
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Returns the size in bytes. The order is relaxed, because the message that announces a new size orders
    /// it.
    #[inline]
    pub(crate) fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    /// Makes the disk at least this long. Returns the previous size.
    pub(crate) fn grow(&self, to: u64) -> u64 {
        self.size.fetch_max(to, Ordering::Relaxed)
    }

    /// Starts a request. `submit` passes an operation to the library, and never waits.
    pub(crate) fn start(
        &self,
        context: &mut IoContext<'_>,
        buffers: &mut IoBuffers,
        state: &mut OffloadState,
        request: Request,
        submit: impl Fn(OffloadOp),
    ) -> Step {
        state.at = match buffers.check(request, self.size(), self.limits.read_only) {
            Ok(at) => at,
            Err(e) => return state.finish(buffers, Err(e)),
        };
        let durable = match request {
            Request::Read { .. } | Request::Flush => false,
            Request::Write { durable, .. }
            | Request::Discard { durable }
            | Request::WriteZeroes { durable } => durable,
        };
        state.request = Some(request);
        // The flush of a durable request starts from the counts in the answers of its own writes.
        let is_flush = request == Request::Flush;
        state.lost_writes = if is_flush { context.lost_writes.count() } else { u64::MAX };
        state.flush = (durable && !self.durable) || is_flush;
        self.drive(context, buffers, state, submit)
    }

    /// Continues a request as far as possible.
    pub(crate) fn drive(
        &self,
        context: &mut IoContext<'_>,
        buffers: &mut IoBuffers,
        state: &mut OffloadState,
        submit: impl Fn(OffloadOp),
    ) -> Step {
        loop {
            let flow = self
                .take_answer(context, buffers, state)
                .and_then(|()| self.submit_next(context, buffers, state, &submit));
            match flow {
                Ok(()) => {}
                Err(Step::Done(result)) => return state.finish(buffers, result),
                Err(step) => return step,
            }
        }
    }

    /// Handles the answer of the library.
    fn take_answer(
        &self,
        context: &mut IoContext<'_>,
        buffers: &mut IoBuffers,
        state: &mut OffloadState,
    ) -> Flow {
        let Some(kind) = state.submitted else { return Ok(()) };
        let answer = state.slot.take().ok_or(Step::Busy)?;
        state.submitted = None;
        if let Some(permit) = &mut state.permit {
            permit.buffer = answer.buffer;
        }
        let lost_writes = answer.lost_writes;
        let result = match answer.result {
            Ok(()) if kind == OffloadKind::Flush && lost_writes > state.lost_writes => {
                Err(IoError::Os(Errno::IO))
            }
            result => result,
        };
        if result.is_err() && state.request == Some(Request::Flush) {
            self.lost_writes_reported.report(context.lost_writes, lost_writes);
        }
        result.map_err(|error| Step::Done(Err(error)))?;
        if kind != OffloadKind::Read {
            state.lost_writes = state.lost_writes.min(lost_writes);
        }
        let piece = state.piece;
        match (kind, state.request) {
            (OffloadKind::Read, Some(Request::Read { .. })) => {
                let buffer = state.permit.as_ref().and_then(|permit| permit.buffer.as_ref());
                if let Some(bytes) = buffer.and_then(|buffer| buffer.get(piece.bytes())) {
                    buffers.guest.write(0, bytes, context.marks);
                }
                self.transferred(context, buffers, state);
            }
            (OffloadKind::Read, _) => state.loaded = true,
            (OffloadKind::Write { .. }, Some(Request::Write { .. })) => {
                self.transferred(context, buffers, state);
            }
            (OffloadKind::Flush, _) => state.flush = false,
            // The write has stored zeroes in a part of a block.
            (OffloadKind::Write { .. } | OffloadKind::Discard { .. } | OffloadKind::Zeroes { .. }, _) => {
                state.release();
                buffers.advance_extent(piece.len);
            }
        }
        Ok(())
    }

    /// Removes the bytes of a transferred piece from the request.
    fn transferred(&self, context: &mut IoContext<'_>, buffers: &mut IoBuffers, state: &mut OffloadState) {
        let len = state.piece.len;
        state.at += len;
        buffers.guest.advance(len, context.marks);
        state.release();
    }
}
