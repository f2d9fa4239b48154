//! A disk without contents, for measurements.

use crate::buffers::{IoBuffers, TransferBuffers};
use crate::control::DiskControl;
use crate::hand_over::DiskHandOver;
use crate::{Error, Limits, RangeLimits, Request, SECTOR, Step};

/// A disk without contents.
///
/// Every request is answered at once. A read leaves the guest's buffers unchanged, so that only the rings are
/// measured and not a copy.
#[derive(Debug)]
pub struct NullDisk {
    size: u64,
    limits: Limits,
}

impl NullDisk {
    /// Makes a disk that reports `size` bytes.
    ///
    /// # Errors
    /// The size is not a positive multiple of 512.
    pub fn new(size: u64, read_only: bool) -> Result<Self, Error> {
        if size == 0 || !size.is_multiple_of(SECTOR) {
            return Err(Error::Size(size));
        }
        let ranges = (!read_only).then(|| RangeLimits::bytes(1 << 30, SECTOR));
        let limits = Limits {
            discard: ranges,
            write_zeroes: ranges,
            zeroes_may_unmap: ranges.is_some(),
            ..Limits::plain(read_only)
        };
        Ok(Self { size, limits })
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    #[inline]
    pub(crate) fn start(&self, buffers: &mut IoBuffers, request: Request) -> Step {
        let result = buffers.check(request, self.size, self.limits.read_only).map(drop);
        match request {
            Request::Read { .. } | Request::Write { .. } | Request::Flush => Step::Done(result),
            Request::Discard { .. } | Request::WriteZeroes { .. } => {
                buffers.drop_extents();
                Step::Done(result)
            }
        }
    }
}

impl DiskHandOver for NullDisk {}

impl DiskControl for NullDisk {
    fn identity(&self) -> &str {
        "kickless-null"
    }
}
