//! The operations in flight.

use super::cut_file::WriteId;
use crate::qcow2::tables::ops::OpId;
use kickless_io::AlignedBuf;
use std::collections::VecDeque;
use std::ops::Range;

/// The owner of an operation.
#[derive(Debug)]
pub(super) enum OpTarget {
    Table(OpId, Option<AlignedBuf>),
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
