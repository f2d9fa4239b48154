//! The buffers that requests of an image may use at the same time.

use crate::buffer_pool::{BUFFER_BYTES, BufferPool, PoolLimits};
use std::sync::Arc;

/// The bytes of a buffer with zeroes. Most parts of clusters are shorter.
const ZEROES_BYTES: usize = 64 << 10;
/// The largest number of buffers with zeroes in use, so 1 MiB.
const ZEROES_MAX: usize = 16;
/// The bytes of all buffers of copies in use.
const COPIES_BYTES: usize = 16 << 20;
/// The bytes of all buffers for compressed clusters in use, unless that is less than two buffers.
const DECODE_BYTES: usize = 16 << 20;
/// The bytes of the buffers of a kind that are kept for reuse: 32 copies of clusters of 64 KiB. A new buffer
/// costs more than the rest of such a copy, because the kernel fills its pages with zeroes.
const KEPT_BYTES: usize = 2 << 20;

/// The pools of an image.
///
/// A request that has a buffer of one pool may wait for one of a later pool, never of the same or an earlier
/// one. The bounce buffers of the file come last. So each wait ends.
#[derive(Debug)]
pub(super) struct Pools {
    /// Zeroes to write as data.
    pub(super) zeroes: Arc<BufferPool>,
    /// Pieces of copies. Each is a cluster, or a part of a large one.
    pub(super) copies: Arc<BufferPool>,
    /// Each buffer has room for a cluster, and behind it for its compressed bytes, which are at most two
    /// clusters.
    pub(super) decode: Arc<BufferPool>,
}

impl Pools {
    /// Makes the pools of an image with clusters of `cluster` bytes. They take memory when they are used.
    pub(super) fn new(cluster: u64) -> Self {
        let decode_bytes = 3 * cluster as usize;
        let copy_bytes = (cluster as usize).clamp(rustix::param::page_size(), BUFFER_BYTES);
        Self {
            zeroes: pool(ZEROES_BYTES, ZEROES_MAX),
            copies: pool(copy_bytes, COPIES_BYTES / copy_bytes),
            decode: pool(decode_bytes, (DECODE_BYTES / decode_bytes).max(2)),
        }
    }
}

fn pool(bytes: usize, in_use_max: usize) -> Arc<BufferPool> {
    let align = rustix::param::page_size();
    let kept_max = (KEPT_BYTES / bytes).clamp(2, in_use_max);
    Arc::new(BufferPool::of(PoolLimits { bytes, align, in_use_max, kept_max }))
}
