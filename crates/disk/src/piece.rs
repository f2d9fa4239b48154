//! Pieces of requests: transfers of whole blocks through a buffer of this process.

use std::ops::Range;

/// A read or write of whole blocks, and the request's bytes within it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Piece {
    /// The first byte on the disk.
    pub(crate) at: u64,
    /// The number of bytes.
    pub(crate) total: u64,
    /// The request's bytes: the offset of the first, and the number.
    pub(crate) skip: u64,
    pub(crate) len: u64,
}

impl Piece {
    /// Returns the next piece of a transfer of `left` bytes at `at`. It has at most `max` bytes, which is a
    /// multiple of `block`.
    ///
    /// A read includes all blocks that it touches. A write takes whole blocks together, and a part of a block
    /// separately, because that block must be read first and protected from other writes.
    pub(crate) fn next_of(at: u64, left: u64, block: u64, max: u64, write: bool) -> Self {
        let skip = at % block;
        let len = match write {
            false => left.min(max - skip),
            true if skip > 0 || left < block => left.min(block - skip),
            true => (left - left % block).min(max),
        };
        Self { at: at - skip, total: (skip + len).next_multiple_of(block), skip, len }
    }

    /// Returns whether the request has only a part of the blocks.
    pub(crate) fn is_part(self) -> bool {
        self.len < self.total
    }

    /// Returns the blocks.
    pub(crate) fn blocks(self) -> Range<u64> {
        self.at..self.at + self.total
    }

    /// Returns the place of the request's bytes in the buffer.
    pub(crate) fn bytes(self) -> Range<usize> {
        self.skip as usize..(self.skip + self.len) as usize
    }
}
