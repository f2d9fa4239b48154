//! The operations that the tables need, for any executor: those that are due, and those that are running.

use super::blocks::Block;
use super::cluster_run::ClusterRun;
use crate::format::geometry::SliceIndex;
use crate::runtime::Runtime;
use rustix::io::Errno;
use std::collections::{HashMap, VecDeque};

/// The number of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OpId(pub(super) u32);

/// An operation on the image file. Its completion goes to `Tables::complete`, once.
#[derive(Debug)]
pub struct TableOp<R: Runtime> {
    /// The number for the completion.
    pub id: OpId,
    /// The work to do.
    pub kind: TableOpKind<R>,
}

/// The kinds of operations.
#[derive(Debug)]
pub enum TableOpKind<R: Runtime> {
    /// Fills the buffer. Bytes beyond the end of the file are zeroes.
    Read {
        /// The offset in the file.
        at: u64,
        /// The buffer, which comes back.
        buffer: R::Buffer,
    },
    /// Writes the buffer.
    Write {
        /// The offset in the file.
        at: u64,
        /// The buffer, which comes back.
        buffer: R::Buffer,
    },
    /// Moves all writes that have completed before to stable storage.
    Sync,
    /// Makes the range read as zeroes, and extends the file to its end if needed.
    Zero {
        /// The offset in the file.
        at: u64,
        /// The number of bytes.
        len: u64,
        /// Give the space back to the host if possible. Otherwise it stays allocated.
        gives_back: bool,
    },
}

/// The reason for an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OpPurpose {
    /// Writes a block with its changes up to the number.
    Block(Block, u64),
    /// Reads slices.
    Load(SliceLoad),
    /// Reads a unit of a refcount block.
    Refcounts(u64),
    /// A sync of our own, with the number of completed operations when it began.
    Sync(u64),
    /// Zeroes a run of the reserve's chunk.
    ChunkZero(ClusterRun),
    /// Frees the space of a run.
    Punch(ClusterRun),
    /// Reads a unit of an L2 table that is copied, by the number of its L1 entry.
    TableRead(u64),
    /// Writes a unit of the copy.
    TableWrite(u64),
    /// Writes a part of a table that moves.
    Move(u64),
}

/// Slices that are read at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SliceLoad {
    pub(super) first: SliceIndex,
    pub(super) count: u64,
    /// The slice that a request waits for.
    pub(super) wanted: SliceIndex,
}

impl SliceLoad {
    pub(super) fn slices(self) -> impl Iterator<Item = SliceIndex> {
        (self.first.0..self.first.0 + self.count).map(SliceIndex)
    }
}

/// The operations that are due or running.
#[derive(Debug)]
pub(super) struct TableOps<R: Runtime> {
    next: u32,
    due: VecDeque<TableOp<R>>,
    running: HashMap<OpId, OpPurpose>,
    /// The buffers that are not allocated, for tests.
    #[cfg(test)]
    pub(super) failing_buffers: u32,
}

impl<R: Runtime> TableOps<R> {
    pub(super) fn new() -> Self {
        Self {
            next: 0,
            due: VecDeque::new(),
            running: HashMap::new(),
            #[cfg(test)]
            failing_buffers: 0,
        }
    }

    /// Makes an operation that is running from now on.
    pub(super) fn start(&mut self, purpose: OpPurpose, kind: TableOpKind<R>) -> TableOp<R> {
        let id = OpId(self.next);
        self.next = self.next.wrapping_add(1);
        self.running.insert(id, purpose);
        TableOp { id, kind }
    }

    /// Allocates a buffer for an operation, with the alignment of a unit of table I/O.
    pub(super) fn buffer(&mut self, bytes: u64, unit: u64) -> Result<R::Buffer, Errno> {
        #[cfg(test)]
        if self.failing_buffers > 0 {
            self.failing_buffers -= 1;
            return Err(Errno::NOMEM);
        }
        R::allocate(bytes as usize, unit as usize).ok_or(Errno::NOMEM)
    }

    /// Queues an operation.
    pub(super) fn queue(&mut self, purpose: OpPurpose, kind: TableOpKind<R>) {
        let op = self.start(purpose, kind);
        self.due.push_back(op);
    }

    /// Queues an operation again that is running.
    pub(super) fn put_back(&mut self, op: TableOp<R>) {
        self.due.push_back(op);
    }

    pub(super) fn next(&mut self) -> Option<TableOp<R>> {
        self.due.pop_front()
    }

    pub(super) fn end(&mut self, id: OpId) -> Option<OpPurpose> {
        self.running.remove(&id)
    }

    pub(super) fn has_due(&self) -> bool {
        !self.due.is_empty()
    }

    pub(super) fn is_idle(&self) -> bool {
        self.running.is_empty()
    }
}
