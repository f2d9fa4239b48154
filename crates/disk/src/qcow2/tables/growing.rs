//! The state of a virtual disk that grows.

/// The disk is about to have this size.
#[derive(Clone, Copy, Debug)]
pub(super) struct Growing {
    pub(super) size: u64,
    /// The entries of the larger L1 table. 0: it is large enough.
    pub(super) entries: u64,
    pub(super) stage: Stage,
}

/// The stages of growing.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stage {
    /// The L1 table needs clusters, or moves.
    Moving,
    /// The header is written.
    Header { number: u64 },
    /// The sync is running.
    Syncing { stamp: u64 },
}
