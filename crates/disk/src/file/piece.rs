//! Pieces of a request that go through buffers of ours.

use crate::buffer_pool::{BUFFER_BYTES, BufferPermit, BufferWait};

/// A piece of a request that goes through a buffer of ours.
#[derive(Debug, Default)]
pub(super) struct Bounce {
    pub(super) waiting: Option<BufferWait>,
    pub(super) permit: Option<BufferPermit>,
    /// Where on the disk the buffer lies.
    pub(super) at: u64,
    /// Bytes of it that are transferred.
    pub(super) total: usize,
    /// How many of them have been, by the present operation.
    pub(super) done: usize,
    /// The guest's bytes within it: first one, and how many.
    pub(super) skip: usize,
    pub(super) len: usize,
}

impl Bounce {
    /// Whether it is a part of a block.
    pub(super) fn is_part(&self) -> bool {
        self.len < self.total
    }
}

/// Cuts the next piece for a bounce buffer off the `left` bytes at `at`.
///
/// A read takes all blocks that it touches. A write takes whole blocks as they come, and a part of a block by
/// itself, so that what has to be read first and kept from others is one block.
pub(super) fn piece(at: u64, left: u64, block: u64, write: bool) -> Bounce {
    let start = at - at % block;
    let skip = at - start;
    let room = BUFFER_BYTES as u64 - skip;
    let len = match write {
        false => left.min(room),
        true if skip > 0 || left < block => left.min(block - skip),
        true => (left - left % block).min(BUFFER_BYTES as u64),
    };
    // All of it fits into a buffer: a block does, and buffers are a multiple of it.
    let total = (skip + len).next_multiple_of(block);
    Bounce { at: start, total: total as usize, skip: skip as usize, len: len as usize, ..Bounce::default() }
}
