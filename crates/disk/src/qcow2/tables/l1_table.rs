//! The active L1 table, and the copies of shared L2 tables.

use super::kept_errors::KeptErrors;
use crate::qcow2::format::geometry::{HostCluster, HostOffset};
use std::collections::HashMap;

/// The active L1 table.
#[derive(Debug)]
pub(super) struct L1 {
    pub(super) words: Vec<u64>,
    pub(super) at: HostOffset,
    /// Entries that are not written, with the numbers of their changes.
    pub(super) unwritten: HashMap<u64, u64>,
    /// Shared L2 tables that are copied, by the number of their L1 entry.
    pub(super) copies: HashMap<u64, TableCopy>,
    /// Errors of such copies for the requests that wait.
    pub(super) failed: KeptErrors<u64>,
}

/// A shared L2 table that is copied.
#[derive(Debug)]
pub(super) struct TableCopy {
    pub(super) old: HostOffset,
    pub(super) new: HostCluster,
    pub(super) stage: Stage,
}

#[derive(Debug)]
pub(super) enum Stage {
    /// A unit is read or written.
    Unit { offset: u64 },
    /// The sync is running.
    Syncing { stamp: u64 },
}

/// The state of the L2 table for a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TableState {
    /// Only the active L1 table refers to it.
    Own(HostOffset),
    /// There is none.
    Absent,
    /// It is shared.
    Shared(HostOffset),
    Bad,
}

impl L1 {
    pub(super) fn new(bytes: &[u8], at: HostOffset) -> Self {
        let words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_be_bytes(*word)).collect();
        Self { words, at, unwritten: HashMap::new(), copies: HashMap::new(), failed: KeptErrors::default() }
    }
}
