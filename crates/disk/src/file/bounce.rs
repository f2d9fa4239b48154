//! The pieces of a request that go through bounce buffers.

use crate::buffer_pool::{BUFFER_BYTES, BufferPermit, BufferWait};
use crate::piece::Piece;

/// A piece of a request that goes through a bounce buffer.
#[derive(Debug, Default)]
pub(super) struct Bounce {
    pub(super) waiting: Option<BufferWait>,
    pub(super) permit: Option<BufferPermit>,
    pub(super) piece: Piece,
    /// The number of bytes that the current operation has transferred.
    pub(super) done: usize,
}

impl Bounce {
    /// Cuts the next piece off the `left` bytes at `at`. It fits into a buffer, which is a multiple of a
    /// block.
    pub(super) fn new(at: u64, left: u64, block: u64, write: bool) -> Box<Self> {
        let piece = Piece::next_of(at, left, block, BUFFER_BYTES as u64, write);
        Box::new(Self { piece, ..Self::default() })
    }

    /// Returns the next byte of the current operation on the disk.
    pub(super) fn next(&self) -> u64 {
        self.piece.at + self.done as u64
    }
}
