//! The state of one request on its way through a file.

use super::piece::Bounce;
use crate::buffers::IoBuffers;
use crate::range::RangeClaim;
use crate::{IoError, Step};
use kickless_io::RangeCall;

/// How far a request has come.
#[derive(Debug, Default)]
pub(crate) struct FileState {
    /// The next byte on the disk.
    pub(super) at: u64,
    pub(super) write: bool,
    pub(super) durable: bool,
    pub(super) phase: Phase,
    /// An operation of it is in the engine.
    pub(super) sent: bool,
    /// The kernel's requests to try again, in a row.
    pub(super) retries: u16,
    pub(super) range: Option<RangeClaim>,
    pub(super) bounce: Option<Box<Bounce>>,
    /// Of a request on extents.
    pub(super) work: Option<Box<ExtentWork>>,
}

/// What comes next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Phase {
    /// No request.
    #[default]
    Idle,
    /// Decide how to do what is left.
    Plan,
    /// Transfer from or to the guest's buffers.
    Direct,
    /// Get a bounce buffer and what else the piece in [`FileState::bounce`] needs.
    Prepare,
    /// Read into the bounce buffer.
    Load,
    /// Write from the bounce buffer.
    Store,
    /// Flush the file.
    Flush,
    /// Do something to the extent that is next.
    Extent,
}

/// How far a request on extents has come.
#[derive(Debug, Default)]
pub(super) struct ExtentWork {
    /// They are to be zeroed, not discarded.
    pub(super) zeroes: bool,
    /// The call that is on its way, and for how many bytes.
    pub(super) range_call: Option<(RangeCall, u64)>,
    /// So many bytes of the next extent get zeroes from a buffer of ours.
    pub(super) to_write: u64,
}

impl FileState {
    pub(crate) fn is_active(&self) -> bool {
        self.phase != Phase::Idle
    }

    /// Ends the request.
    pub(super) fn finish(&mut self, buffers: &mut IoBuffers, result: Result<(), IoError>) -> Step {
        self.phase = Phase::Idle;
        self.range = None;
        self.bounce = None;
        self.work = None;
        buffers.drop_extents();
        Step::Done(result)
    }

    /// Takes what the range call that was on its way has done off the extents.
    pub(super) fn range_call_done(&mut self, buffers: &mut IoBuffers) {
        self.range = None;
        if let Some((_, bytes)) = self.work.as_mut().and_then(|work| work.range_call.take()) {
            buffers.advance_extent(bytes);
        }
    }
}
