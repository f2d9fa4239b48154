//! Requests of disks behind libraries that do their own I/O.
//!
//! Operations are submitted to a library, which answers them at any later time. A library gets no guest
//! memory, because that can change and vanish meanwhile. It uses buffers of this crate instead, so it may
//! keep an operation for any time. A request goes piece by piece, each as long as a buffer. When a piece is
//! done, the library wakes the worker, which checks all its waiting requests.

mod flushes;
mod op;

use crate::buffer_pool::{BUFFER_BYTES, BufferPermit, BufferPool, BufferWait, PoolLimits};
use crate::buffers::{IoBuffers, TransferBuffers};
use crate::lost_writes::{LostWritesReported, LostWritesSeen};
use crate::{IoContext, IoError, Limits, Request, Step};
pub(crate) use flushes::Flushes;
use kickless_io::Errno;
pub(crate) use op::{AnswerSlot, OffloadKind, OffloadOp, WakeBatch};
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
    /// The length of that operation in bytes.
    len: u64,
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
    short: Arc<BufferPool>,
    long: Arc<BufferPool>,
    lost_writes_reported: LostWritesReported,
}

impl OffloadState {
    pub(crate) fn is_active(&self) -> bool {
        self.request.is_some()
    }

    /// Ends the request.
    fn finish(&mut self, buffers: &mut IoBuffers, result: Result<(), IoError>) -> Step {
        (self.permit, self.waiting, self.request) = (None, None, None);
        buffers.drop_extents();
        Step::Done(result)
    }
}

/// Continue at once, or return a step to the device.
type Flow = Result<(), Step>;

impl Offload {
    /// Makes the common part for a disk of `size` bytes. `durable`: the library supports durable operations.
    pub(crate) fn new(limits: Limits, size: u64, durable: bool) -> Arc<Self> {
        let align = rustix::param::page_size();
        let short = PoolLimits { bytes: SHORT_BYTES, align, in_use_max: SHORT_MAX, kept_max: SHORT_MAX };
        let long = PoolLimits { bytes: BUFFER_BYTES, align, in_use_max: LONG_MAX, kept_max: LONG_MAX / 4 };
        let (short, long) = (Arc::new(BufferPool::of(short)), Arc::new(BufferPool::of(long)));
        let lost_writes_reported = LostWritesReported::default();
        Arc::new(Self { limits, size: AtomicU64::new(size), durable, short, long, lost_writes_reported })
    }

    /// Returns the lost writes that a starting queue need not report.
    pub(crate) fn lost_writes_seen(&self, queue: u16) -> LostWritesSeen {
        self.lost_writes_reported.seen(queue)
    }

    /// Begins with a fresh driver, while no queue runs.
    pub(crate) fn new_driver(&self) {
        self.lost_writes_reported.new_driver();
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
            Request::SecureErase => return state.finish(buffers, Err(IoError::Unsupported)),
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
        state.lost_writes = state.lost_writes.min(lost_writes);
        let len = state.len;
        match kind {
            OffloadKind::Read | OffloadKind::Write { .. } => {
                if let (OffloadKind::Read, Some(permit)) = (kind, &state.permit)
                    && let Some(bytes) = permit.buffer.as_ref().and_then(|b| b.get(..len as usize))
                {
                    buffers.guest.write(0, bytes, context.marks);
                }
                state.at += len;
                buffers.guest.advance(len, context.marks);
                // The next piece may need a buffer of the other kind, or none.
                state.permit = None;
            }
            OffloadKind::Discard { .. } | OffloadKind::Zeroes { .. } => {
                buffers.advance_extent(len);
            }
            OffloadKind::Flush => state.flush = false,
        }
        Ok(())
    }

    /// Submits the next operation. Continues at once only after an empty extent.
    fn submit_next(
        &self,
        context: &mut IoContext<'_>,
        buffers: &mut IoBuffers,
        state: &mut OffloadState,
        submit: impl Fn(OffloadOp),
    ) -> Flow {
        let (kind, at, len) = match state.request {
            Some(Request::Read { .. }) if !buffers.guest.is_empty() => {
                (OffloadKind::Read, state.at, buffers.guest.len())
            }
            Some(Request::Write { durable, .. }) if !buffers.guest.is_empty() => {
                (OffloadKind::Write { durable: durable && self.durable }, state.at, buffers.guest.len())
            }
            Some(request @ (Request::Discard { durable } | Request::WriteZeroes { durable })) => {
                let durable = durable && self.durable;
                let Some(&extent) = buffers.extents.last() else {
                    return self.flush_or_end(context, state, submit);
                };
                if extent.len == 0 {
                    buffers.advance_extent(0);
                    return Ok(());
                }
                let kind = match request {
                    Request::Discard { .. } => OffloadKind::Discard { durable },
                    _ => OffloadKind::Zeroes { unmap: extent.unmap, durable },
                };
                (kind, extent.offset, extent.len)
            }
            _ => return self.flush_or_end(context, state, submit),
        };
        let op = match kind {
            OffloadKind::Read | OffloadKind::Write { .. } => {
                let pool = if len <= SHORT_BYTES as u64 { &self.short } else { &self.long };
                let len = len.min(pool.bytes() as u64);
                let permit = match pool.take(&mut state.waiting, context.waker) {
                    Ok(Some(permit)) => state.permit.insert(permit),
                    Ok(None) => return Err(Step::Busy),
                    Err(_) => return Err(Step::Done(Err(IoError::Os(Errno::NOMEM)))),
                };
                let mut buffer = permit.buffer.take();
                if let (OffloadKind::Write { .. }, Some(bytes)) =
                    (kind, buffer.as_mut().and_then(|b| b.get_mut(..len as usize)))
                {
                    buffers.guest.read(0, bytes);
                    // A damaged page reads as zeroes, which must not be stored.
                    if buffers.guest.is_damaged() {
                        return Err(Step::Done(Err(IoError::Damaged)));
                    }
                }
                state.len = len;
                state.slot.op(kind, (at, len), buffer, context.waker)
            }
            _ => {
                state.len = len;
                state.slot.op(kind, (at, len), None, context.waker)
            }
        };
        state.submitted = Some(kind);
        submit(op);
        // The library may have answered already. Then it has also signalled the waker.
        Err(Step::Busy)
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
