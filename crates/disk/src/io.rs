//! A request on its way.

use crate::buffer_pool::{BufferPermit, BufferWait};
use crate::fault::Held;
use crate::offload::OffloadState;
use crate::range::RangeClaim;
use crate::{Extent, IoError, Request, SECTOR, Step};
use kickless_io::RangeCall;
use kickless_memory::Iov;

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
