//! The pieces of a request that go through bounce buffers.

use crate::buffer_pool::{BUFFER_BYTES, BufferPermit, BufferWait};

/// A piece of a request that goes through a bounce buffer.
#[derive(Debug, Default)]
pub(super) struct Bounce {
    pub(super) waiting: Option<BufferWait>,
    pub(super) permit: Option<BufferPermit>,
    /// The offset of the buffer on the disk.
    pub(super) at: u64,
    /// The number of bytes to transfer.
    pub(super) total: usize,
    /// The number of bytes that the current operation has transferred.
    pub(super) done: usize,
    /// The guest's bytes within the buffer: the offset of the first, and the number.
    pub(super) skip: usize,
    pub(super) len: usize,
}

impl Bounce {
    /// Returns whether the piece is a part of a block.
    pub(super) fn is_part(&self) -> bool {
        self.len < self.total
    }
}

/// Cuts the next piece for a bounce buffer off the `left` bytes at `at`.
///
/// A read includes all blocks that it touches. A write takes whole blocks together, and a part of a block
/// separately. So only one block must be read first and protected from other writes.
pub(super) fn piece(at: u64, left: u64, block: u64, write: bool) -> Bounce {
    let start = at - at % block;
    let skip = at - start;
    let room = BUFFER_BYTES as u64 - skip;
    let len = match write {
        false => left.min(room),
        true if skip > 0 || left < block => left.min(block - skip),
        true => (left - left % block).min(BUFFER_BYTES as u64),
    };
    // The total fits into a buffer: a block does, and buffers are a multiple of it.
    let total = (skip + len).next_multiple_of(block);
    Bounce { at: start, total: total as usize, skip: skip as usize, len: len as usize, ..Bounce::default() }
}
