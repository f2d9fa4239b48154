//! The state of a table that moves (R7).

use super::blocks::Block;
use crate::qcow2::format::geometry::HostOffset;

/// A table that is written at a new place.
#[derive(Debug)]
pub(super) struct Move {
    pub(super) what: What,
    /// The clusters to write, each with its number.
    pub(super) to_write: Vec<(u64, Vec<u8>)>,
    pub(super) writing: usize,
    /// The clusters whose write is running.
    pub(super) running: Vec<(u64, Vec<u8>)>,
    pub(super) stage: Stage,
}

/// The table.
#[derive(Debug)]
pub(super) enum What {
    /// A refcount block, by its number and place.
    Block { index: u64, at: HostOffset },
    /// The refcount table.
    Table { words: Vec<u64>, at: HostOffset, clusters: u32 },
    /// The active L1 table. It does not change meanwhile.
    L1 { words: Vec<u64>, at: HostOffset, size: u64 },
}

/// The stages of a move.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stage {
    Writing,
    Syncing { stamp: u64 },
    Pointing { block: Block, number: u64 },
    SyncingPointer { stamp: u64 },
}
