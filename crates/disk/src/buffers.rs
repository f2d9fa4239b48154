//! The buffers and extents of a request.

use crate::{Extent, IoError, Request, SECTOR};
use kickless_memory::Iov;

/// The guest's buffers or the extents of a request.
#[derive(Debug, Default)]
pub(crate) struct IoBuffers {
    /// The rest of the guest's buffers. Empty while an engine has them.
    pub(crate) guest: Iov,
    /// The extents that are not done, the next one last. Completed parts are cut off its beginning.
    pub(crate) extents: Vec<Extent>,
}

impl IoBuffers {
    /// Checks that a disk of this size can run `request`. Returns the first byte on the disk.
    ///
    /// # Errors
    /// Sectors beyond the disk, a part of a sector, or a write to a read-only disk.
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
        if is_on_disk(offset, self.guest.len(), size) { Ok(offset) } else { Err(IoError::Range) }
    }

    #[cold]
    fn check_extents(&self, size: u64, read_only: bool) -> Result<u64, IoError> {
        if read_only {
            return Err(IoError::ReadOnly);
        }
        match self.extents.iter().all(|extent| is_on_disk(extent.offset, extent.len, size)) {
            true => Ok(0),
            false => Err(IoError::Range),
        }
    }

    /// Removes completed bytes from the next extent.
    pub(crate) fn advance_extent(&mut self, bytes: u64) {
        if let Some(extent) = self.extents.last_mut() {
            extent.advance(bytes);
            if extent.len == 0 {
                self.extents.pop();
            }
        }
    }

    /// Frees the memory of the extents.
    #[inline]
    pub(crate) fn drop_extents(&mut self) {
        if self.extents.capacity() > 0 {
            self.extents = Vec::new();
        }
    }
}

/// Returns whether these are whole sectors within a disk of this size.
#[inline]
fn is_on_disk(offset: u64, len: u64, size: u64) -> bool {
    let whole = offset.is_multiple_of(SECTOR) && len.is_multiple_of(SECTOR);
    whole && offset.checked_add(len).is_some_and(|end| end <= size)
}
