//! Nothing, very fast.

use crate::spec::SECTOR;
use crate::{Error, Io, Limits, Request, Step};

/// A disk without contents. Every request is answered at once; a read leaves in the guest's buffers what was
/// there, so that only the rings are measured and not a copy.
#[derive(Debug)]
pub struct NullDisk {
    limits: Limits,
}

impl NullDisk {
    /// A disk that seems to have `size` bytes.
    ///
    /// # Errors
    /// The size is no positive multiple of 512.
    pub fn new(size: u64, read_only: bool) -> Result<Self, Error> {
        if size == 0 || !size.is_multiple_of(SECTOR) {
            return Err(Error::Size(size));
        }
        Ok(Self { limits: Limits::plain(size, read_only) })
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    #[inline]
    pub(crate) fn start(&self, io: &mut Io, request: Request) -> Step {
        Step::Done(io.check(request, &self.limits).map(drop))
    }
}
