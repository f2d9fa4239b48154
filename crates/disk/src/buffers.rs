//! The buffers and extents of a request.

use crate::{Extent, IoError, Request, SECTOR};
use kickless_io::Buffers;
use kickless_memory::{Iov, Marks};

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
            Request::Discard { .. } | Request::WriteZeroes { .. } => {
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
}

/// Returns whether these are whole sectors within a disk of this size.
#[inline]
fn is_on_disk(offset: u64, len: u64, size: u64) -> bool {
    let whole = offset.is_multiple_of(SECTOR) && len.is_multiple_of(SECTOR);
    whole && offset.checked_add(len).is_some_and(|end| end <= size)
}

/// The memory and the extents of a request to a file: the guest's, or a buffer of this process.
pub(crate) trait TransferBuffers {
    /// Returns the bytes that are left. 0 while an engine has the buffers.
    fn left(&self) -> u64;

    /// Returns whether each piece of memory has this alignment, and a length that is a multiple of `len`.
    fn is_aligned(&self, address: usize, len: usize) -> bool;

    /// Returns whether the memory has lost pages, so that its bytes must not be stored.
    fn is_damaged(&self) -> bool;

    /// Gives the buffers to an engine.
    fn give(&mut self) -> Buffers;

    /// Takes the buffers back from an engine.
    fn take_back(&mut self, buffers: Buffers);

    /// Removes completed bytes from the front.
    fn advance(&mut self, bytes: u64, marks: &mut Marks);

    /// Copies the first bytes to `into`.
    fn read(&self, into: &mut [u8]);

    /// Replaces the first bytes by `from`.
    fn write(&mut self, from: &[u8], marks: &mut Marks);

    /// Replaces up to `bytes` by zeroes.
    fn zero(&mut self, bytes: u64, marks: &mut Marks);

    /// Moves the first `len` bytes to `front`.
    fn split_to(&mut self, len: u64, front: &mut Self, marks: &mut Marks);

    /// Moves a `front` that is not used any more back.
    fn join(&mut self, front: &mut Self, marks: &mut Marks);

    /// Returns the extents, the next one last.
    fn extents(&mut self) -> &mut Vec<Extent>;

    /// Removes completed bytes from the next extent.
    fn advance_extent(&mut self, bytes: u64) {
        let extents = self.extents();
        if let Some(extent) = extents.last_mut() {
            extent.advance(bytes);
            if extent.len == 0 {
                extents.pop();
            }
        }
    }

    /// Frees the memory of the extents.
    #[inline]
    fn drop_extents(&mut self) {
        let extents = self.extents();
        if extents.capacity() > 0 {
            *extents = Vec::new();
        }
    }
}

impl TransferBuffers for IoBuffers {
    #[inline]
    fn left(&self) -> u64 {
        self.guest.len()
    }

    #[inline]
    fn is_aligned(&self, address: usize, len: usize) -> bool {
        self.guest.is_aligned(address, len)
    }

    #[inline]
    fn is_damaged(&self) -> bool {
        self.guest.is_damaged()
    }

    #[inline]
    fn give(&mut self) -> Buffers {
        Buffers::Guest(std::mem::take(&mut self.guest))
    }

    #[inline]
    fn take_back(&mut self, buffers: Buffers) {
        if let Buffers::Guest(guest) = buffers {
            self.guest = guest;
        }
    }

    #[inline]
    fn advance(&mut self, bytes: u64, marks: &mut Marks) {
        self.guest.advance(bytes, marks);
    }

    fn read(&self, into: &mut [u8]) {
        self.guest.read(0, into);
    }

    fn write(&mut self, from: &[u8], marks: &mut Marks) {
        self.guest.write(0, from, marks);
    }

    fn zero(&mut self, bytes: u64, marks: &mut Marks) {
        self.guest.zero(bytes, marks);
    }

    fn split_to(&mut self, len: u64, front: &mut Self, marks: &mut Marks) {
        self.guest.split_to(len, &mut front.guest, marks);
    }

    fn join(&mut self, front: &mut Self, marks: &mut Marks) {
        front.guest.release(marks);
    }

    fn extents(&mut self) -> &mut Vec<Extent> {
        &mut self.extents
    }
}
