//! A request on its way, and what a device and a disk say to each other about it.

use crate::buffer_pool::{BufferPermit, BufferWait};
use crate::fault::Held;
use crate::offload::{LostWritesSeen, OffloadState};
use crate::range::RangeClaim;
use crate::{IoError, SECTOR};
use kickless_io::{Buffers, Engine, FileId, Op, OpKind, RangeCall, Token, Waker};
use kickless_memory::{Iov, Marks};

/// What the guest wants. How many bytes is what the [`Io`]'s buffers hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Disk to buffers.
    Read {
        /// First byte on the disk; a multiple of 512.
        offset: u64,
    },
    /// Buffers to disk.
    Write {
        /// First byte on the disk; a multiple of 512.
        offset: u64,
        /// Done only when the bytes are on stable storage.
        durable: bool,
    },
    /// All writes that are done are to be on stable storage. No buffers.
    Flush,
    /// The [`Io`]'s extents need not keep what they hold, nor their space.
    Discard {
        /// Done only when that is so on stable storage.
        durable: bool,
    },
    /// The [`Io`]'s extents read as zeroes from now on.
    WriteZeroes {
        /// Done only when that is so on stable storage.
        durable: bool,
    },
    /// What the [`Io`]'s extents hold is not to be had any more by any means.
    SecureErase,
}

/// A range of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First byte; a multiple of 512.
    pub offset: u64,
    /// Bytes; a multiple of 512.
    pub len: u64,
    /// Zeroes may be written to it by giving its space back.
    pub unmap: bool,
}

impl Extent {
    /// It begins so much later.
    pub(crate) fn advance(&mut self, bytes: u64) {
        let bytes = bytes.min(self.len);
        self.offset += bytes;
        self.len -= bytes;
    }
}

/// The way from one worker to a disk, for one request.
#[derive(Debug)]
pub struct Lane<'a> {
    /// The worker's engine.
    pub engine: &'a mut Engine,
    /// First half of the token that completions of this request carry.
    pub source: u32,
    /// Second half.
    pub slot: u32,
    /// What [`crate::Disk::attach`] returned for this engine.
    pub file: Option<FileId>,
    /// Signalled when a request of this lane that got [`Step::Busy`] for want of something that is shared,
    /// and no engine can announce, should be retried.
    pub waker: &'a Waker,
    /// The queue's own, from [`crate::Disk::lost_writes_seen`].
    pub lost_writes: &'a mut LostWritesSeen,
    /// Where writes to the guest's buffers are marked.
    pub marks: &'a mut Marks,
}

/// Where a request's operations go: straight to an engine, or past a disk's injected faults. Chosen at compile time, so that
/// the one pays nothing for the other.
pub(crate) trait Outlet {
    /// Sends an operation on its way.
    ///
    /// # Errors
    /// Not now ([`Step::Busy`]), or not at all; the buffers come back.
    fn send(&mut self, kind: OpKind, offset: u64, buffers: Buffers) -> Result<(), (Step, Buffers)>;

    /// What wakes the worker.
    fn waker(&self) -> &Waker;

    /// Where writes to the guest's buffers are marked.
    fn marks(&mut self) -> &mut Marks;

    /// The kernel had no room for an operation: nothing more of this disk is to be sent for a moment.
    fn stall(&mut self);
}

impl Outlet for Lane<'_> {
    #[inline]
    fn send(&mut self, kind: OpKind, offset: u64, buffers: Buffers) -> Result<(), (Step, Buffers)> {
        let Some(file) = self.file else {
            return Err((Step::Done(Err(IoError::Os(kickless_io::Errno::BADF))), buffers));
        };
        let token = Token { source: self.source, slot: self.slot };
        self.engine.queue(Op { file, kind, offset, buffers }, token).map_err(|op| (Step::Busy, op.buffers))
    }

    #[inline]
    fn waker(&self) -> &Waker {
        self.waker
    }

    #[inline]
    fn marks(&mut self) -> &mut Marks {
        self.marks
    }

    fn stall(&mut self) {
        if let Some(file) = self.file {
            self.engine.stall(file);
        }
    }
}

/// How far a request has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Step {
    /// It is over. The buffers are back in the [`Io`]; how much is left in them says nothing.
    Done(Result<(), IoError>),
    /// An operation is in the engine; its completion goes to [`crate::Disk::resume`].
    Pending,
    /// The engine is full, or another request has what this one needs. It stays whole in the [`Io`];
    /// [`crate::Disk::retry`] when the engine has room again *and* when the lane's waker was signalled.
    Busy,
    /// As much of it is done as is done at a time: [`crate::Disk::step_bytes`], or what takes as long. It waits for nothing;
    /// [`crate::Disk::retry`] in its turn.
    More,
}

/// One request, from start to end. A device embeds one in each request slot and uses it again and again: it
/// then keeps its buffers' capacity and the reference to the memory map.
///
/// Dropping it while it waits ([`Step::Busy`]) gives up the request. While it is [`Step::Pending`] the engine
/// has the buffers, and the completion must still be awaited.
#[derive(Debug, Default)]
pub struct Io {
    pub(crate) buffers: Iov,
    /// The next byte on the disk.
    pub(crate) at: u64,
    pub(crate) write: bool,
    pub(crate) durable: bool,
    pub(crate) phase: Phase,
    /// An operation of it is in the engine.
    pub(crate) sent: bool,
    /// The kernel's requests to try again, in a row.
    pub(crate) retries: u16,
    pub(crate) range: Option<RangeClaim>,
    pub(crate) bounce: Option<Box<Bounce>>,
    /// A request on extents.
    pub(crate) work: Option<Box<Work>>,
    /// What a disk with injected faults does to it.
    pub(crate) held: Option<Box<Held>>,
    /// A request of a disk that answers in its own time. Kept for the next one.
    pub(crate) offload: Option<Box<OffloadState>>,
}

/// What comes next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Phase {
    /// No request.
    #[default]
    Idle,
    /// Not begun: a fault is in its way.
    Held,
    /// Decide how to do what is left.
    Plan,
    /// Transfer from or to the guest's buffers.
    Direct,
    /// Get a bounce buffer and what else the piece in [`Io::bounce`] needs.
    Prepare,
    /// Read into the bounce buffer.
    Load,
    /// Write from the bounce buffer.
    Store,
    /// Flush the file.
    Flush,
    /// Do something to the extent that is next.
    Extent,
    /// With a library, or on its way to one.
    Offloaded,
    /// In memory, a part of it at a time.
    Steps(Steps),
}

/// The kind of work that is done in steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Steps {
    Read,
    Write,
    Discard,
    WriteZeroes,
    SecureErase,
}

/// A request on extents, and how far it has come.
#[derive(Debug, Default)]
pub(crate) struct Work {
    /// Those that are not done; what is done is cut off the first, which is the last in here.
    pub(crate) extents: Vec<Extent>,
    /// They are to be zeroed, not discarded.
    pub(crate) zeroes: bool,
    /// The call that is on its way, and for how many bytes.
    pub(crate) call: Option<(RangeCall, u64)>,
    /// So many bytes of the next extent get zeroes from a buffer of ours.
    pub(crate) to_write: u64,
}

/// A piece of a request that goes through a buffer of ours.
#[derive(Debug, Default)]
pub(crate) struct Bounce {
    pub(crate) waiting: Option<BufferWait>,
    pub(crate) permit: Option<BufferPermit>,
    /// Where on the disk the buffer lies.
    pub(crate) at: u64,
    /// Bytes of it that are transferred.
    pub(crate) total: usize,
    /// How many of them have been, by the present operation.
    pub(crate) done: usize,
    /// The guest's bytes within it: first one, and how many.
    pub(crate) skip: usize,
    pub(crate) len: usize,
}

impl Io {
    /// The guest's buffers: to be filled before a request starts, and to be emptied ([`Iov::clear`]) after it
    /// is over. To be left alone in between.
    pub fn buffers_mut(&mut self) -> &mut Iov {
        &mut self.buffers
    }

    /// The guest's buffers. Empty while the engine has them.
    pub fn buffers(&self) -> &Iov {
        &self.buffers
    }

    /// The extents of a request that has any: to be filled, in any order, before it starts. Gone when it is over.
    pub fn extents_mut(&mut self) -> &mut Vec<Extent> {
        &mut self.work.get_or_insert_default().extents
    }

    /// Gives back the memory of extents whose request is not started.
    pub fn drop_extents(&mut self) {
        self.work = None;
    }

    /// Returns how many extents there are.
    pub fn extents_len(&self) -> usize {
        self.work.as_ref().map_or(0, |work| work.extents.len())
    }

    /// Whether a request has been started and is not over.
    pub fn is_active(&self) -> bool {
        self.phase != Phase::Idle
    }

    /// Ends the request.
    pub(crate) fn finish(&mut self, result: Result<(), IoError>) -> Step {
        self.phase = Phase::Idle;
        self.range = None;
        self.bounce = None;
        self.work = None;
        Step::Done(result)
    }

    /// Whether `request` can be for a disk of this size; where its bytes begin.
    #[inline]
    pub(crate) fn check(&self, request: Request, size: u64, read_only: bool) -> Result<u64, IoError> {
        let (offset, write) = match request {
            Request::Read { offset } => (offset, false),
            Request::Write { offset, .. } => (offset, true),
            Request::Flush => return Ok(0),
            Request::Discard { .. } | Request::WriteZeroes { .. } | Request::SecureErase => {
                return self.check_extents(size, read_only);
            }
        };
        if write && read_only {
            return Err(IoError::ReadOnly);
        }
        if is_on_disk(offset, self.buffers.len(), size) { Ok(offset) } else { Err(IoError::Range) }
    }

    #[cold]
    fn check_extents(&self, size: u64, read_only: bool) -> Result<u64, IoError> {
        if read_only {
            return Err(IoError::ReadOnly);
        }
        let mut extents = self.work.iter().flat_map(|work| &work.extents);
        match extents.all(|extent| is_on_disk(extent.offset, extent.len, size)) {
            true => Ok(0),
            false => Err(IoError::Range),
        }
    }
}

/// Whether these are whole sectors that a disk of this size has.
#[inline]
fn is_on_disk(offset: u64, len: u64, size: u64) -> bool {
    let whole = offset.is_multiple_of(SECTOR) && len.is_multiple_of(SECTOR);
    whole && offset.checked_add(len).is_some_and(|end| end <= size)
}
