//! The buffers that requests of an image may use at the same time.

use crate::buffer_pool::{BUFFER_BYTES, BufferPool, PoolLimits};
use std::sync::Arc;

/// The bytes of a buffer with zeroes. Most parts of clusters are shorter.
const ZEROES_BYTES: usize = 64 << 10;
/// The largest number of buffers with zeroes in use, so 1 MiB.
const ZEROES_MAX: usize = 16;
/// The largest number of buffers of copies in use, so 16 MiB.
const COPIES_MAX: usize = 64;
/// The bytes of all buffers for compressed clusters in use, unless that is less than two buffers.
const DECODE_BYTES: usize = 16 << 20;
/// The largest number of buffers of a kind kept for reuse.
const KEPT_MAX: usize = 4;

/// The pools of an image.
///
/// A request that has a buffer of one pool may wait for one of a later pool, never of the same or an earlier
/// one. The bounce buffers of the file come last. So each wait ends.
#[derive(Debug)]
pub(super) struct Pools {
    /// Zeroes to write as data.
    pub(super) zeroes: Arc<BufferPool>,
    /// Pieces of copies.
    pub(super) copies: Arc<BufferPool>,
    /// Each buffer has room for a cluster, and behind it for its compressed bytes, which are at most two
    /// clusters.
    pub(super) decode: Arc<BufferPool>,
}

impl Pools {
    /// Makes the pools of an image with clusters of `cluster` bytes. They take memory when they are used.
    pub(super) fn new(cluster: u64) -> Self {
        let decode_bytes = 3 * cluster as usize;
        Self {
            zeroes: pool(ZEROES_BYTES, ZEROES_MAX),
            copies: pool(BUFFER_BYTES, COPIES_MAX),
            decode: pool(decode_bytes, (DECODE_BYTES / decode_bytes).max(2)),
        }
    }
}

fn pool(bytes: usize, in_use_max: usize) -> Arc<BufferPool> {
    let align = rustix::param::page_size();
    Arc::new(BufferPool::of(PoolLimits { bytes, align, in_use_max, kept_max: KEPT_MAX.min(in_use_max) }))
}
