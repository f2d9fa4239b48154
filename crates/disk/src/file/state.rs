//! The state of one request of a file.

use super::bounce::Bounce;
use crate::buffers::TransferBuffers;
use crate::range::RangeClaim;
use crate::{IoError, Step};
use kickless_io::RangeSyscall;

/// The progress of a request.
#[derive(Debug, Default)]
pub(crate) struct FileState {
    /// The next byte on the disk.
    pub(super) at: u64,
    pub(super) write: bool,
    pub(super) durable: bool,
    /// Reads beyond the end of the file find zeroes.
    pub(super) fill: bool,
    pub(super) phase: Phase,
    /// An operation of the request is in the engine.
    pub(super) sent: bool,
    /// The request starts no further operation.
    pub(super) cancelled: bool,
    /// The number of times in a row that the kernel asked for a retry.
    pub(super) retries: u16,
    pub(super) range: Option<RangeClaim>,
    pub(super) bounce: Option<Box<Bounce>>,
    /// The progress on the extents, if the request has extents.
    pub(super) work: Option<Box<ExtentWork>>,
}

/// The next action of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Phase {
    /// There is no request.
    #[default]
    Idle,
    /// Choose the method for the rest.
    Plan,
    /// Transfer directly from or to the guest's buffers.
    Direct,
    /// Get a bounce buffer, and the range of the piece in [`FileState::bounce`].
    Prepare,
    /// Read into the bounce buffer.
    Load,
    /// Write from the bounce buffer.
    Store,
    /// Flush the file.
    Flush,
    /// Discard or zero the next extent.
    Extent,
}

/// The progress of a request on extents.
#[derive(Debug, Default)]
pub(super) struct ExtentWork {
    /// Write zeroes instead of discarding.
    pub(super) zeroes: bool,
    /// The call in the engine, and its number of bytes.
    pub(super) range_syscall: Option<(RangeSyscall, u64)>,
    /// The number of bytes of the next extent to overwrite with zeroes from a bounce buffer.
    pub(super) to_write: u64,
}

impl FileState {
    pub(crate) fn is_active(&self) -> bool {
        self.phase != Phase::Idle
    }

    /// Returns whether an operation of the request is in an engine.
    pub(crate) fn is_sent(&self) -> bool {
        self.sent
    }

    /// Returns the next byte of the transfer on the disk.
    pub(crate) fn at(&self) -> u64 {
        self.at
    }

    /// Cancels the request, if there is one: it starts no further operation, and then ends with an error.
    pub(crate) fn cancel(&mut self) {
        self.cancelled = self.is_active();
    }

    /// Ends the request.
    pub(super) fn finish(&mut self, buffers: &mut impl TransferBuffers, result: Result<(), IoError>) -> Step {
        self.phase = Phase::Idle;
        self.cancelled = false;
        self.range = None;
        self.bounce = None;
        self.work = None;
        buffers.drop_extents();
        Step::Done(result)
    }

    /// Removes the bytes of the completed range call from the extents.
    pub(super) fn range_syscall_done(&mut self, buffers: &mut impl TransferBuffers) {
        self.range = None;
        if let Some((_, bytes)) = self.work.as_mut().and_then(|work| work.range_syscall.take()) {
            buffers.advance_extent(bytes);
        }
    }
}
