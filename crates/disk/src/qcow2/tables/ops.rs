//! The operations that are due or running, and syncs.

use super::blocks::Block;
use super::op::{OpId, TableOp, TableOpKind};
use crate::qcow2::format::geometry::SliceIndex;
use kickless_io::{AlignedBuf, Errno};
use std::collections::{HashMap, VecDeque};

/// The reason for an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Writes a block with its changes up to the number.
    Block(Block, u64),
    /// Reads slices.
    Load(Load),
    /// Reads a unit of a refcount block.
    Refcounts(u64),
    /// A sync of our own, with the number of completed operations when it began.
    Sync(u64),
    /// Zeroes a run of the reserve's chunk.
    ChunkZero(Run),
    /// Frees the space of a run.
    Punch(Run),
    /// Reads a unit of an L2 table that is copied, by the number of its L1 entry.
    TableRead(u64),
    /// Writes a unit of the copy.
    TableWrite(u64),
    /// Writes a part of a table that moves.
    Move(u64),
}

/// Contiguous clusters of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) start: u64,
    pub(super) len: u64,
}

impl Run {
    pub(super) fn end(self) -> u64 {
        self.start + self.len
    }

    pub(super) fn contains(self, cluster: u64) -> bool {
        (self.start..self.end()).contains(&cluster)
    }

    /// Takes at most `len` clusters from the beginning.
    pub(super) fn split(&mut self, len: u64) -> Self {
        let front = Self { start: self.start, len: len.min(self.len) };
        *self = Self { start: front.end(), len: self.len - front.len };
        front
    }
}

/// Slices that are read at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) first: SliceIndex,
    pub(super) count: u64,
    /// The slice that a request waits for.
    pub(super) wanted: SliceIndex,
}

impl Load {
    pub(super) fn slices(self) -> impl Iterator<Item = SliceIndex> {
        (self.first.0..self.first.0 + self.count).map(SliceIndex)
    }
}

/// The operations that are due or running.
#[derive(Debug, Default)]
pub(super) struct Ops {
    next: u32,
    due: VecDeque<TableOp>,
    running: HashMap<OpId, Purpose>,
    /// The buffers that are not allocated, for tests.
    #[cfg(test)]
    pub(super) failing_buffers: u32,
}

impl Ops {
    /// Makes an operation that is running from now on.
    pub(super) fn start(&mut self, purpose: Purpose, kind: TableOpKind) -> TableOp {
        let id = OpId(self.next);
        self.next = self.next.wrapping_add(1);
        self.running.insert(id, purpose);
        TableOp { id, kind }
    }

    /// Allocates a buffer for an operation, with the alignment of a unit of table I/O.
    pub(super) fn buffer(&mut self, bytes: u64, unit: u64) -> Result<AlignedBuf, Errno> {
        #[cfg(test)]
        if self.failing_buffers > 0 {
            self.failing_buffers -= 1;
            return Err(Errno::NOMEM);
        }
        AlignedBuf::new(bytes as usize, unit as usize).map_err(|_| Errno::NOMEM)
    }

    /// Queues an operation.
    pub(super) fn queue(&mut self, purpose: Purpose, kind: TableOpKind) {
        let op = self.start(purpose, kind);
        self.due.push_back(op);
    }

    /// Queues an operation again that is running.
    pub(super) fn put_back(&mut self, op: TableOp) {
        self.due.push_back(op);
    }

    pub(super) fn next(&mut self) -> Option<TableOp> {
        self.due.pop_front()
    }

    pub(super) fn end(&mut self, id: OpId) -> Option<Purpose> {
        self.running.remove(&id)
    }

    pub(super) fn has_due(&self) -> bool {
        !self.due.is_empty()
    }

    pub(super) fn is_idle(&self) -> bool {
        self.running.is_empty()
    }
}

/// The order of completed operations and syncs. An operation is durable if a sync that began after its
/// completion has succeeded.
#[derive(Debug, Default)]
pub(super) struct Syncs {
    /// The number of completed writes and zeroings of tables.
    completed: u64,
    /// The operations up to this one are durable.
    durable: u64,
    /// Something waits until the operations up to this one are durable.
    wanted: u64,
    /// A sync of our own is running.
    is_running: bool,
}

impl Syncs {
    pub(super) fn completed(&self) -> u64 {
        self.completed
    }

    pub(super) fn count(&mut self) {
        self.completed += 1;
    }

    pub(super) fn is_durable(&self, stamp: u64) -> bool {
        self.durable >= stamp
    }

    pub(super) fn want(&mut self, stamp: u64) {
        self.wanted = self.wanted.max(stamp);
    }

    pub(super) fn is_due(&self) -> bool {
        self.wanted > self.durable && !self.is_running
    }

    /// Begins a sync of our own.
    pub(super) fn begin(&mut self) -> u64 {
        self.is_running = true;
        self.completed
    }

    /// Ends a sync of our own. If it failed, all that wanted it have to ask again.
    pub(super) fn end(&mut self, mark: u64, is_ok: bool) {
        self.is_running = false;
        if is_ok {
            self.succeed(mark);
        } else {
            self.wanted = 0;
        }
    }

    /// Notes that a sync with this mark has succeeded.
    pub(super) fn succeed(&mut self, mark: u64) {
        self.durable = self.durable.max(mark);
    }
}
