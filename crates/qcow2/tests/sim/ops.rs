//! The operations in flight.

use crate::images::cut_file::WriteId;
use crate::tables::ops::OpId;
use std::collections::VecDeque;
use std::ops::Range;

/// The owner of an operation.
#[derive(Debug)]
pub(super) enum OpTarget {
    Table(OpId, Option<Vec<u8>>),
    /// A part of a range that is zeroed. The other parts follow.
    Zero(OpId, VecDeque<Range<usize>>),
    Request(usize),
}

/// The work of an operation.
#[derive(Debug)]
pub(super) enum OpWork {
    Read { at: u64 },
    Write { id: WriteId, durable: bool },
    Sync { mark: u64 },
}

/// An operation in flight.
#[derive(Debug)]
pub(super) struct SimOp {
    pub(super) target: OpTarget,
    pub(super) work: OpWork,
    /// The step before which it does not complete.
    pub(super) not_before: u64,
}
