//! What the table stands on. The model in `tests/iotlb_loom.rs` puts something smaller that loom watches in its place.

pub(super) use std::sync::atomic::{AtomicU64, Ordering};

/// Bits of the address that choose an entry in a node.
pub(super) const BITS: u32 = 9;
/// Levels of nodes: as many as a page number of 64 - 12 bits needs.
pub(super) const LEVELS: u32 = 6;
