//! Frames that are delivered whole: from memory of this process, or from that of their sender.

use kickless_device::{PARCEL_HEAD_LEN, Parcel};
use kickless_memory::{Gpa, Marks, Unmapped, View};
use kickless_virtqueue::Buffer;
use kickless_virtqueue::device::SingleChain;
use std::iter::zip;

/// A frame with its complete header.
pub(crate) trait WholeFrame {
    /// Returns the length, header included.
    fn len(&self) -> usize;

    /// Writes the frame to `to`, and marks the range.
    ///
    /// # Errors
    /// A part of either range is not guest memory. A part of the frame may be written.
    fn write(&self, view: &View, to: Gpa, marks: &mut Marks) -> Result<(), Unmapped>;

    /// Asks the processor for the buffer of the next frame, which is probably as long as this one.
    fn prefetch_next(&self, _view: &View, _buffer: Buffer) {}
}

impl WholeFrame for &[u8] {
    #[inline]
    fn len(&self) -> usize {
        <[u8]>::len(self)
    }

    #[inline]
    fn write(&self, view: &View, to: Gpa, marks: &mut Marks) -> Result<(), Unmapped> {
        view.write(to, self, marks)
    }
}

/// A frame of a [`Parcel`]. Its first bytes are those that the sender has judged. The others are read once,
/// when they are written to the receiver's buffer.
pub(crate) struct DirectFrame<'a> {
    head: &'a [u8],
    len: usize,
    from: &'a View,
    at: Gpa,
}

impl<'a> DirectFrame<'a> {
    /// Returns the frames of a parcel, each of which is in one of these chains.
    pub(crate) fn all(parcel: &Parcel<'a>, chains: &'a [SingleChain]) -> impl Iterator<Item = Self> {
        let from = parcel.view;
        zip(parcel.heads, chains).map(move |(head, chain)| {
            let len = chain.buffer.len as usize;
            Self { head: &head[..len.min(PARCEL_HEAD_LEN)], len, from, at: chain.buffer.addr }
        })
    }

    /// Returns the first bytes, header included.
    pub(crate) fn head(&self) -> &'a [u8] {
        self.head
    }
}

impl WholeFrame for DirectFrame<'_> {
    #[inline]
    fn len(&self) -> usize {
        self.len
    }

    #[inline]
    fn write(&self, view: &View, to: Gpa, marks: &mut Marks) -> Result<(), Unmapped> {
        view.write(to, self.head, marks)?;
        let rest = self.len - self.head.len();
        if rest == 0 {
            return Ok(());
        }
        let behind = |at: Gpa| {
            let unmapped = Unmapped { addr: at.0, len: self.len as u64 };
            at.checked_add(self.head.len() as u64).ok_or(unmapped)
        };
        view.copy_from(behind(to)?, self.from, behind(self.at)?, rest as u64, marks)
    }

    /// The lines of a frame are on their way from the other guest's processor while the one before is copied.
    #[inline]
    fn prefetch_next(&self, view: &View, buffer: Buffer) {
        view.prefetch_rest_for_write(buffer.addr, self.len.min(buffer.len as usize));
    }
}
